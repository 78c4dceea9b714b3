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


def load_model(args: argparse.Namespace) -> Model:
    """`ondevice.load`, with the options of `add_model_arguments` and a bar while the bundle is prepared first."""
    import ondevice

    options = {name: getattr(args, name) for name in ("engine", "threads", "context_length", "kv_cache")}
    drafter = getattr(args, "drafter", None)
    with preparing() as on_prepare:
        return ondevice.load(args.bundle, drafter=drafter, on_prepare=on_prepare, **options)


@contextmanager
def preparing() -> Iterator[OnPrepare]:
    """A bar, and a line where Ctrl-C ends it."""
    with ending_by_exception(), PreparationBar() as bar:
        try:
            yield bar.prepare
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted while the bundle was prepared: what is compiled is kept")
            raise
