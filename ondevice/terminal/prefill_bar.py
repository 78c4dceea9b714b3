"""How much of a long prompt has been read."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tqdm import tqdm

PATIENCE_S = 2.0
"""A prefill shorter than this needs no bar."""


class PrefillBar:
    """A bar on standard error, only on a terminal, that goes away when the prompt is done."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def show(self, done: int, total: int) -> None:
        """The prompt's tokens so far, and all of them."""
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, unit=" tokens", desc="prompt", delay=PATIENCE_S, leave=False, disable=None, file=sys.stderr
            )
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
