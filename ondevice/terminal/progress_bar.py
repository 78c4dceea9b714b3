"""How far something is that a person waits for."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm

PATIENCE_S = 2.0
"""What takes less needs no bar."""


class ProgressBar:
    """A bar on standard error, only on a terminal, that goes away when all is done."""

    def __init__(self, title: str, **options: Any) -> None:
        """
        Args:
            title: what is going on.
            options: of tqdm, which is imported when there is something to show.
        """
        self._options = {"desc": title, "delay": PATIENCE_S, "leave": False, "disable": None, **options}
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def show(self, done: int, total: int) -> None:
        """So much is done, of so much."""
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, file=sys.stderr, **self._options)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def prompt_bar() -> ProgressBar:
    return ProgressBar("prompt", unit=" tokens")


def byte_bar(title: str) -> ProgressBar:
    return ProgressBar(title, unit="B", unit_scale=True)
