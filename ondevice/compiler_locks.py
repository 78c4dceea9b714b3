"""Lets a process fork while one of its threads compiles, or loads, a function."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from llvmlite.binding import ffi
from numba.core.compiler_lock import global_compiler_lock

_held = ExitStack()


def _locks() -> list[AbstractContextManager[Any]]:
    """In the order in which a compiler takes them; LLVM's is private, and may be elsewhere in other versions."""
    lock = getattr(ffi.lib, "_lock", None)
    return [global_compiler_lock, *([] if lock is None else [lock])]


def _take() -> None:
    for lock in _locks():
        _held.enter_context(lock)


def hold_while_forking() -> None:
    """A fork waits for these locks: a child has no thread that would let go of them, and could compile nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_take, after_in_parent=_held.close, after_in_child=_held.close)
