"""Steps that multiply rows with a matrix, and the functions between two of them.

Fields and words are those of `step_layouts`.
"""

from __future__ import annotations

from typing import NamedTuple

SAME, SILU, RELU = range(3)
"""What an `Activate` puts its numbers through."""


class Project(NamedTuple):
    """Multiply activations with a packed matrix."""

    row_set: int
    product: int
    """The kind of the product: see `codes`."""
    tile_bytes: int
    """Of a tile's codes."""
    weights: int
    """Address of the matrix's codes in the pack."""
    scales: int
    """Address of its scales in the pack: see `project.PackedMatrix`."""
    activations: int
    """Address of the activations [rows, 32 * blocks]."""
    form: int
    """Of the activations: see `inputs`."""
    blocks: int
    """Blocks of 32 in a row of activations."""
    tiles: int
    """Tiles of 16 outputs in the matrix."""
    out: int
    """Address of float32[rows, 16 * tiles]; not used with an `out_slot`."""
    out_slot: int
    """The slot with the address of the output; 0 where `out` is the address."""
    stride: int
    """Bytes from a row of the output to the next."""
    cap: int
    """c > 0 in the softcap c * tanh(output / c), or 0 for none, as the bits of a float32."""
    groups: int = 0
    """Address of the groups of rows, each with a matrix of its own, all of this size (`experts`); 0 where there is one
    matrix for all rows."""


class Gated(NamedTuple):
    """Multiply activations with a packed gate, and quantise gelu(gate) times another factor."""

    row_set: int
    product: int
    """The kind of the product: see `codes`."""
    tile_bytes: int
    """Of a tile's codes."""
    weights: int
    """Address of the matrix's codes in the pack: for each unit two tiles of gate, then two of up without a `factor`."""
    scales: int
    """Address of its scales in the pack: see `project.PackedMatrix`."""
    activations: int
    """Address of the activations [rows, 32 * blocks]."""
    form: int
    """Of the activations: see `inputs`."""
    blocks: int
    """Blocks of 32 in a row of activations."""
    units: int
    """Blocks of 32 outputs in a row."""
    out: int
    """Address of the activations [rows, 32 * units] that are written."""
    out_form: int
    """Of those: see `inputs`."""
    factor: int
    """Address of the other factor, float32[rows, 32 * units]; 0 where it is the matrix's own up."""
    factor_stride: int
    """Bytes from a row of the factor to the next; 0 without one."""
    groups: int = 0
    """As in `Project`; `out` is then in groups too."""

    def tiles(self) -> int:
        """Tiles of 16 outputs in the matrix."""
        return self.units * (2 if self.factor else 4)


class Head(NamedTuple):
    """Norm and rotate the heads of queries and keys, norm those of values, and write keys and values to the caches."""

    row_set: int
    x: int
    """Address of a row's heads, float32[head, size]: queries, then keys, then values where the layer has them."""
    stride: int
    """Bytes from a row of x to the next."""
    query_heads: int
    kv_heads: int
    size: int
    """Numbers in a head."""
    query_norm: int
    """Address of float32[size]."""
    key_norm: int
    """Address of float32[size]; 0 where the layer reads another layer's keys and values."""
    value_norm: int
    """Address of float32[size]; 0 as `key_norm`."""
    value: int
    """Index in a row's numbers where the values begin: at the keys where those are the values too."""
    kind: int
    """Of attention: 0 for full, 1 for sliding."""
    cache: int
    """Index, from `slots.CACHES` on, of the keys' address in a sequence's record; the values' address is the next."""
    eps: int
    """Of the norms, as the bits of a float32."""


class Activate(NamedTuple):
    """Put numbers through a function, and add the same row to each of their rows."""

    row_set: int
    source: int
    """Address of float32[rows, width]."""
    out: int
    """Address of float32[rows, width]; may be the source."""
    width: int
    """A multiple of 16."""
    function: int
    """SAME, SILU or RELU."""
    added: int = 0
    """Address of float32[width], added to every row; 0 where nothing is."""
