"""Steps that move whole rows: embeddings, residual stream, per-layer inputs, and which rows go on.

Fields and words are those of `step_layouts`.
"""

from __future__ import annotations

from typing import NamedTuple


class Embed(NamedTuple):
    """Read the embeddings of the forward's tokens."""

    out: int
    """Address of float32[rows, width], of all rows."""
    out_stride: int
    """Bytes from a row of `out` to the next."""
    codes: int
    """Address of the table's codes."""
    scales: int
    """Address of the table's scales."""
    half: int
    """1 where the scales are fp16, 0 where they are float32."""
    bits: int
    """Of a code."""
    group: int
    """Numbers that share a scale; 0 where the codes are plain numbers."""
    width: int
    """Of a row of the table."""
    factor: int
    """What all embeddings are multiplied with, as the bits of a float32."""


class Residual(NamedTuple):
    """Add a normed output to the residual stream, and give it to a matrix; a part without an address is left out."""

    row_set: int
    h: int
    """Address of float32[rows, width], the residual stream."""
    width: int
    eps: int
    """Of the norms, as the bits of a float32."""
    x: int = 0
    """Address of float32[rows, width], added after its norm; 0 where nothing is added."""
    weight: int = 0
    """Address of float32[width], of the norm of x."""
    scalar: int = 0
    """Address of the float32 that the sum is multiplied with; 0 for 1."""
    next_weight: int = 0
    """Address of float32[width], of the norm before quantisation; 0 where the sum itself is quantised."""
    out_slot: int = 0
    """The slot with the address of float32[rows, width] that the normed rows are written to as well; 0 for none."""
    activations: int = 0
    """Address of the activations [rows, width]; 0 where nothing is quantised."""
    form: int = 0
    """Of the activations: see `inputs`."""


class PerLayer(NamedTuple):
    """Combine the per-layer embeddings of the tokens with the per-layer projection of their hidden state."""

    context: int
    """Address of float32[rows, layers, size], of all rows: the projection, and the result in its place."""
    layers: int
    size: int
    """Of a layer's part."""
    eps: int
    """Of the norm, as the bits of a float32."""
    weight: int
    """Address of float32[size], of the norm of a layer's part of the projection."""
    codes: int
    """Address of the table's codes; its width is layers * size."""
    scales: int
    """Address of the table's scales."""
    half: int
    """1 where the scales are fp16, 0 where they are float32."""
    bits: int
    """Of a code."""
    group: int
    """Numbers that share a scale; 0 where the codes are plain numbers."""
    context_factor: int
    """What the projection is multiplied with before its norm, as the bits of a float32."""
    row_factor: int
    """What the table's row is multiplied with, as the bits of a float32."""
    factor: int
    """What the sum is multiplied with, as the bits of a float32."""
    scratch: int
    """Address of float32[threads, layers * size]."""


class Select(NamedTuple):
    """Copy the wanted ones of all rows."""

    source: int
    """Address of float32[all rows, width]."""
    out: int
    """Address of float32[wanted rows, width]."""
    width: int
