"""Steps of a layer's experts: which experts take which rows, and their sum.

Fields and words are those of `step_layouts`.
"""

from __future__ import annotations

from typing import NamedTuple


class Score(NamedTuple):
    """Score every expert for every row, and quantise the rows for those that will be chosen."""

    row_set: int
    h: int
    """Address of float32[rows, width], the residual stream."""
    width: int
    eps: int
    """Of the norms, as the bits of a float32."""
    weights: int
    """Address of float32[experts, width], the router, times the weight of its norm."""
    experts: int
    scores: int
    """Address of float32[rows, experts]."""
    norm: int
    """Address of float32[width], of the norm before quantisation."""
    activations: int
    """Address of the rows' activations, each as if it were alone."""
    form: int
    """Of the activations, for the experts' matrices: see `inputs`."""


class Choose(NamedTuple):
    """Choose the experts of each row, and sort all pairs of a row and an expert by expert."""

    row_set: int
    scores: int
    """Address of float32[rows, experts]."""
    experts: int
    top: int
    """Experts of a row."""
    scale: int
    """Address of float32[experts], that weights are multiplied with."""
    weights: int
    """Address of float32[rows, top], of each row's experts, the best first; with room for 16 more."""
    chosen: int
    """Address of int64[rows, top], their numbers, and then the places of these pairs among those sorted."""
    groups: int
    """Address of int64[3 + 2 * experts]: how many experts were chosen; the number of each and its first pair; and, as
    if there were one more, the number of pairs."""
    pairs: int
    """Address of int64[rows * top], the row of each pair."""
    counts: int
    """Address of int64[experts], working memory."""


class Spread(NamedTuple):
    """Copy activations, int8 with a scale for every block, to where experts read them, which have rows side by side."""

    groups: int
    pairs: int
    """As in `Choose`."""
    source: int
    """Address of the rows' activations, each as if it were alone."""
    out: int
    """Address of activations, in groups of the rows of an expert."""
    blocks: int
    """Of 32, in a row."""


class Mix(NamedTuple):
    """x = norm(x) + norm(sum of weight * output of a row's experts)."""

    row_set: int
    x: int
    """Address of float32[rows, width]: the dense block's output, and the sum in its place."""
    width: int
    eps: int
    """Of the norms, as the bits of a float32."""
    weight: int
    """Address of float32[width], of the norm of x."""
    outputs: int
    """Address of float32[rows * top, width], of the pairs as they are sorted; overwritten."""
    norm: int
    """Address of float32[width], of the norm of the experts' sum."""
    weights: int
    chosen: int
    top: int
    """As in `Choose`."""
