"""Names, dtypes and shapes of the graphs' inputs and outputs, and operators: written by the exporter, bound by engines.

Target graph (T new rows, R wanted rows, Sf and Ss cache rows of the full and sliding layers' views, *including* the T
rows to be written; V tokens in the vocabulary, H numbers in a hidden state):

    token_ids             int64   [T]        tokens of the new rows
    positions             int64   [T]        positions of the new rows; rows of a tree may share one
    wanted                int64   [R]        indices of the rows whose logits and hidden state are computed
    full.write_index      int64   [1]        first cache row to write in the views of full layers
    sliding.write_index   int64   [1]        first cache row to write in the views of sliding layers
    full.mask             bool    [T, Sf]    whether row t attends to cache row s
    sliding.mask          bool    [T, Ss]    the same, within the sliding window
    convolution.rows      int64   [T, W]     cache rows that the convolutions of row t sum over, its own first; -1 for
                                             those before the first position
    soft_rows             float32 [S, H]     embeddings of soft rows, which take the place of token embeddings
    embedding_source      int64   [T]        t for a row that is embedded by its token; T + s for soft row s
    past.N.key, .value    float32 [1, Sf or Ss, kv_heads * head_dim]   for every layer N that has its own cache; of
                                             convolutions the two halves, [1, Ss, channels / 2]. With an MTP layer,
                                             also the number of layers, for the halves of the projected hidden states,
                                             and the next number, for its keys and values
    state_rows            float32 [T]        1, or 0 for a row after which states stay as they are
    state.N               float32 [1, value_heads, key_dim, value_dim]   for every layer N that has states, after the
                                             committed tokens; the new rows are then a chain
    ->
    logits                float32 [R, V]     after the softcap
    hidden                float32 [R, H]     after the final norm; with an MTP layer, the residual stream before it.
                                             Input of the drafter and of heads
    next_state.N                             `state` after the new rows
    present.N.key, .value                    `past` with the new rows written; bound to the buffer of `past`, so that
                                             nothing is copied

A mask exists for each kind of attention that the model has, `convolution.rows` only if it has convolutions, whose
caches are of the sliding kind. `soft_rows` and `embedding_source` exist only in a bundle with a vision or audio tower.
The token of a soft row is the padding token, whose per-layer embeddings it has.

Drafter graph, one MTP step (C candidates):

    token_id              int64   [1]
    hidden                float32 [1, H]     first step: the target's `hidden`; later steps: `next_hidden`
    position              int64   [1]        the same for every step of a round; with an MTP layer, of the token
    full.mask             bool    [1, Sf]
    sliding.mask          bool    [1, Ss]
    past.N.key, .value    float32 [1, Sf or Ss, kv_heads * head_dim]   for every target layer N whose cache it reads
    full.write_index      int64   [1]        with an MTP layer: the cache row to write
    ->
    candidates            int64   [C]        token ids that were scored
    logits                float32 [C]        their logits; every other token counts as minus infinity
    next_hidden           float32 [1, H]     input of the next step
    present.N.key, .value                    with an MTP layer: `past` with the row written, as in the target's graph

Heads, one graph per kind (k tokens proposed, C candidates scored for each):

    hidden                float32 [1, H]     medusa, blockwise: the target's `hidden` at the last verified position,
                                             for the tokens after the one chosen there; exit: the residual stream
                                             after a lower layer, for the token to be chosen at this position
    ->
    candidates            int64   [k, C]     token ids that were scored
    logits                float32 [k, C]     their logits, after the target's softcap

Vision tower (N patches of a picture, P pixels along a patch's side, S soft tokens):

    patches               float32 [N, 3PP]   numbers from 0 to 1 in the order row, column, channel. The patches that
                                             make one soft token follow one another
    column, row           int64   [N]        place of each patch in the picture, in patches
    ->
    soft_rows             float32 [S, H]     input of the target's graph

Audio tower (F frames of a sound's spectrogram, B bands, S = ceil(ceil(F / 2) / 2) soft tokens; in a tower without
layers, S frames of B samples):

    sound                 float32 [F, B]
    ->
    soft_rows             float32 [S, H]     input of the target's graph
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

AttentionKind = Literal["full", "sliding"]
KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Full attention attends to every earlier position, sliding attention to the last `sliding_window` positions; both
include the current one. Where there is a number or a field for each kind, they are in this order."""

Part = Literal["key", "value"]
PARTS: tuple[Part, ...] = get_args(Part)
"""The two parts of a layer's cache, in their order everywhere."""

OPSETS = {"": 24, "com.microsoft": 1}
"""Operator set versions by domain; the empty name is ONNX's own domain."""

OPERATORS: Mapping[str, frozenset[str]] = {
    "": frozenset({
        "Abs", "Add", "Attention", "BitShift", "BitwiseAnd", "BitwiseOr", "Cast", "Clip", "Concat", "Conv", "Cos",
        "Div", "Equal", "Expand", "Gather", "GatherElements", "Gelu", "Gemm", "LayerNormalization", "LogSoftmax",
        "MatMul", "Mul", "Pad", "QuantizeLinear", "RMSNormalization", "Range", "ReduceLogSumExp", "ReduceMax",
        "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "Round", "Shape", "Sigmoid", "Sin", "Slice", "Softmax",
        "Split", "Sub", "Tanh", "TensorScatter", "TopK", "Transpose", "Unsqueeze", "Where",
    }),
    "com.microsoft": frozenset({
        "GatherBlockQuantized", "LinearAttention", "MatMulIntegerToFloat", "MatMulNBits", "MultiHeadAttention",
    }),
}  # fmt: skip
"""Operators of exported graphs by domain. The exporter writes no others, and no graph with others is opened."""

TOKEN_IDS, POSITIONS, WANTED = "token_ids", "positions", "wanted"
SOFT_ROWS, EMBEDDING_SOURCE = "soft_rows", "embedding_source"
PATCHES, COLUMN, ROW = "patches", "column", "row"
SOUND = "sound"
LOGITS, HIDDEN = "logits", "hidden"
TOKEN_ID, POSITION, CANDIDATES, NEXT_HIDDEN = "token_id", "position", "candidates", "next_hidden"


def mask(kind: AttentionKind) -> str:
    """The name of the input that says to which cache rows of a kind of attention each row attends."""
    return f"{kind}.mask"


CONVOLUTION_ROWS = "convolution.rows"
STATE_ROWS = "state_rows"


def write_index(kind: AttentionKind) -> str:
    """The name of the input with the first cache row to write of a kind of attention."""
    return f"{kind}.write_index"


def past(layer: int, part: Part) -> str:
    """The name of the input with a part of a layer's cache."""
    return f"past.{layer}.{part}"


def state(layer: int) -> str:
    """The name of the input with the states of a layer."""
    return f"state.{layer}"


def next_state(layer: int) -> str:
    """The name of the output with the states of a layer after the new rows."""
    return f"next_state.{layer}"


def present(layer: int, part: Part) -> str:
    """The name of the output with a part of a layer's cache, new rows included."""
    return f"present.{layer}.{part}"
