"""Applications that were frozen into an executable, which is the only interpreter they have."""

from __future__ import annotations

import sys

COMPILE = "--ondevice-compile"
"""The first argument of an executable that its own process starts, to compile kernels."""

_supported = False


def freeze_support() -> None:
    """Let a frozen application compile kernels in processes beside its own: call this before anything else.

    Such a process is the application's executable, started again: this call then compiles, and does not return.
    PyInstaller's hook makes it; with other tools an application does, or compiles in its own process, which takes
    longer. Where nothing is frozen it does nothing.
    """
    global _supported  # noqa: PLW0603
    if not is_frozen():
        return
    if sys.argv[1:2] == [COMPILE]:
        from ondevice.preparation import main

        main(sys.argv[2:])
        sys.exit()
    _supported = True


def is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))


def is_supported() -> bool:
    """Whether this process's executable can be started to compile."""
    return _supported
