"""A fork, and the locks of the compiler."""

from __future__ import annotations

import os
import threading
import time

import pytest
from llvmlite.binding import ffi
from numba.core.compiler_lock import global_compiler_lock

import ondevice.jit  # noqa: F401 - which makes forks wait

LOCKS = {"numba": global_compiler_lock, "llvm": ffi.lib._lock}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", LOCKS)
def test_a_child_can_compile_whatever_its_parent_was_doing(name: str) -> None:
    lock, taken, leave = LOCKS[name], threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            leave.wait(60)

    def let_go() -> None:
        time.sleep(0.2)
        leave.set()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(60)
    threading.Thread(target=let_go).start()
    child = os.fork()
    if not child:
        os._exit(0 if lock._lock.acquire(blocking=False) else 1)
    assert leave.is_set(), "the fork came while the lock was held"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holder.join()
    assert lock._lock.acquire(blocking=False)
    lock._lock.release()
