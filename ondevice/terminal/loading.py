"""The model that a command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ondevice.progress import OnPrepare
from ondevice.terminal.interrupt import ending_by_exception
from ondevice.terminal.progress_bar import PreparationBar

if TYPE_CHECKING:
    from ondevice.model import Model


OPTIONS = (
    "engine",
    "threads",
    "context_length",
    "kv_cache",
    "attention",
    "attention_keys",
    "attention_width",
    "drafter",
    "max_sequences",
)


def load_model(args: argparse.Namespace, tell: OnPrepare | None = None) -> Model:
    """`ondevice.load`, with the options that the command has, and a bar while the bundle is prepared first.

    Args:
        tell: hears of the preparation too.
    """
    import ondevice

    options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    with preparing() as show:

        def on_prepare(what: str, share: float) -> None:
            if tell is not None:
                tell(what, share)
            show(what, share)

        return ondevice.load(args.bundle, on_prepare=on_prepare, **options)


@contextmanager
def preparing() -> Iterator[OnPrepare]:
    """A bar, and a line where Ctrl-C ends it."""
    with ending_by_exception(), PreparationBar() as bar:
        try:
            yield bar.prepare
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted while the bundle was prepared: what is compiled is kept")
            raise
