"""The contract between the engine's Python code and its kernels: functions, steps, slots and sizes.

Both sides import it, so it imports no compiler. In this order:

- the kernels that Python calls;
- steps: a plan is int64[steps, WIDTH], and each row is a step, whose fields are addresses and sizes;
- slots and records: what changes between forwards while the plan stays the same;
- sizes of matrices and activations; of attention's units, working memory and tables;
- instruction sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from ondevice.arrays import Float32Array, Float64Array, Int64Array
from ondevice.bundle_format.weight_format import BY_ROW, INT4, INT4_AFFINE, INT4_TABLE, INT8
from ondevice.native import library
from ondevice.native.functions import entry

# The kernels that Python calls: their declarations. The kernels themselves are in modules that need numba.

_HERE = "ondevice.engines.simd.kernels"

ARRIVALS, CLAIMS, SLEEPERS, TICKS = 0, 1, 3, 4
"""Lines of the counters of `run`, a cache line each: 0, arrivals at the barrier; 1 and 2, claims of work; 3, threads
that sleep at the barrier; from 4 on, for each thread, the ticks that it ran and the ticks that it waited, summed over
all runs, and how often it reads the arrivals before it sleeps."""


@entry("forward", "i64[,] i64[] i64[,] i64[] i64 i64 i64 i64 i64", f"{_HERE}.forward")
def run(
    plan: Int64Array, state: Int64Array, draft_plan: Int64Array, draft_state: Int64Array,
    thread: int, threads: int, counters: int, before: int, scratch: int,
) -> Any:  # fmt: skip
    """Run one thread's share of every step of a plan, once or several times; returns the number of arrivals at the
    barrier then.
    """


@entry("forward", "i64 i64", f"{_HERE}.isa.memory")
def spin_for_next(counter: int, beyond: int) -> None:
    """Spin, 0.5 ms at most, until there are more than `beyond` arrivals at the barrier."""


@entry("packing", "i64 i64 i64 i64 i64", f"{_HERE}.formats")
def pack_tile(bits: int, codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack up to 16 rows of weights."""


@entry("packing", "i64 f64 i64 i64", f"{_HERE}.formats")
def pack_epilogue(factors: int, step: float, rows: int, out: int) -> None:
    """Write the epilogue of a tile."""


@entry("packing", "i64 i64 i64 i64 i64 i64", f"{_HERE}.formats")
def pack_scales(scales: int, rows: int, blocks: int, out: int, stride: int, scratch: int) -> None:
    """Write the scales or minimums of a tile, as fp16[blocks, 16]."""


@entry("forward", "i64 i64 i64 i64[] i64 i64 i64", f"{_HERE}.attention.query_key_value")
def move_rows(bits: int, keys: int, values: int, source: Int64Array, first: int, kv_heads: int, head_dim: int) -> None:
    """Copy row `source[i]` of a layer's cache, of 16 or 8 bits, to row `first + i`."""


@entry("forward", "f32[,,] f32[,,,] i64 i64 i64", f"{_HERE}.attention.key_codes")
def encode(keys: Float32Array, codebooks: Float32Array, first: int, out: int, stride: int) -> None:
    """Write the 4-bit codes of keys with positions from `first` on."""


@entry("forward", "f32[,] f32[,,] i64 f64[,] i64[]", f"{_HERE}.attention.key_codes")
def learn(keys: Float32Array, codebook: Float32Array, steps: int, sums: Float64Array, members: Int64Array) -> None:
    """Learn the codebook of a KV head from keys."""


@entry("export", "i64 i64 f32[,]", f"{_HERE}.activations")
def read_groups(activations: int, blocks: int, out: Float32Array) -> None:
    """Write the numbers that rows of activations in the form GROUPS stand for to float32[rows, 32 * blocks]."""


@entry("export", "i64 i64 i64 i64 i64", f"{_HERE}.rows")
def subtract_product(out: int, left: int, right: int, stride: int, rows: int) -> None:
    """out[rows, 32] -= left[rows, 32] @ right[32, 32], all float32, with `stride` bytes from row to row."""


CHAINS, VECTORS = 12, 8
"""Number of independent sums of `dots`, more than any CPU has dot products in flight; and of vectors of weights whose
products are added to each in a turn, as many as a block has."""


@entry("roofline", "i64 i64 i64", f"{_HERE}.roofline")
def read(data: int, size: int, out: int) -> None:
    """Read `size` bytes of memory."""


@entry("roofline", "i64 i64", f"{_HERE}.roofline")
def dots(count: int, out: int) -> None:
    """Compute `count` times VECTORS dot products in each of CHAINS sums."""


# Steps: the layout of every kind of step.
#
# A row of a plan is the number of the step's kind (its index in LAYOUTS), then the fields of its layout in order, then
# zeros. Fields are integers (an address, a size, the number of a slot, the bits of a float32), or tuples of integers,
# which stand in the place of the tuple. These fields mean the same in every layout:
#
# - `row_set` is ALL, all new rows of the forward, or WANTED, the wanted ones; `rows` is their number.
# - `activations` is the address of rows in the form that the matrix which reads them needs, and `form` is this form:
#   see `activations`.
# - `eps` is the epsilon of the step's norms, as the bits of a float32.
# - `x` and `stride` of attention are the address of the first row's queries, float32[query_heads, size], and the
#   bytes to the next row's; `size` is the numbers in a head, `kind` the kind of attention (0 full, 1 sliding), and
#   `cache` the index, from CACHES on, of the keys' address in a sequence's record; the values' address is the next.
#
# Layouts come by family: rows, matrices, shortlists of tokens, experts, attention.

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
    """1 if the weight of a code is looked up in `weight_format.LEVELS`, 0 if it is the code less that of zero."""
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
    """The slot with the address of float32[rows, width] to which the normed rows are written too; 0 for none."""
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


SAME, SILU, RELU, GELU = range(4)
"""The functions of `Activate` and `Gated`; GELU in its tanh approximation."""


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


class Project(NamedTuple):
    """out = activations @ matrix.T, with a softcap if `cap` is not 0."""

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
    """out = quantised f(activations @ gate.T) * factor, where the factor is activations @ up.T or a given one."""

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
    """GELU or SILU."""
    groups: int = 0
    """As in `Project`; with groups, `out` is in groups too."""

    def tiles(self) -> int:
        """Tiles of 16 outputs in the matrix."""
        return self.units * (2 if self.factor else 4)


class Head(NamedTuple):
    """Add a bias to the heads of queries, keys and values, norm them, rotate queries and keys, scale queries; write
    keys and values to the caches.

    A part whose address is 0 is left out.
    """

    row_set: int
    x: int
    """Address of the first row's heads, float32[head, size]: queries, then keys, then values if the layer has them."""
    stride: int
    query_heads: int
    kv_heads: int
    size: int
    bias: int
    """Address of float32[head, size], added to a row."""
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
    """scores = norm(h) @ router.T; activations = quantised norm(h), for the experts that will be chosen."""

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
    """Address of the activations, each row in a group of its own."""
    form: int
    """The form that the experts' matrices need."""


class Choose(NamedTuple):
    """Choose the experts of each row, and sort all pairs of row and expert by expert."""

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
    """x = norm(x) + norm(sum over a row's experts of weight * output)."""

    row_set: int
    x: int
    """Address of float32[rows, width]: the dense block's output, replaced by the sum."""
    width: int
    eps: int
    weight: int
    """Address of float32[width], the weight of the norm of x."""
    outputs: int
    """Address of float32[rows * top, width], the outputs of the pairs in their sorted order; overwritten."""
    norm: int
    """Address of float32[width], the weight of the norm of the experts' sum."""
    weights: int
    chosen: int
    top: int
    """As in `Choose`."""


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
    neither over all positions, exactly; fields after `form` are 0.
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
    window: int = 0
    chosen: int = 0
    most: int = 0
    codes: int = 0
    width: int = 0
    begin: int = 0
    """All as in `LookUp`."""


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
)

LAYOUTS: tuple[type[KernelStep], ...] = get_args(KernelStep)
EMBED, RESIDUAL, PER_LAYER, PROJECT, GATED, HEAD, ATTEND, SELECT = range(8)
CENTROID_SCORES, CHOOSE_CLUSTERS, CANDIDATE_LOGITS, LOOK_UP, SCORE, CHOOSE, SPREAD, MIX, ACTIVATE = range(8, 17)
"""The number of each kind in a plan: the index of its layout in LAYOUTS."""
WIDTH = 20
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


# Slots of a forward, and the record of a sequence.
#
# Both are int64 arrays. A forward has one array of slots; each of its sequences has a record with its rows, its tree
# and the addresses of its caches. The rows of a sequence are neighbours in both row sets, in the order of the records.
# Where a field exists for each kind of attention, full attention comes first, then sliding attention.

MAX_ROWS = 512
"""Most rows of a forward. The upper layers run on the wanted rows only and are read once per forward, so a prompt takes
3 % less time in one forward of 512 rows than in two of 256."""

ALL, WANTED = 0, 1
"""The two row sets that a step can run on, all new rows or the wanted ones; and the slots with their numbers of
rows."""

# A forward's slots.

WANTED_ROWS = 2
"""Address of int64[R]: indices of the wanted rows among all rows."""
TOKENS = 3
"""Address of int64[T], the rows' tokens."""
STOP = 4
"""Two slots, one for each kind of attention: address of int64[T], one more than the last position that a row sees."""
WINDOW = 6
"""Two slots, one for each kind of attention: most positions that a row sees of those up to its own."""
COSINES, SINES = 8, 9
"""Addresses of float32[T, pairs], the pairs of numbers of all rotary embeddings in their order."""
ROTARY_STRIDE = 10
"""Bytes from a row of cosines, or of sines, to the next."""
SEQUENCES, SEQUENCE_COUNT = 11, 12
"""Address of int64[S], the addresses of the sequences' records; and S."""
CACHE_BITS = 13
"""Bits of a number in the caches: 16 or 8."""
SCRATCH, SCRATCH_STRIDE = 14, 15
"""Address of attention's working memory, and bytes of it for each thread: see `scratch_at`."""
PARTIALS, MAX_PARTS, COUNTERS = 16, 17, 18
"""If threads share the parts of a row's positions: address of [rows, query heads, MAX_PARTS] softmax states,
MAX_PARTS, and address of int64[rows, query heads], zeros, that count complete parts. If not, PARTIALS is 0."""
LOGITS, HIDDEN = 19, 20
"""Addresses of float32[R, stride]; in a draft step, of float32[C] and of the drafter's own hidden state."""
CANDIDATES = 21
"""Address of int64[C], a result of a draft step."""
LOOKUP_SCRATCH, LOOKUP_SCRATCH_STRIDE = 22, 23
"""Address of the working memory of lookups, and bytes of it for each thread: see `Workspace`."""
SHARES, SHARES_STRIDE = 24, 25
"""Address of the scores and shares of units of keys, and bytes of it for each row and KV head that are looked up at the
same time: see `shares_bytes`."""
EXPERTS_READ = 26
"""Number of experts whose weights the forward has read so far, in all layers together."""

# A call of `run` may run the plan of one sequence several times, each time for the token that was chosen from the last
# one's logits; and before each time a drafter's plan, whose tokens the next rows are. See `continue_run`.

RAN = 27
"""Number of times that the plan was run, a result."""
MOST_RUNS = 28
"""Most runs; 0 or 1 for a plan that runs once, without drafts."""
NEXT_TOKEN, NEXT_RECORD = 29, 30
"""Addresses of the C function that chooses the token after a row, and of its arguments: see `MultiStep`."""
CHOSEN_FROM, VOCABULARY, CHOSEN_AT = range(3)
"""Places in these arguments: address and length of the row of logits, position of the token."""
LOGITS_STRIDE, HIDDEN_STRIDE = 31, 32
"""Bytes from a row of logits, and of hidden states, to the next. Without drafts every run writes a row of its own."""
TURN = 33
"""The next thing to run, one of the following numbers; written by the first thread."""
END, FORWARD, DRAFT = range(3)
MOVED, ACCEPTED, LAST_ROW = 34, 35, 36
"""Results: number of rows that were accepted before the last run; the tokens of a draft that were accepted in it; and
the last row that was."""
DRAFTS, WIDTHS = 37, 38
"""Steps of a draft at most, 0 for none; and address of int64[DRAFTS], the guesses of each step that are drafted."""
DEPTH, DRAFTED = 39, 40
"""Steps and tokens of the present draft."""
GUESS_RECORD, GUESSES, GUESS_COUNT = 41, 42, 43
"""Address of the arguments of the same C function that choose from the drafter's logits; address and number of the
tokens that it leaves, int64, likeliest first."""
GUESSED = 44
"""Address of int64[DRAFTS, GUESS_COUNT], the guesses of the present draft; -1 where there are fewer."""
DRAFT_TOKEN, DRAFT_HIDDEN, DRAFT_FOLLOWING = 45, 46, 47
"""Addresses of a draft step's token int64[1], of its hidden state float32[H], and of the following one."""
DRAFT_WINDOW = 48
"""Verified positions that a drafter's sliding layers see at most."""
ROTARY = 49
"""Two slots: addresses of the cosines and sines of all positions from the newest token's on. With drafts COSINES and
SINES are those of the rows, which are copied from here."""
CACHE_SHAPES, CACHE_COUNT = 51, 52
"""Address of int64[CACHE_COUNT, 3]: of each cache in a sequence's record, its kind, KV heads and numbers of a head."""
VERDICTS = 53
"""Address of int64[MOST_RUNS, 5], a result: the fields of `DraftVerdict` of each run."""
DRAFT_TICKS, FORWARD_TICKS = 54, 55
"""Ticks of the first thread in draft steps, and in forwards."""
SLOTS = 56

# A sequence's record.

FIRST_ROW = 0
"""Two fields: the index of the sequence's first row in each row set."""
ROW_COUNT = 2
"""Two fields: the number of its rows in each row set."""
LENGTH = 4
"""Number of committed tokens."""
PATHS, PATH_WIDTH = 5, 6
"""Address of int64[rows, PATH_WIDTH]: [row, depth] is the ancestor of `row` at `depth`, both counted from the
sequence's first row; 0 for a chain."""
BASE = 7
"""Two fields: the first position in its caches, for each kind of attention."""
CACHES = 9
"""From here on, the addresses of each layer's keys and values; after all of these, the addresses of each layer's codes
of keys and their codebook, or 0."""

# Matrices and activations. Their layouts are described in `formats` (weights), `epilogue_tiles` and `activations`.

TILE = 16
"""Output rows of a tile."""
BLOCK = 32
"""Neighbouring weights of a row, or activations; in group formats they share a scale."""

GROUPS4, GROUPS8, GROUPS4_AFFINE, GROUPS4_TABLE, STEPS2, STEPS4, STEPS8, PLAIN = range(8)
"""Kinds of products: the form of the activations (GROUPS or STEPS, see `activations`) and the bits of a weight. Weights
of GROUPS4_AFFINE have a minimum per block, codes of GROUPS4_TABLE are looked up. PLAIN multiplies float32 rows with
weights of any width."""

PAIRED_BYTES = 56
"""Most bytes of a row's quantised block: see `activations.ROW_BYTES`."""

MAX_GROUP_ROWS = 8
"""Most rows of activations in one product, a group. 12 or 16 are no faster: their sums do not fit in the registers."""
SCRATCH_BYTES = MAX_GROUP_ROWS * 4 * TILE * 4
"""Working memory of `gated` in bytes, per thread: float32, four tiles of eight rows."""

EPILOGUE_BYTES = 2 * TILE * 4
"""Bytes of a tile's epilogue, float32[2][16]: a factor and an output step for each of its rows.

out = sum * factor; then, if the step is not 0, out = clamp(round(out / step), -128, 127) * step.
"""

# The form of activations, a number: its layout, and below that, in FORM_SHIFT bits, what the layout needs.

GROUPS, STEPS, FLOATS = range(3)
FORM_SHIFT = 32
"""Number of bits of a form below its layout."""

SUMS = 256
"""In GROUPS, in place of the code of a zero weight: blocks have `sum` instead of `start`."""

PRODUCTS = {
    (GROUPS, INT4): GROUPS4,
    (GROUPS, INT8): GROUPS8,
    (GROUPS, INT4_AFFINE): GROUPS4_AFFINE,
    (GROUPS, INT4_TABLE): GROUPS4_TABLE,
    (STEPS, BY_ROW[2]): STEPS2,
    (STEPS, BY_ROW[4]): STEPS4,
    (STEPS, BY_ROW[8]): STEPS8,
}
"""(layout of the activations, format of the weights) -> kind of product. All others are PLAIN."""


def groups_form(zero: int) -> int:
    """The form for a matrix with a scale for every 32 weights, in which the code `zero` is a zero weight.

    `zero` is SUMS for a matrix with minimums.
    """
    return GROUPS << FORM_SHIFT | zero


def steps_form(step: float) -> int:
    """The form for a matrix whose input has a static scale, a float32."""
    return STEPS << FORM_SHIFT | int(np.float32(step).view(np.uint32))


FLOATS_FORM = FLOATS << FORM_SHIFT

# Attention.

LINE = 64
"""Bytes of a cache line."""
UNIT = 32
"""Positions of a unit of a cache. In an int8 cache, the weights of a unit's values share a scale."""
MAX_TILE_PAIRS = 12
"""Most pairs of row and head in one product."""
_TILE_ROWS = MAX_TILE_PAIRS + 3
"""Rows of scores of a tile: products of an fp16 cache read weights of up to three pairs more than there are."""
PART = 1024
"""Positions of a part. At a head_dim of 512 that is 1 MB of keys and values in int8, and 2 KB of state for each
pair."""
SPLIT_ROWS = 16
"""Most rows of a forward for which threads share the parts; more rows keep all threads busy."""

MAX_PAIRS = 64
"""Most pairs that are computed together, so that all of them read keys and values from a near cache."""
SCORE_BLOCK = 256
"""Positions that are weighed together, from a multiple of SCORE_BLOCK on. Their keys and values are half a megabyte in
fp16 for a head of 512 numbers."""
PAIR_WORDS = 4
"""int64 per pair in the table: the first position that it sees, one more than the last, the address of its path, and
the address of its query."""
SCORE_BYTES = 4 * SCORE_BLOCK + 64
"""Bytes from a pair's scores to the next pair's. Not a power of two, with which all pairs' scores would compete for the
same lines of the nearest cache."""
_STATE_BYTES = 64
"""Bytes of a pair's state beside its float32[head_dim]."""
TAIL = MAX_ROWS + UNIT
"""Most positions of the units that may hold pending rows of a tree."""


class Scratch(NamedTuple):
    """Working memory of a thread, as addresses of its parts. `tile` is the number of pairs in a tile of an int8 cache.

    table : int64[MAX_PAIRS, PAIR_WORDS], what each pair sees
    queries : float32[MAX_PAIRS, head_dim], queries of an fp16 cache, tile by tile: see `float_cache.lay_queries`
    codes : int8[MAX_PAIRS, head_dim], quantised queries, tile by tile: see `integer_tile.score_tile`
    starts : int32[MAX_PAIRS], start values of the queries' integer sums
    query_scales : float32[MAX_PAIRS]
    scores : _TILE_ROWS times SCORE_BYTES, float32[SCORE_BLOCK] per pair of a tile
    weights : int8[SCORE_BLOCK / UNIT][tile][UNIT], quantised weights
    weight_starts : int32[SCORE_BLOCK / UNIT][tile], start values of the weights' integer sums
    weight_scales : float32[SCORE_BLOCK / UNIT][tile]
    tail_scores : float32[MAX_TILE_PAIRS, TAIL], scores of pending rows in the order of the cache
    tail_weights : int8[TAIL / UNIT][tile][UNIT], weights of pending rows in the order of the cache
    tail_scales : float32[UNIT], scales of the values on a path
    part : states of MAX_PAIRS pairs, of the part that is being computed
    whole : states of MAX_PAIRS pairs, of all parts so far
    end : the address after them
    """

    table: int
    queries: int
    codes: int
    starts: int
    query_scales: int
    scores: int
    weights: int
    weight_starts: int
    weight_scales: int
    tail_scores: int
    tail_weights: int
    tail_scales: int
    part: int
    whole: int
    end: int


def scratch_at(address: int, head_dim: int) -> Scratch:
    """The parts of a thread's working memory. With address 0, `end` is the size that it needs, in bytes."""
    table = address
    queries = table + 8 * PAIR_WORDS * MAX_PAIRS
    codes = queries + 4 * MAX_PAIRS * head_dim
    starts = codes + MAX_PAIRS * head_dim
    query_scales = starts + 4 * MAX_PAIRS
    scores = query_scales + 4 * MAX_PAIRS
    weights = scores + _TILE_ROWS * SCORE_BYTES
    weight_starts = weights + MAX_TILE_PAIRS * SCORE_BLOCK
    weight_scales = weight_starts + 4 * MAX_TILE_PAIRS * (SCORE_BLOCK // UNIT)
    tail_scores = weight_scales + 4 * MAX_TILE_PAIRS * (SCORE_BLOCK // UNIT)
    tail_weights = tail_scores + 4 * MAX_TILE_PAIRS * TAIL
    tail_scales = tail_weights + MAX_TILE_PAIRS * TAIL
    part = tail_scales + 4 * UNIT
    whole = part + MAX_PAIRS * (4 * head_dim + _STATE_BYTES)
    end = whole + MAX_PAIRS * (4 * head_dim + _STATE_BYTES)
    return Scratch(
        table, queries, codes, starts, query_scales, scores, weights, weight_starts, weight_scales, tail_scores,
        tail_weights, tail_scales, part, whole, end,
    )  # fmt: skip


def state_bytes(head_dim: int) -> int:
    """Bytes of a pair's state."""
    return 4 * head_dim + _STATE_BYTES


# Lookup attention.

CENTROIDS = 16
SPAN = UNIT * 16
"""Positions whose codes lie together: 16 units of UNIT positions. Vector i of codes holds position i of each of the 16
units, so that a unit's maximum and sum are computed in one lane."""
SHARED_UNITS = 4
"""Pairs of a row and a KV head, per thread, below which threads share the keys of a pair; with more, each thread takes
whole pairs."""

_TABLE_BYTES = 16
"""Bytes of a table of products."""
_MAX_SUMS = 8
"""The largest `key_codes.SUMS` of all instruction sets."""


class ThreadWorkspace(NamedTuple):
    """Working memory of a thread, as addresses: `tables` and `scales` of `Tables`, `products` of `make_tables`, `sums`
    of `scan`, and the `end`.
    """

    tables: int
    scales: int
    products: int
    sums: int
    end: int


def workspace_at(address: int, heads: int, codes: int) -> ThreadWorkspace:
    """A thread's working memory for the heads of one KV head. With address 0, `end` is its size in bytes."""
    scales = address + heads * codes * _TABLE_BYTES
    products = scales + LINE * heads
    sums = products + 64 * codes
    return ThreadWorkspace(address, scales, products, sums, sums + UNIT * _MAX_SUMS * 64)


def shares_bytes(heads: int, keys: int) -> int:
    """Bytes for one row and KV head with so many keys: a counter of threads, then shares, then scores of every head."""
    spans = (keys + SPAN - 1) // SPAN
    return LINE + spans * (64 + 128 * heads)


# Instruction sets for 8-bit dot products.

LANES = 16
"""float32 lanes of the vectors that kernels are written with, on every instruction set."""


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions that sum four products of 8-bit numbers into each 32-bit lane.

    name : for messages and tests
    lanes : 32-bit lanes of a vector
    signed : whether the weights of a product are signed bytes, else unsigned; 4-bit weights, 0..15, are valid as both
    by_lane : whether products can take one lane of a vector as an operand, and shifts work on bytes: ARM
    pairs : whether an instruction multiplies two rows of weights by two rows of activations, 8 numbers each, which
        then lie in pairs: see `activations`
    """

    name: str
    lanes: int
    signed: bool
    by_lane: bool = False
    pairs: bool = False

    @property
    def int8_zero(self) -> int:
        """The code of a zero 8-bit weight, and of a zero level of a table, as the instruction takes it."""
        return 0 if self.signed else 128


AVX512_VNNI = InstructionSet("avx512vnni", 16, signed=False)
AVX_VNNI = InstructionSet("avxvnni", 8, signed=False)
AVX2 = InstructionSet("avx2", 8, signed=True)
NEON_DOTPROD = InstructionSet("neon-dotprod", 4, signed=True, by_lane=True)
NEON_I8MM = InstructionSet("neon-i8mm", 4, signed=True, by_lane=True, pairs=True)
NEON = InstructionSet("neon", 4, signed=True, by_lane=True)
GENERIC = InstructionSet("generic", 4, signed=True)

INSTRUCTION_SETS = {
    "generic": GENERIC,
    "avx2": AVX2,
    "avxvnni": AVX_VNNI,
    "avx512vnni": AVX512_VNNI,
    "avx512vbmi": AVX512_VNNI,
    "neon": NEON,
    "neon-dotprod": NEON_DOTPROD,
    "neon-i8mm": NEON_I8MM,
}
"""By the names of `native.sets.SETS`."""


def instruction_set() -> InstructionSet:
    """The set for which kernels are compiled, or were."""
    return INSTRUCTION_SETS[library.choice().set]
