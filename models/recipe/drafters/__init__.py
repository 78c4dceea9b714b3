"""Drafters, heads and draft models for a target that is trained already, and what they learn from.

Read `states` first, which has the frozen target; then `lessons`, `replies`, `rounds` and `target_drafter` for an MTP
drafter, `heads` for heads, `draft_model` for a model that reads the text itself.
"""
