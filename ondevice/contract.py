"""The names of the graphs' inputs and outputs: what the exporter writes and every engine reads.

Target graph (T new rows, R wanted rows, S cache rows of a view *including* room for the T new ones):

    token_ids             int64   [T]        the new rows' tokens
    positions             int64   [T]        their positions; rows of a tree may share one
    wanted                int64   [R]        which of the T rows need logits and hidden state
    full.write_index      int64   [1]        first cache row the T new rows go to, in full layers' views
    sliding.write_index   int64   [1]        the same in sliding layers' views
    full.mask             bool    [T, Sf]    row t may attend to cache row s
    sliding.mask          bool    [T, Ss]    the same within the window
    past.N.key, .value    float32 [1, S, kv_heads * head_dim]   for every layer N that owns KV
    ->
    logits                float32 [R, V]     after the softcap
    hidden                float32 [R, H]     after the final norm: what the drafter starts from
    present.N.key, .value                    `past` with rows written; bind both to one buffer and nothing is copied

Drafter graph, one MTP step:

    token_id              int64   [1]
    hidden                float32 [1, H]     the target's, then the drafter's own
    position              int64   [1]        the same for every step of a round
    full.mask             bool    [1, Sf]
    sliding.mask          bool    [1, Ss]
    full.key, .value      float32 [1, Sf, kv_heads * head_dim]  the target's shared caches
    sliding.key, .value   float32 [1, Ss, kv_heads * head_dim]
    ->
    candidates            int64   [C]        token ids that were scored
    logits                float32 [C]        their logits; every other token counts as minus infinity
    next_hidden           float32 [1, H]

Heads, a graph for each kind (k tokens proposed, C of the vocabulary scored for each):

    hidden                float32 [1, H]     medusa, blockwise: the target's, of the last verified position, for the
                                             tokens behind the one that was chosen there; exit: the residual stream
                                             behind a lower layer, for the token that is to be chosen there
    ->
    candidates            int64   [k, C]     token ids that were scored
    logits                float32 [k, C]     their logits, after the target's softcap
"""

from __future__ import annotations

from typing import Literal

AttentionKind = Literal["full", "sliding"]
"""Full attention sees every position, sliding attention the last `sliding_window`, the current one included."""

OPSETS = {"": 24, "com.microsoft": 1}
"""Versions of the operators, by domain; ONNX's own is empty."""

TOKEN_IDS, POSITIONS, WANTED = "token_ids", "positions", "wanted"
LOGITS, HIDDEN = "logits", "hidden"
TOKEN_ID, POSITION, CANDIDATES, NEXT_HIDDEN = "token_id", "position", "candidates", "next_hidden"


def mask(kind: AttentionKind) -> str:
    return f"{kind}.mask"


def write_index(kind: AttentionKind) -> str:
    return f"{kind}.write_index"


def past(layer: int, part: Literal["key", "value"]) -> str:
    return f"past.{layer}.{part}"


def present(layer: int, part: Literal["key", "value"]) -> str:
    return f"present.{layer}.{part}"


def shared(kind: AttentionKind, part: Literal["key", "value"]) -> str:
    """The drafter's name for the target's cache of one kind."""
    return f"{kind}.{part}"
