"""Drafters, heads and draft models for a target that is trained already, and what they learn from.

Read `frozen_target` first, which all of them see; then `lessons`, `replies`, `rounds` and `target_drafter` for an MTP
drafter, `states` and `heads` for heads, `draft_model` for a model that reads the text itself.
"""
