"""The layout of every kind of step.

A row of a plan is the number of the step's kind (its index in LAYOUTS), then the fields of its layout in order, then
zeros. Fields are integers (an address, a size, the number of a slot, the bits of a float32), or tuples of integers,
which stand in the place of the tuple. These fields mean the same in every layout:

- `row_set` is ALL, all new rows of the forward, or WANTED, the wanted ones; `rows` is their number.
- `activations` is the address of rows in the form that the matrix which reads them needs, and `form` is this form:
  see `activations`.
- `eps` is the epsilon of the step's norms, as the bits of a float32.
- `x` and `stride` of attention are the address of the first row's queries, float32[query_heads, size], and the
  bytes to the next row's; `size` is the numbers in a head, `kind` the kind of attention (0 full, 1 sliding), and
  `cache` the index, from CACHES on, of the keys' address in a sequence's record; the values' address is the next.

Layouts come by family: rows, matrices, shortlists of tokens, experts, attention, convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple, get_args, get_type_hints

# Steps on whole rows: embeddings, residual stream, per-layer inputs, selection of rows.


class Table(NamedTuple):
    """A table whose rows are read one by one, in the layout of the mapped file: see `tables`."""

    codes: int
    """Address of uint8[rows, width * bits / 8]; bfloat16 for 16 bits, float32 for 32."""
    scales: int
    """Address of fp16 or float32 [rows, width / group]."""
    minimums: int
    """Address of the groups' minimums, of the type and shape of the scales; 0 if they have none."""
    half: int
    """1 if the scales are fp16, 0 if they are float32."""
    bits: int
    """Bits of a code."""
    looked_up: int
    """Number of the table in `weight_format.TABLES` in which codes are looked up; 0 if the weight of a code is the code
    less that of zero."""
    group: int
    """Numbers that share a scale; 0 if the codes are plain numbers."""
    width: int
    """Numbers of a row."""


class Embed(NamedTuple):
    """out = embeddings of the forward's tokens, times a factor."""

    out: int
    """Address of float32[rows, width], all rows."""
    out_stride: int
    """Bytes from a row of `out` to the next."""
    table: Table
    factor: int
    """Factor of all embeddings, as the bits of a float32."""


class Residual(NamedTuple):
    """Add a normed output to the residual stream, then norm and quantise the sum for a matrix.

    A part whose address is 0 is left out.
    """

    row_set: int
    h: int
    """Address of float32[rows, width], the residual stream."""
    width: int
    eps: int
    x: int = 0
    """Address of float32[rows, width], added after its norm; 0 to add nothing."""
    weight: int = 0
    """Address of float32[width], the weight of the norm of x; 0 to add x itself."""
    scalar: int = 0
    """Address of a float32, the factor of the sum; 0 for the factor 1."""
    next_weight: int = 0
    """Address of float32[width], the weight of the norm before quantisation; 0 to quantise the sum itself."""
    out_slot: int = 0
    """The slot with the address of float32[rows, width] to which the normed rows are written too, or without a norm the
    sums; 0 for none."""
    activations: int = 0
    """Address of the activations [rows, width]; 0 to quantise nothing."""
    form: int = 0


class PerLayer(NamedTuple):
    """context = (norm(context * context_factor) + per-layer embeddings of the tokens * row_factor) * factor."""

    context: int
    """Address of float32[rows, layers, size], all rows: the per-layer projection, replaced by the result."""
    layers: int
    size: int
    """Numbers of a layer's part."""
    eps: int
    weight: int
    """Address of float32[size], the weight of the norm of a layer's part of the projection."""
    table: Table
    """Its rows have layers * size numbers."""
    context_factor: int
    """Factor of the projection before its norm, as the bits of a float32."""
    row_factor: int
    """Factor of the table's row, as the bits of a float32."""
    factor: int
    """Factor of the sum, as the bits of a float32."""
    scratch: int
    """Address of working memory, float32[threads, layers * size]."""


class Select(NamedTuple):
    """out = the wanted rows of `source`."""

    source: int
    """Address of float32[all rows, width]."""
    out: int
    """Address of float32[wanted rows, width]."""
    width: int


# Steps that multiply rows with a matrix, and the functions between two of them.


SAME, SILU, RELU, GELU, CLAMPED = range(5)
"""The functions of `Activate` and `Gated`; GELU in its tanh approximation, CLAMPED that of `clamped_swiglu`."""


class PackedMatrix(NamedTuple):
    """A packed matrix: tiles of 16 output rows, each of `blocks` blocks of 32 weights. Layout: `formats`."""

    product: int
    """Kind of product, GROUPS4 to PLAIN."""
    tile_bytes: int
    """Bytes of a tile's weights."""
    weights: int
    """Address of the first tile's weights."""
    scales: int
    """Address of the first tile's scales: fp16[block][16] for weights in groups, fp16[block][2][16] if minimums follow
    the scales of each block, else its epilogue."""
    blocks: int
    """Blocks of a row."""
    bias: int
    """Address of float32[tiles, 16], added to the products; 0 to add nothing."""
    streamed: int
    """1 if products of a few rows prefetch the weights into level 1 alone, so that they leave the caches below it as
    they are; 0 if into level 2."""


class Project(NamedTuple):
    """out = activations @ matrix.T + bias, with a softcap if `cap` is not 0."""

    row_set: int
    matrix: PackedMatrix
    activations: int
    form: int
    tiles: int
    """Tiles of 16 outputs in the matrix."""
    out: int
    """Address of float32[rows, 16 * tiles]; ignored with an `out_slot`."""
    out_slot: int
    """The slot with the address of the output; 0 if `out` is the address."""
    stride: int
    """Bytes from a row of the output to the next."""
    cap: int
    """c > 0 of the softcap c * tanh(output / c), or 0 for none, as the bits of a float32."""
    groups: int = 0
    """Address of the groups of rows, each with its own matrix of this size: see `Choose`. 0 if one matrix multiplies
    all rows."""


class Gated(NamedTuple):
    """out = quantised f(activations @ gate.T) * factor, where the factor is activations @ up.T or a given one.

    Both products have the bias of their rows. CLAMPED is a function of both factors.
    """

    row_set: int
    matrix: PackedMatrix
    """For each unit two tiles of gate, then two of up without a `factor`."""
    activations: int
    form: int
    units: int
    """Blocks of 32 outputs in a row."""
    out: int
    """Address of the activations [rows, 32 * units] that are written."""
    out_form: int
    """The form of `out`."""
    factor: int
    """Address of the factor, float32[rows, 32 * units]; 0 if it is the up part of the matrix."""
    factor_stride: int
    """Bytes from a row of the factor to the next; 0 without one."""
    function: int
    """GELU, SILU or CLAMPED."""
    groups: int = 0
    """As in `Project`; with groups, `out` is in groups too."""

    def tiles(self) -> int:
        """Tiles of 16 outputs in the matrix."""
        return self.units * (2 if self.factor else 4)


class Head(NamedTuple):
    """Norm the heads of queries, keys and values, rotate queries and keys, scale queries; write keys and values to the
    caches.

    A part whose address is 0 is left out.
    """

    row_set: int
    x: int
    """Address of the first row's heads, float32[head, size]: queries, then keys, then values if the layer has them."""
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    query_norm: int
    """Address of float32[size], the weight of the norm."""
    key_norm: int
    """Address of float32[size]."""
    value_norm: int
    """Address of float32[size]."""
    value: int
    """Index among a row's numbers of the first value; that of the first key if the keys are the values too; 0 if the
    layer reads another layer's keys and values."""
    rotary: int
    """Offset in bytes of the layer's cosines in a row of cosines, and of its sines; -1 if it does not rotate."""
    scale: int
    """Factor of the queries, as the bits of a float32."""
    kind: int
    cache: int
    eps: int


class WholeNorm(NamedTuple):
    """Norm a row's queries, all heads together, and its keys, in place; a part whose norm is 0 is left out."""

    row_set: int
    x: int
    """Address of the first row's heads, float32[head, size]: queries, then keys."""
    stride: int
    query_width: int
    """Numbers of a row's queries."""
    key_width: int
    query_norm: int
    """Address of float32[query_width], the weight of the norm."""
    key_norm: int
    """Address of float32[key_width]."""
    eps: int


class Activate(NamedTuple):
    """out = function(source) + added, where `added` is the same for every row."""

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
    """Address of float32[width], added to every row; 0 to add nothing."""


# Steps of a shortlist: a drafter scores the tokens of a few clusters instead of the whole vocabulary.


class CentroidScores(NamedTuple):
    """out = centroids @ x: a score for every cluster of the vocabulary."""

    weights: int
    """Address of float32[clusters, width], the centroids."""
    clusters: int
    width: int
    x: int
    """Address of float32[width]."""
    out: int
    """Address of float32[clusters], the scores."""


class ChooseClusters(NamedTuple):
    """Choose the clusters with the best scores, for each row."""

    scores: int
    """Address of float32[rows, stride]."""
    clusters: int
    chosen: int
    """Address of int64[rows, top], the clusters, best first."""
    top: int
    rows: int
    stride: int
    """Numbers from a row of scores to the next."""


class CandidateLogits(NamedTuple):
    """Write the ids and logits of all tokens in the chosen clusters to the addresses in slots CANDIDATES and LOGITS."""

    table: Table
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
    """1 if the table's rows lie cluster by cluster, 0 if they lie in the order of token ids."""
    cap: int
    """As in `Project`."""


# Steps of a layer's experts: the choice of experts for each row, and the sum of their outputs.


class Score(NamedTuple):
    """scores = norm(h) @ router.T + bias, or the sigmoids of that; activations = quantised norm(h), which the experts
    read.
    """

    row_set: int
    h: int
    """Address of float32[rows, width], the residual stream."""
    width: int
    eps: int
    weights: int
    """Address of float32[experts, width], the router with the weight of its norm multiplied in."""
    experts: int
    scores: int
    """Address of float32[rows, experts]."""
    norm: int
    """Address of float32[width], the weight of the norm before quantisation."""
    activations: int
    """Address of the activations, each row in a group of its own; 0 to quantise nothing."""
    form: int
    """The form that the experts' matrices need."""
    bias: int
    """Address of float32[experts]; 0 to add nothing."""
    sigmoid: int
    """1 for sigmoids."""


class Choose(NamedTuple):
    """Choose the experts of each row, and sort all pairs of row and expert by expert.

    The weights of a row's experts are the softmax of their scores, with `of_all` that of the scores of all experts; or
    of sigmoids, these divided by their sum. With `selection`, experts are chosen by sigmoid + selection_bias, or by the
    softmax over all + selection_bias.
    """

    row_set: int
    scores: int
    """Address of float32[rows, experts]."""
    experts: int
    top: int
    """Number of experts of a row."""
    scale: int
    """Address of float32[experts], factors of the weights."""
    weights: int
    """Address of float32[rows, top], the weights of each row's experts, best first; with room for 16 more numbers."""
    chosen: int
    """Address of int64[rows, top]: first the experts' numbers, then the positions of these pairs in the sorted
    order."""
    groups: int
    """Address of int64[3 + 2 * experts]: the number of experts that were chosen; for each its number and its first
    pair; then, as the first pair of one more expert, the number of pairs."""
    pairs: int
    """Address of int64[rows * top], the row of each pair."""
    counts: int
    """Address of int64[experts], working memory."""
    selection: int = 0
    """Address of float32[experts], working memory; 0 to choose by scores."""
    selection_bias: int = 0
    """Address of float32[experts]; 0 with a `selection` of 0."""
    sigmoid: int = 0
    """Whether the scores are sigmoids, 0 or 1."""
    of_all: int = 0
    """Whether the softmax is over all experts, 0 or 1; 0 with a `selection`, and of sigmoids."""


class Spread(NamedTuple):
    """Copy activations in the form GROUPS so that the rows of each expert lie in groups of up to MAX_GROUP_ROWS."""

    groups: int
    pairs: int
    """As in `Choose`."""
    source: int
    """Address of the rows' activations, each row in a group of its own."""
    out: int
    """Address of activations, in the groups of each expert's rows."""
    blocks: int
    """Blocks of a row."""


class Mix(NamedTuple):
    """x = norm(x) + norm(sum over a row's experts of weight * output); without norms x = factor * x + that sum, or that
    sum.
    """

    row_set: int
    x: int
    """Address of float32[rows, width]: the dense block's output, replaced by the sum."""
    width: int
    eps: int
    weight: int
    """Address of float32[width], the weight of the norm of x; 0 for none."""
    outputs: int
    """Address of float32[rows * top, width], the outputs of the pairs in their sorted order; overwritten."""
    norm: int
    """Address of float32[width], the weight of the norm of the experts' sum; 0 with a `weight` of 0."""
    weights: int
    chosen: int
    top: int
    """As in `Choose`."""
    factors: int = 0
    """Address of float32[rows], the factor of each row of x; 0 with norms, and if x is only written."""


# Steps of attention: the choice of keys by lookups, and attention.


class LookUp(NamedTuple):
    """Choose the units of 32 positions that the rows' queries attend to, by table lookups over codes of the keys."""

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    codes: int
    """Index, from CACHES on, of the codes' address in a sequence's record; the codebooks' one is the next."""
    width: int
    """Numbers of a key that share a 4-bit code."""
    window: int
    """Newest positions that are always attended to."""
    begin: int
    """Positions that a row must see to use lookups; with fewer it attends to all."""
    least: int
    """Fewest units that are chosen."""
    most: int
    """Most units that are chosen."""
    left: int
    """Share of a row's softmax weight that may be left out, as the bits of a float32: units are chosen until less
    is."""
    chosen: int
    """Address of int64[rows, kv_heads, 1 + most]: the number of chosen units, or -1 for all positions; then the
    units."""


class Attend(NamedTuple):
    """activations = softmax(queries @ keys.T) @ values, quantised.

    With `chosen` over the units that a `LookUp` has chosen, the first positions and the newest. With `codes`, but not
    `chosen`, over all positions, with scores from table lookups except for the first positions and the newest. With
    neither over all positions, exactly; fields after `softcap` are 0. With `sinks`, a head's softmax has one more
    score, of a position without a value; with `softcap`, the other scores are capped.
    """

    row_set: int
    x: int
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    kind: int
    cache: int
    activations: int
    """Address of the activations [rows, query_heads * size] that are written."""
    form: int
    sinks: int = 0
    """Address of float32[query_heads], the score of each head's sink; 0 if there are none."""
    softcap: int = 0
    """Bits of the float32 c of c * tanh(score / c); 0 for none."""
    window: int = 0
    chosen: int = 0
    most: int = 0
    codes: int = 0
    width: int = 0
    begin: int = 0
    """All as in `LookUp`."""


# The step of short convolutions.


class Convolve(NamedTuple):
    """activations = C * (the sum over j < window of tap j times the product B * x of j positions before), quantised; or
    with neither B nor C, out = silu(that sum of x), or sums = that sum of x.

    A row's own product, or x, is written to its sequence's cache.
    """

    row_set: int
    x: int
    """Address of the first row's B, C and x, float32[3, channels], or of x, float32[channels]; after it are the sums,
    float32[channels], unless they have an address of their own."""
    stride: int
    """Bytes to the next row's."""
    channels: int
    taps: int
    """Address of float32[window, channels], the tap of a row's own position first."""
    window: int
    kind: int
    """Kind of attention whose cache has the same positions: 1, sliding."""
    cache: int
    """Index, from CACHES on, of the address of the products' first halves, float32[positions, channels / 2]; the
    address of the second ones is the next."""
    half: int
    """Bytes from one row of such a half to the next."""
    activations: int
    """Address of the activations [rows, channels] that are written; 0 with neither B nor C."""
    form: int
    sums: int = 0
    """Address of float32[rows, channels], the sums of x themselves; 0 for the other two forms."""
    gates: int = 0
    """Address of float32[rows, 2, heads]: the first of a row's two is written after the first half of its row in the
    cache, the second after the second half; 0 for none."""
    heads: int = 0


# The steps of the gated delta rule.


class Recur(NamedTuple):
    """out = the outputs of the value heads, whose states pass the rows: see `delta.recur`."""

    x: int
    """Address of the first row's queries and keys, float32[key_heads, key_dim] each, and values, float32[value_heads,
    value_dim]."""
    stride: int
    """Bytes to the next row's."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    scale: int
    """Factor of queries, as the bits of a float32."""
    gates: int
    """Address of float32[rows, 2, value_heads]: b and a."""
    decay: int
    dt_bias: int
    """Addresses of float32[value_heads]."""
    states: int
    """Index, from CACHES on, of the address of the present states in a sequence's record; that of the following ones is
    the next."""
    cache: int
    taps: int
    window: int
    half: int
    """The fields of the convolution, whose cache has what the UNREAD rows are passed by: see `Convolve`."""
    out: int
    """Address of float32[rows, value_heads * value_dim]."""
    tiled: int
    """Whether value head i has key head i % key_heads, not i * key_heads / value_heads."""


class Gate(NamedTuple):
    """activations = quantised x * sigmoid(gate); with a norm of every head, quantised norm(x) * silu(gate)."""

    row_set: int
    x: int
    """Address of float32[rows, width]."""
    width: int
    gate: int
    """Address of the first row's gate, float32[width]."""
    gate_stride: int
    """Bytes to the next row's."""
    activations: int
    """Address of the activations [rows, width] that are written."""
    form: int
    norm: int = 0
    """Address of float32[size], the weight of the norm; 0 for none."""
    size: int = 0
    """Numbers of a head."""
    eps: int = 0


KernelStep = (
    Embed
    | Residual
    | PerLayer
    | Project
    | Gated
    | Head
    | Attend
    | Select
    | CentroidScores
    | ChooseClusters
    | CandidateLogits
    | LookUp
    | Score
    | Choose
    | Spread
    | Mix
    | Activate
    | Convolve
    | Recur
    | Gate
    | WholeNorm
)

LAYOUTS: tuple[type[KernelStep], ...] = get_args(KernelStep)
EMBED, RESIDUAL, PER_LAYER, PROJECT, GATED, HEAD, ATTEND, SELECT = range(8)
CENTROID_SCORES, CHOOSE_CLUSTERS, CANDIDATE_LOGITS, LOOK_UP, SCORE, CHOOSE, SPREAD, MIX, ACTIVATE = range(8, 17)
CONVOLVE, RECUR, GATE, WHOLE_NORM = range(17, 21)
"""The number of each kind in a plan: the index of its layout in LAYOUTS."""
WIDTH = 21
"""Numbers int64 in a row of a plan."""


def to_row(step: KernelStep) -> tuple[int, ...]:
    """A step as a row of a plan."""
    numbers = [number for field in step for number in (field if isinstance(field, tuple) else (field,))]
    return LAYOUTS.index(type(step)), *numbers, *(0,) * (WIDTH - 1 - len(numbers))


def from_row(row: Iterable[int]) -> KernelStep:
    """The step in a row of a plan."""
    numbers = map(int, row)
    layout = LAYOUTS[next(numbers)]
    return layout(*(kind(*islice(numbers, 1 if kind is int else len(kind._fields))) for kind in field_types(layout)))


def field_types(layout: type[Any]) -> list[Any]:
    """The types of a layout's fields: int, or a tuple of integers."""
    return list(get_type_hints(layout).values())
