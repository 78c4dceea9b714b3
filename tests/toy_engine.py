"""An engine whose next token depends on all committed tokens: a wrong commit, row or rewind changes the output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest

from ondevice.arrays import Float32Array
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import HeadsEntry, Target
from ondevice.engines.kv_cache import KVCache, make_caches
from ondevice.engines.layer_path import PathMemory
from ondevice.engines.protocol import MAX_SESSIONS, DraftStep, ExpertShare, Outputs, Proposals, Rows
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.session_file import SessionOrigin
from tests.decoders_made import layer

VOCAB = 11
WINDOW = 16


class Clock:
    """The time that generations on the toy engine read: only what is said to take time does, on however busy a machine.

    now : seconds
    """

    READERS = (
        "ondevice.generate.loop",
        "ondevice.generate.stats",
        "ondevice.generate.batch",
        "ondevice.generate.drafters.draft_model",
        "tests.toy_engine",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in self.READERS:
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)

    def taking(self, seconds: float) -> Callable[[object], None]:
        """A function that takes some seconds, such as the `before` of an engine."""

        def take(_: object) -> None:
            self.now += seconds

        return take


class ToySession(CachedSequence):
    """A session whose caches hold the token ids themselves, and whose logits are computed from the caches."""

    def __init__(self, engine: ToyEngine) -> None:
        super().__init__(_caches(engine.target, engine.most_rows), SessionOrigin("toy", "toy", "none"))
        self.engine = engine

    def _sibling(self) -> ToySession:
        return self.engine.open_session()

    def max_rows(self, block: int = 1) -> int:
        return min(self.engine.most_rows, self.engine.context_length - self.length)

    def draft_step(self, token: int, hidden: Float32Array) -> DraftStep:
        raise AssertionError("the toy has no drafter")

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
        raise AssertionError("the toy has no heads")

    def run(self, rows: Rows) -> tuple[Float32Array, Float32Array]:
        tree, length = rows.tree, self.length
        assert 0 < len(tree) <= self.max_rows()
        self._pending = tree
        for cache in self._caches.values():
            cache.reserve(length, len(tree))
            first = length - cache.base
            for part in cache.parts(cache.layers[0]):
                part[first : first + len(tree), 0] = tree.tokens
        seen = tree.ancestors()
        found = [logits_after([*self.held(), *tree.tokens[seen[row]].tolist()]) for row in rows.wanted]
        logits = np.array(found, np.float32).reshape(len(found), VOCAB)
        return logits, logits.copy()

    def held(self) -> list[int]:
        """The committed tokens, read from the full cache, with the last ones read from the sliding cache."""
        full, sliding = self._caches["full"], self._caches["sliding"]
        known = [int(token) for token in full.view(0, 0, self.length)[0][:, 0]]
        first = max(0, self.length - WINDOW)
        recent = [int(token) for token in sliding.view(1, first, self.length)[1][:, 0]]
        return known[:first] + recent


class ToyEngine:
    """
    Args:
        chunk: most rows of one forward.
        before: called with the batch before every forward.
    """

    name = "toy"
    has_drafter = False
    heads: ClassVar[Mapping[str, HeadsEntry]] = {}
    kv_cache = "none"
    experts: ExpertShare | None = None
    paths: PathMemory | None = None

    def __init__(
        self, context_length: int = 10_000, chunk: int = 64, before: Callable[[Sequence[Rows]], None] | None = None
    ) -> None:
        self.target = Target(
            graph="none",
            hidden_size=VOCAB,
            norm_eps=1e-6,
            rotary=(),
            vocab_size=VOCAB,
            context_length=context_length,
            embedding_factor=1.0,
            softcap=None,
            tied=True,
            layers=(layer(), layer(window=WINDOW)),
        )
        self.context_length = context_length
        self.most_rows = chunk
        self.forwards = 0
        self.batches: list[list[int]] = []
        """For every forward, the number of rows of each sequence."""
        self._before = before
        self._lock = threading.Lock()

    def open_session(self) -> ToySession:
        return ToySession(self)

    def load_session(self, path: str | PathLike[str]) -> ToySession:
        session = self.open_session()
        session.load(path, VOCAB, self.context_length - 1)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        started = perf_counter()
        with self._lock:
            if self._before is not None:
                self._before(batch)
            sessions: list[Any] = [rows.session for rows in batch]
            if not 0 < len(batch) <= MAX_SESSIONS or len(set(map(id, sessions))) < len(batch):
                raise ValueError("a batch has 1 to 16 different sessions")
            for session in sessions:
                session.check_open()
            total = sum(len(rows.tree) for rows in batch)
            if total > self.most_rows:
                raise ValueError(f"{total} rows do not fit: at most {self.most_rows}")
            self.forwards += 1
            self.batches.append([len(rows.tree) for rows in batch])
            wanted = sum(len(rows.wanted) for rows in batch)
            results: list[tuple[Float32Array, Float32Array]] = [
                session.run(rows) for session, rows in zip(sessions, batch, strict=True)
            ]
            seconds = perf_counter() - started
            return [Outputs(logits, hidden, total, wanted, seconds) for logits, hidden in results]

    def close(self) -> None:
        """Do nothing: the toy holds no resources."""


def _caches(target: Target, most_rows: int) -> dict[AttentionKind, KVCache]:
    return make_caches(target, lambda layer: np.dtype((np.int64, (1,))), most_rows)


def logits_after(tokens: Sequence[int]) -> Float32Array:
    """Logits float32[VOCAB], a deterministic function of the whole sequence."""
    seed = np.frombuffer(np.asarray(tokens, np.uint8).tobytes().rjust(4, b"\0"), np.uint8)
    return 2 * np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
