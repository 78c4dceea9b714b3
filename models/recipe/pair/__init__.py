"""The reference pair: the target and its forward, texts that it writes, its drafter, and both on disk with their card.

Read `target` first, then `drafter`.
"""
