"""The model that a command line asks for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ondevice.terminal.progress_bar import byte_bar

if TYPE_CHECKING:
    from ondevice.model import Model


def load_model(args: argparse.Namespace) -> Model:
    """`ondevice.load`, with the options of `add_model_arguments` and a bar where weights are packed first."""
    import ondevice

    options = {name: getattr(args, name) for name in ("engine", "threads", "context_length", "kv_cache")}
    with byte_bar("packing weights") as bar:
        return ondevice.load(args.bundle, on_pack=bar.show, **options)
