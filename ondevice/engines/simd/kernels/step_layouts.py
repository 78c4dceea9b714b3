"""The layout of every kind of step: the fields of a row of a plan, as the plan's writer and the kernels use them.

A plan is int64[steps, WIDTH]. A row is the number of the step's kind, its index in LAYOUTS, then the fields of that
layout in their order, then zeros. All fields are integers: an address in bytes, a size, the number of a slot, or the
bits of a float32.

`rows` below is the row count of the step's row set: `slots.ALL`, all new rows of the forward, or `slots.WANTED`, the
wanted ones. "Activations" are rows in the form that the matrix wants that reads them: see `inputs`. The codes and
scales of a table are uint8[table rows, width * bits / 8] and fp16 or float32 [table rows, width / group].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from numba import types

from ondevice.engines.simd.kernels.jit import intrinsic
from ondevice.engines.simd.kernels.vector import I64


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


class LookUp(NamedTuple):
    """Choose the units of 32 positions that the rows' queries attend to, by table lookups over codes of the keys."""

    row_set: int
    x: int
    """Address of a row's queries, float32[query_heads, size]."""
    stride: int
    """Bytes from a row of x to the next."""
    query_heads: int
    kv_heads: int
    size: int
    """Numbers in a head."""
    codes: int
    """Index, from `slots.CACHES` on, of the codes' address in a sequence's record; the codebooks' one is the next."""
    width: int
    """Numbers of a key that share a code."""
    window: int
    """Newest positions that are always attended to."""
    begin: int
    """Positions that a row must see to look up; with fewer it attends to all."""
    least: int
    """Units that are chosen at least."""
    most: int
    """And at most."""
    left: int
    """Of a row's weights, this share may be left out, as the bits of a float32: then no more units are chosen."""
    chosen: int
    """Address of int64[rows, kv_heads, 1 + most], the number of chosen units, -1 for all of them, and their numbers."""


class Attend(NamedTuple):
    """Attention of the rows' queries over their sequences' caches, quantised."""

    row_set: int
    x: int
    """Address of a row's queries, float32[query_heads, size]."""
    stride: int
    """Bytes from a row of x to the next."""
    query_heads: int
    kv_heads: int
    size: int
    """Numbers in a head."""
    kind: int
    """Of attention: 0 for full, 1 for sliding."""
    cache: int
    """Index, from `slots.CACHES` on, of the keys' address in a sequence's record; the values' address is the next."""
    activations: int
    """Address of the activations [rows, query_heads * size] that are written."""
    form: int
    """Of the activations: see `inputs`."""


class AttendChosen(NamedTuple):
    """`Attend`, to what a `LookUp` has chosen, to the first positions and to the newest."""

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    kind: int
    cache: int
    activations: int
    form: int
    """All as in `Attend`."""
    window: int
    most: int
    chosen: int
    """As in `LookUp`."""


class AttendLookedUp(NamedTuple):
    """`Attend`, with scores by table lookups but for the first positions and the newest."""

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    kind: int
    cache: int
    activations: int
    form: int
    """All as in `Attend`."""
    codes: int
    width: int
    window: int
    begin: int
    """All as in `LookUp`."""


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


class Select(NamedTuple):
    """Copy the wanted ones of all rows."""

    source: int
    """Address of float32[all rows, width]."""
    out: int
    """Address of float32[wanted rows, width]."""
    width: int


class CentroidScores(NamedTuple):
    """Score every cluster of the vocabulary by its centroid."""

    weights: int
    """Address of float32[clusters, width], the centroids."""
    clusters: int
    width: int
    x: int
    """Address of float32[width]."""
    out: int
    """Address of float32[clusters], the scores."""


class Shortlist(NamedTuple):
    """Choose the clusters with the best scores, for each of some rows."""

    scores: int
    """Address of float32[rows, stride]."""
    clusters: int
    chosen: int
    """Address of int64[rows, top], the clusters, best first."""
    top: int
    rows: int
    stride: int
    """Scores from a row to the next."""


SAME, SILU, RELU = range(3)
"""What an `Activate` puts its numbers through."""


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


class CandidateLogits(NamedTuple):
    """The ids and logits of all tokens in the chosen clusters, written to the slots CANDIDATES and LOGITS."""

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
    x: int
    """Address of float32[rows, width]."""
    chosen: int
    """Address of int64[rows, top], the clusters."""
    top: int
    per_cluster: int
    """Tokens in a cluster."""
    ids: int
    """Address of int64[clusters, per_cluster], the clusters' tokens."""
    rows: int
    clustered: int
    """1 where the table's rows lie cluster by cluster, 0 where they lie in the order of their tokens."""
    cap: int
    """As in `Project`."""


Step = (
    Embed
    | Residual
    | PerLayer
    | Project
    | Gated
    | Head
    | Attend
    | Select
    | CentroidScores
    | Shortlist
    | CandidateLogits
    | LookUp
    | AttendChosen
    | AttendLookedUp
    | Score
    | Choose
    | Spread
    | Mix
    | Activate
)

LAYOUTS: tuple[type[Step], ...] = (
    Embed,
    Residual,
    PerLayer,
    Project,
    Gated,
    Head,
    Attend,
    Select,
    CentroidScores,
    Shortlist,
    CandidateLogits,
    LookUp,
    AttendChosen,
    AttendLookedUp,
    Score,
    Choose,
    Spread,
    Mix,
    Activate,
)
EMBED, RESIDUAL, PER_LAYER, PROJECT, GATED, HEAD, ATTEND, SELECT = range(8)
CENTROID_SCORES, SHORTLIST, CANDIDATE_LOGITS, LOOK_UP, ATTEND_CHOSEN, ATTEND_LOOKED_UP = range(8, 14)
SCORE, CHOOSE, SPREAD, MIX, ACTIVATE = range(14, 19)
"""Index of each layout in LAYOUTS: the number of its kind in a plan."""
WIDTH = 16
"""int64 in a row of a plan."""


def to_row(step: Step) -> tuple[int, ...]:
    """A step as a plan has it, without the zeros at its end."""
    return LAYOUTS.index(type(step)), *step


def from_row(row: Iterable[int]) -> Step:
    """The step in a row of a plan."""
    kind, *fields = map(int, row)
    layout = LAYOUTS[kind]
    return layout(*fields[: len(layout._fields)])


@intrinsic
def read_step(typing: Any, layout: Any, row: Any) -> Any:
    """In a kernel: the fields of a step, read_step(layout, row: int64[WIDTH]), whose kind is known to be `layout`'s."""
    kind = layout.instance_class
    fields = types.NamedUniTuple(types.int64, len(kind._fields), kind)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(row)(context, builder, values[1]).data
        places = (context.get_constant(types.intp, place) for place in range(1, 1 + len(fields)))
        numbers = [builder.load(builder.gep(data, [place], source_etype=I64), typ=I64) for place in places]
        return context.make_tuple(builder, fields, numbers)

    return fields(layout, row), generate
