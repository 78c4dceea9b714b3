"""Sizes that all layouts of weights and activations have in common."""

from __future__ import annotations

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Weights of a row, or activations, that lie side by side; those that are quantised in groups share a scale."""
