"""The protocol of an engine, as the loop that drafts and verifies needs it, and the types that cross it.

An `Engine` holds the weights of a bundle and computes. A `Session` holds one sequence: its committed tokens with their
keys and values. A forward takes `Rows` of one or several sessions and returns `Outputs` for each; the session then
commits the rows that were accepted. Below these: the tree of new rows, steps of drafters, the choice of attention, and
the checks of a batch that both engines share. `layer_path` says which layers a row passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Int64Array
from ondevice.bundle_format.model_config import DrafterEntry, HeadsEntry, Target
from ondevice.engines.layer_path import WHOLE, LayerPath, PathMemory
from ondevice.errors import UsageError

MAX_SESSIONS = 16
"""Most sequences in one forward. With more, attention costs more than sharing the weights saves."""

MAX_ROUNDS, MAX_DRAFTED = 12, 8
"""Most forwards with drafts that a `MultiStep` runs, and most tokens of a draft."""

KVCacheType = Literal["fp16", "int8"]
"""Number format of cached keys and values. int8 takes half the memory and exists on `simd` only; `ort` stores float32
where fp16 is asked for."""


class Engine(Protocol):
    """The weights of one target, of its drafter if the bundle has one, and the threads that compute.

    Several threads may call `forward` at once, and `draft_step` on different sessions.
    """

    name: str
    target: Target
    drafter: DrafterEntry | None
    """The bundle's MTP drafter."""
    kv_cache: str
    """Number format of cached keys and values."""
    context_length: int
    most_rows: int
    """Most rows in one forward, all sequences together."""
    experts: ExpertShare | None
    """None if the target has no experts, or if the engine does not count the experts that it reads."""
    paths: PathMemory | None
    """Known layer paths on which drafts pay; None if the engine runs all layers only."""

    @property
    def heads(self) -> Mapping[str, HeadsEntry]:
        """The bundle's heads, by kind."""
        ...

    def open_session(self) -> Session:
        """A new, empty sequence."""
        ...

    def load_session(self, path: str | PathLike[str]) -> Session:
        """The sequence that `Session.save` wrote.

        Raises:
            OSError: the file cannot be read.
            SessionFileError: it is damaged, or belongs to another bundle, engine, KV cache type or version.
        """
        ...

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        """Run new rows after the committed tokens of up to MAX_SESSIONS sessions, and leave their KV pending.

        The weights are read once for all rows. A row's outputs do not depend on the other rows of the forward. A
        session's earlier pending rows are replaced; its outputs stay valid until its next forward.

        A draft along a path (`Rows.path`) is a chain that grows by one token per forward. Its earlier rows, and what
        the lower layers computed for them, are reused by the next draft forward and by the whole forward that verifies
        them. This changes no bit. All rows of one forward pass the same path.

        Raises:
            ValueError: no or too many rows or sessions, a session that is in the batch twice or belongs to another
                engine, or paths that differ or do not exist.
            UsageError: a session was closed, or the engine has no partial forwards.
        """
        ...

    def close(self) -> None:
        """End the threads and drop the weights, after a running forward. Nothing can be computed afterwards."""
        ...


class Session(Protocol):
    """One sequence: its committed tokens and their keys and values. Used by one thread at a time."""

    @property
    def exact_trees(self) -> bool:
        """Whether a row's outputs are the same bits in a tree as in a chain. If not, drafts must be chains."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The committed tokens; read-only. Negative for soft rows, see `Rows`."""
        ...

    @property
    def length(self) -> int:
        """The number of committed tokens."""
        ...

    @property
    def pending(self) -> int:
        """Rows of the session's last forward; 0 once some were committed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values, snapshots included."""
        ...

    def max_rows(self, block: int = 1) -> int:
        """Most rows of this sequence in the next forward; 0 if the context is full.

        Args:
            block: rows that one forward must have: a long sequence, whose attention takes much memory, has at least
                as many if an engine's forwards do.
        """
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the session's last forward, each the parent of the next, and drop the others."""
        ...

    def rewind(self, length: int) -> int:
        """Forget everything from position `length` on.

        Returns:
            The number of tokens left: `length`; or, if the sliding layers no longer hold the rows that this needs, the
            longest shorter sequence for which a snapshot has them, or 0.
        """
        ...

    def snapshot(self) -> None:
        """Copy what the sliding layers hold now, so that a later rewind to this length need not compute it again."""
        ...

    def fork(self, length: int | None = None) -> Session:
        """A new session with a copy of the first `length` tokens, or of fewer as with `rewind`; None copies all."""
        ...

    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep:
        """One MTP step over the committed tokens. All steps of a round have the newest token's position, `length`.

        With an MTP layer (`Target.mtp`) a step has the position `length + depth`, and attends to the steps of this
        round before it too: `depth` is the number of drafted tokens that precede `token`, in steps of depth 0 to
        `depth - 1`. Its keys and values are pending rows, which the next forward overwrites.

        The returned arrays belong to the session and stay valid until its next step, to which `hidden` may be passed.
        """
        ...

    @property
    def drafts(self) -> DraftStep | None:
        """The arrays of `draft_step`, if the engine can draft in a `MultiStep` of this sequence; else None."""
        ...

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
        """The tokens that the bundle's heads of a kind propose for a hidden state float32[H]: see `graph_io`.

        The heads read nothing of the sequence. The returned arrays belong to the session and stay valid until its next
        call.

        Raises:
            UsageError: the bundle has no heads of that kind.
        """
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Write the committed tokens with their keys and values to a file: all of it, or nothing.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """Free the memory; the session cannot be used afterwards."""
        ...


@dataclass(frozen=True)
class Rows:
    """The new rows of one sequence in a forward.

    session : the sequence whose committed tokens the rows follow
    tree : the rows' tokens and parents
    wanted : indices of the rows whose outputs are wanted, ascending
    path : the layers that the rows pass; a draft may pass less than WHOLE, and then cannot be committed
    soft : float32[S, H], the embeddings of the tree's soft rows in their order; None if it has none. A soft row, such
        as one of a picture, has a negative number as its token, which identifies the embedding. Its per-layer
        embeddings are those of the padding token
    blocks : (begin, end) of soft rows begin..end - 1 that all see each other in sliding layers, as those of a picture
        do in some models; other rows see earlier ones only
    continuation : how to go on after a single row, if no other sequence takes part in the forward
    """

    session: Session
    tree: TokenTree
    wanted: Sequence[int]
    path: LayerPath = WHOLE
    soft: Float32Array | None = None
    blocks: Sequence[tuple[int, int]] = ()
    continuation: MultiStep | None = None


@dataclass(frozen=True)
class MultiStep:
    """Multi-step decoding: an engine may follow the forward of a single row by those of the tokens that it chooses,
    each from the logits of the row before it. An engine that does not, or not for this row, ignores it.

    Between two forwards nothing but the choice is done, and no Python is run: one call for each forward takes 1.15 to
    1.2 times as long per token (SmolLM2-135M, AMD Zen 3; `benchmarks.speed.multi_step`).

    most : most forwards, the first one included
    choose : address of a C function that takes the address of `record`, and returns the token, or a negative number
        for the last forward
    record : int64[n], its arguments. The engine writes the address of the row of logits, float32[V], and the position
        of the token in the sequence: see `kernels.contract.slots.CHOSEN_FROM`
    held : keeps alive what the record points to
    drafting : how the engine drafts before each forward; None if it does not
    """

    most: int
    choose: int
    record: Int64Array
    held: object
    drafting: EngineDrafts | None = None


@dataclass(frozen=True)
class EngineDrafts:
    """Before each forward the bundle's drafter proposes a tree, whose tokens are further rows: in each step some
    guesses for one position, of which the next step reads the first. It is accepted as far as it equals what is chosen
    from these rows, so that the tokens are those of a continuation without drafts.

    widths : by step, the number of guesses that are drafted, at least 1
    hidden : float32[H], the hidden state of the row that the newest token was chosen from
    record : int64[n], the arguments of `MultiStep.choose` for the drafter's logits
    guesses : int64[g], where a call with this record leaves the best tokens, best first; g is at least any width
    """

    widths: Sequence[int]
    hidden: Float32Array
    record: Int64Array
    guesses: Int64Array

    @property
    def drafted(self) -> int:
        """Number of tokens of a draft."""
        return sum(self.widths)

    def tree(self, newest: int) -> TokenTree:
        """The rows of a forward: the newest token, the first guesses, then the other ones, step by step."""
        steps = len(self.widths)
        beside = [step for step, width in enumerate(self.widths) for _ in range(1, width)]
        parents = np.array([*range(-1, steps), *beside], np.int64)
        return TokenTree(np.full(len(parents), newest, np.int64), parents)


class DraftVerdict(NamedTuple):
    """The target's verdict on a draft that the engine made.

    drafted : tokens of the draft
    depth : steps, and so tokens on its longest path
    accepted : tokens that were accepted
    hits : steps, from the first one on, whose first guess was right
    rank : of the target's token among the guesses of the step after these, drafted or not; 0 where it is none of them,
        or where there is no such step
    """

    drafted: int
    depth: int
    accepted: int
    hits: int
    rank: int


@dataclass(frozen=True)
class Outputs:
    """The target's outputs for the wanted rows of one sequence.

    logits : float32[R, V], after the softcap; [R, 0] if the path ends before the head
    hidden : float32[R, H], after the final norm; if the path ends before it, or for an MTP layer, the residual stream
    rows, wanted : number of rows, and of wanted rows, in the whole forward, other sequences included
    seconds : wall time of the whole forward; of several that followed each other, the mean
    threads : number of threads that computed the forward
    experts : experts that were read per layer with experts, on average, for all rows of the forward; 0 without experts
    chosen : tokens that followed, by `Rows.continuation`. Their rows are pending as the tree's are, and in `logits` and
        `hidden` too; but where the engine drafted, these have the last row alone
    verdicts : where the engine drafted, the verdict on the draft of each forward
    draft_share : part of `seconds` in which it drafted
    """

    logits: Float32Array
    hidden: Float32Array
    rows: int = 1
    wanted: int = 1
    seconds: float = 0.0
    threads: int = 1
    experts: float = 0.0
    chosen: Sequence[int] = ()
    verdicts: Sequence[DraftVerdict] = ()
    draft_share: float = 0.0

    @property
    def forwards(self) -> int:
        """Number of forwards that followed each other."""
        return len(self.verdicts) or 1 + len(self.chosen)

    @property
    def other_rows(self) -> int:
        """Number of wanted rows of other sequences in the forward."""
        return 0 if self.chosen or self.verdicts else self.wanted - len(self.logits)


ROOT = -1
"""The parent of a row that follows the committed tokens."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenTree:
    """Tokens of the new rows. Each row follows the committed tokens (`ROOT`) or an earlier row.

    tokens : int64[T]; negative for soft rows, see `Rows`
    parents : int64[T], parents[i] < i
    is_chain : whether each row follows the one before it
    """

    tokens: Int64Array
    parents: Int64Array
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        rows = np.arange(len(self.tokens))
        if self.tokens.ndim != 1 or self.parents.shape != self.tokens.shape or not len(rows):
            raise ValueError("a token tree needs one parent per token and at least one token")
        object.__setattr__(self, "is_chain", bool((self.parents == rows - 1).all()))
        if not self.is_chain and ((self.parents >= rows).any() or (self.parents < ROOT).any()):
            raise ValueError("a row's parent must come before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Rows each of which follows the one before it: the plain case."""
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids):
            raise ValueError("a token tree needs at least one token")
        tree = cls.__new__(cls)  # skips the checks, which a chain passes: 5 us less in every forward
        vars(tree).update(tokens=ids, parents=np.arange(-1, len(ids) - 1, dtype=np.int64), is_chain=True)
        return tree

    def depths(self) -> Int64Array:
        """int64[T]: 0 for rows that follow the committed tokens, else the parent's depth + 1."""
        if self.is_chain:
            return np.arange(len(self.tokens), dtype=np.int64)
        depths = np.zeros(len(self.tokens), np.int64)
        for row, parent in enumerate(self.parents):
            if parent != ROOT:
                depths[row] = depths[parent] + 1
        return depths

    def ancestors(self) -> Mask:
        """bool[T, T]: [i, j] if row j is row i or an ancestor of it."""
        count = len(self.tokens)
        if self.is_chain:
            return np.tri(count, dtype=np.bool_)
        seen = np.eye(count, dtype=np.bool_)
        for row, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[row] |= seen[parent]
        return seen

    def is_path(self, rows: Sequence[int]) -> bool:
        """Whether the first of these rows follows the committed tokens, and each other one the row before it."""
        parent = ROOT
        for row in rows:
            if not 0 <= row < len(self.tokens) or self.parents[row] != parent:
                return False
            parent = row
        return True


@dataclass(frozen=True)
class DraftStep:
    """The result of one step of a drafter model.

    candidates : int64[C], different token ids; read-only where they are the same in every step
    logits : float32[C], the candidates' logits
    hidden : float32[H], the input of the next step
    """

    candidates: Int64Array
    logits: Float32Array
    hidden: Float32Array


@dataclass(frozen=True)
class Proposals:
    """Tokens that heads propose for the next k positions: `candidates` int64[k, C], their `logits` float32[k, C]."""

    candidates: Int64Array
    logits: Float32Array


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a model, and the cost of reading one.

    count : experts of a layer
    top : experts that a row uses in a layer
    of_a_row : bytes of one expert in all layers, as a share of the bytes that a forward of one row reads
    """

    count: int
    top: int
    of_a_row: float


AttentionType = Literal["exact", "lookup", "lookup-drafts", "nomad"]
"""How layers with full attention score and choose positions.

`exact`: all positions, exact scores. `lookup`: positions that are chosen by table lookups over 4-bit codes of the keys;
their scores are exact. `lookup-drafts`: the drafter's layers use `lookup`, the target is exact. `nomad`: all positions,
with scores from table lookups.
"""

ATTENTION_TYPES: tuple[str, ...] = get_args(AttentionType)
CODE_WIDTHS = (1, 2, 4)
LOOKUP_UNIT = 32
"""Positions that lookup attention chooses together."""


@dataclass(frozen=True)
class AttentionOptions:
    """How layers with full attention attend.

    kind : see `AttentionType`
    keys : positions that `lookup` chooses, a multiple of LOOKUP_UNIT; None chooses as many as the codes say matter
    width : numbers of a key that share one 4-bit code
    """

    kind: AttentionType = "exact"
    keys: int | None = None
    width: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ATTENTION_TYPES:
            raise UsageError(f"attention must be one of {', '.join(ATTENTION_TYPES)}, not {self.kind!r:.99}")
        keys = self.keys
        if keys is not None and (
            not isinstance(keys, int) or isinstance(keys, bool) or keys < LOOKUP_UNIT or keys % LOOKUP_UNIT
        ):
            raise UsageError(f"attention_keys must be a multiple of {LOOKUP_UNIT}, or None, not {keys!r:.99}")
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width not in CODE_WIDTHS:
            raise UsageError(
                f"attention_width must be one of {', '.join(map(str, CODE_WIDTHS))}, not {self.width!r:.99}"
            )

    @property
    def looks_up(self) -> bool:
        """Whether attention uses table lookups, which `ort` does not have."""
        return self.kind != "exact"


def context_within(wanted: int | None, available: int) -> int:
    """The context length to use, in tokens: `wanted`, or for None all that is `available`.

    Raises:
        UsageError: more than the model has, or too few for a prompt and an answer.
    """
    if wanted is None:
        return available
    if not 1 < wanted <= available:
        raise UsageError(f"a context of {wanted} tokens is not possible: this model has 2 to {available}")
    return wanted


def check_batch(batch: Sequence[Rows], target: Target, most_rows: int) -> int:
    """Check the rows of a forward, whose sessions are open and of one engine.

    Args:
        batch: rows of several sessions.
        target: every token id must be in its vocabulary, and every embedding as wide as its hidden states.
        most_rows: most rows of one forward, all sessions together.

    Returns:
        The number of rows in the batch.

    Raises:
        ValueError: no or too many rows or sessions, a session twice, a token or a wanted row that does not exist, or
            not one embedding for each soft row, a block with other rows than soft ones, or one in a tree.
    """
    if not 0 < len(batch) <= MAX_SESSIONS:
        raise ValueError(f"{len(batch)} sessions do not fit: a forward has 1 to {MAX_SESSIONS}")
    if len({id(rows.session) for rows in batch}) < len(batch):
        raise ValueError("a session is in the batch twice: a forward has its rows in one tree")
    total = sum(len(rows.tree) for rows in batch)
    if total > most_rows:
        raise ValueError(f"{total} rows do not fit: at most {most_rows} in one forward")
    for rows in batch:
        _check_rows(rows, target)
    return total


def _check_rows(rows: Rows, target: Target) -> None:
    count, most = len(rows.tree), rows.session.max_rows(rows.blocks[0][1] if rows.blocks else 1)
    if count > most:
        raise ValueError(f"{count} rows do not fit: at most {most} now")
    ids = rows.tree.tokens.astype(np.int64, copy=False)
    if rows.soft is not None:
        soft = ids < 0
        if rows.soft.shape != (int(soft.sum()), target.hidden_size) or rows.soft.dtype != np.float32:
            raise ValueError(f"{int(soft.sum())} soft rows have embeddings of {rows.soft.dtype}{list(rows.soft.shape)}")
        if not rows.path.is_whole:
            raise ValueError("soft rows pass all layers")
        good = all(0 <= begin < end <= count and soft[begin:end].all() for begin, end in rows.blocks)
        if not good or (rows.blocks and not rows.tree.is_chain):
            raise ValueError(f"the blocks {list(rows.blocks)} are not of soft rows in a chain")
        ids = np.where(soft, 0, ids)
    elif rows.blocks:
        raise ValueError("blocks are of soft rows, and there are none")
    if rows.continuation is not None:
        _check_continuation(rows.continuation, target, most)
    # as unsigned numbers, negative ids are larger than any vocabulary: one maximum instead of two reductions
    if np.maximum.reduce(ids.view(np.uint64)) >= target.vocab_size:
        raise ValueError(f"token ids must be within 0..{target.vocab_size - 1}")
    wanted = list(rows.wanted)
    if wanted != sorted(set(wanted)) or (wanted and not 0 <= wanted[0] <= wanted[-1] < count):
        raise ValueError(f"wanted rows must be ascending and within 0..{count - 1}")


def _check_continuation(continuation: MultiStep, target: Target, most: int) -> None:
    drafting, count = continuation.drafting, continuation.most
    if drafting is None:
        if not 1 <= count <= most:
            raise ValueError(f"{count} forwards do not fit: at most {most} now")
        return
    each, widths = 1 + drafting.drafted, drafting.widths
    if not (0 < drafting.drafted <= MAX_DRAFTED and 0 < count <= MAX_ROUNDS and count * each <= most):
        raise ValueError(f"{count} forwards of {each} rows do not fit: at most {most} rows now")
    if not 0 < min(widths) <= max(widths) <= len(drafting.guesses):
        raise ValueError(f"{list(widths)} guesses of a step: between 1 and {len(drafting.guesses)} are possible")
    if drafting.hidden.shape != (target.hidden_size,):
        raise ValueError(f"a hidden state of {target.hidden_size} numbers, not {list(drafting.hidden.shape)}")


def no_heads(kind: str) -> UsageError:
    """The error of both engines for `Session.propose` with a kind of heads that the bundle does not have."""
    return UsageError(f"this bundle has no {kind} heads: train some with models/recipe, and export with --heads DIR")
