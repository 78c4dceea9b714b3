"""What a drafting loop needs from an engine: weights in one place, any number of sequences beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.path_memory import PathMemory
from ondevice.engines.token_tree import ROOT, Ids, TokenTree
from ondevice.manifest import HeadsEntry, Target

Floats = NDArray[np.float32]

KVCacheType = Literal["fp16", "int8"]
"""What keys and values are held in: int8 takes half the memory, on the `simd` engine; `ort` has float32 for fp16."""

MOST_SESSIONS = 16
"""Sequences of one forward. Beyond, the attention of each costs more than the weights that they share."""


@dataclass(frozen=True)
class Rows:
    """The new rows of one sequence in a forward.

    session : the sequence, whose committed tokens they follow
    tree : the rows' tokens, and which row each follows
    wanted : indices of the rows whose outputs are wanted, ascending
    path : what of the target they pass: less than WHOLE is a draft, which cannot be committed
    """

    session: Session
    tree: TokenTree
    wanted: Sequence[int]
    path: LayerPath = WHOLE


@dataclass(frozen=True)
class Outputs:
    """What the target says of the wanted rows of one sequence.

    logits : float32[R, V], after the softcap; [R, 0] of a path that ends before the head
    hidden : float32[R, H], after the final norm; the residual stream at the end of such a path
    rows, wanted : rows, and wanted rows, of the whole forward, those of other sequences included
    seconds : wall time of the whole forward
    threads : that computed it, as many as made it faster
    experts : that a layer with experts read on average, for all rows of the forward; 0 where there are none
    """

    logits: Floats
    hidden: Floats
    rows: int = 1
    wanted: int = 1
    seconds: float = 0.0
    threads: int = 1
    experts: float = 0.0


@dataclass(frozen=True)
class DraftStep:
    """One step of a drafter model: `candidates` int64[C], their `logits` float32[C], the next `hidden` float32[H]."""

    candidates: Ids
    logits: Floats
    hidden: Floats


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a model, and what reading one costs.

    count, top : experts of a layer, and those that a row takes
    of_a_row : bytes of an expert, in all layers, as a share of all that a forward of one row reads
    """

    count: int
    top: int
    of_a_row: float


@dataclass(frozen=True)
class Proposals:
    """What heads say of k tokens to come: `candidates` int64[k, C] and their `logits` float32[k, C]."""

    candidates: Ids
    logits: Floats


class Session(Protocol):
    """One sequence: its committed tokens and their keys and values. Used by one thread at a time."""

    @property
    def exact_trees(self) -> bool:
        """Whether a row's outputs are the same bits in a tree as in a chain; else drafts must be chains."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The committed tokens. Not to be written to."""
        ...

    @property
    def length(self) -> int:
        """How many tokens are committed."""
        ...

    @property
    def pending(self) -> int:
        """Rows of the session's last forward, where nothing was committed since."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values, snapshots included."""
        ...

    def max_rows(self) -> int:
        """Rows that this sequence may have in the next forward; 0 where the context is full."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the session's last forward, each the parent of the next; drop the others."""
        ...

    def rewind(self, length: int) -> int:
        """Forget everything from position `length` on, and return how many tokens are left.

        That is `length`, or where sliding layers no longer hold the rows that it needs, the longest shorter sequence
        that a snapshot has them for, or 0.
        """
        ...

    def snapshot(self) -> None:
        """Remember what sliding layers hold now, so that a rewind to here will never have to compute it again."""
        ...

    def fork(self, length: int | None = None) -> Session:
        """A new session with a copy of the first `length` tokens, or, as with `rewind`, of fewer; None copies all."""
        ...

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        """One MTP step over the committed tokens. The position is `length`, the newest token's, for a whole round.

        The arrays of the answer are the session's own and hold until its next step, whose `hidden` may be one of them.
        """
        ...

    def propose(self, kind: str, hidden: Floats) -> Proposals:
        """What the bundle's heads of a kind make of a hidden state float32[H]: see `ondevice.contract`.

        Nothing of the sequence is read. The arrays of the answer are the session's own and hold until its next call.

        Raises:
            UsageError: the bundle has no heads of that kind.
        """
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Write the committed tokens with their keys and values to a file, all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """Drop the memory; the session is of no use afterwards."""
        ...


class Engine(Protocol):
    """The weights of one target, and of its drafter where the bundle has one, and the threads that compute.

    Several threads may call `forward`, and `draft_step` of different sessions, at once.
    """

    name: str
    target: Target
    has_drafter: bool
    kv_cache: str
    """What keys and values are held in."""
    context_length: int
    most_rows: int
    """Rows of one forward, all sequences together."""
    experts: ExpertShare | None
    """None where the target has none, or the engine does not tell how many it reads."""
    paths: PathMemory | None
    """What is known of paths on which drafts pay; None where all rows pass the whole target."""

    @property
    def heads(self) -> Mapping[str, HeadsEntry]:
        """The bundle's, by kind."""
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
        """Run new rows after the committed tokens of up to MOST_SESSIONS sessions and leave their KV pending.

        The weights are read once for all of them. A row's outputs depend on nothing beside it. A session's pending rows
        are replaced, and its outputs hold until it takes part in a forward again.

        A draft's chain is run token by token: rows of the chain before, and what it left of them in the lower layers,
        are not computed again, neither by the next draft forward nor by the whole one that verifies them. That changes
        no bit. All rows of a forward pass the same path.

        Raises:
            ValueError: no or too many rows or sessions, a session that is in the batch twice or not this engine's, or
                paths that differ or do not exist.
            UsageError: a session that was closed, or an engine that has no partial forwards.
        """
        ...

    def close(self) -> None: ...


__all__ = [
    "MOST_SESSIONS", "ROOT", "WHOLE", "DraftStep", "Engine", "ExpertShare", "Floats", "Ids", "KVCacheType", "LayerPath",
    "Outputs", "Proposals", "Rows", "Session", "TokenTree",
]  # fmt: skip
