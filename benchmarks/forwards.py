"""Forwards of an engine without the text layer around it, and the time that work takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from ondevice.engines.protocol import Outputs, Rows, Session, TokenTree


class Forwarder(Protocol):
    """The part of `Engine` that is timed."""

    name: str

    def open_session(self) -> Session: ...

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]: ...


def forward(engine: Forwarder, session: Session, tokens: Sequence[int], wanted: Sequence[int]) -> Outputs:
    """Run one forward of a chain of tokens; its rows are not kept."""
    return engine.forward([Rows(session, TokenTree.chain(tokens), wanted)])[0]


def read(engine: Forwarder, session: Session, tokens: Sequence[int]) -> Outputs:
    """Read tokens into the cache in one forward; the outputs are those of the last."""
    outputs = forward(engine, session, tokens, [len(tokens) - 1])
    session.commit(range(len(tokens)))
    return outputs


def timed(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    started = perf_counter()
    work()
    return perf_counter() - started
