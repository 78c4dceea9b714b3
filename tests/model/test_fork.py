"""A fork has a model's memory and none of its threads: it must say so, and not wait for them for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import ondevice
from ondevice.engines.choice import EngineName
from ondevice.errors import UsageError
from tests.conftest import ENGINES
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

PROMPT = "def add(a, b):"


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit code of a forked process: 0 where nothing was raised, negative where it had to be ended."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(300)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_of_no_use_in_a_fork_and_says_so(reference_bundle: Path, engine: EngineName) -> None:
    model = ondevice.load(reference_bundle, engine=engine, threads=2)
    expected = model.generate(PROMPT, max_new_tokens=8, temperature=0.0).token_ids
    begun = model.stream(PROMPT, max_new_tokens=50)
    next(begun)

    def work() -> None:
        for use in (lambda: model.generate(PROMPT), lambda: next(begun), lambda: model.encode("x"), model.forget):
            with pytest.raises(UsageError, match="this model was loaded before the process was forked"):
                use()
        model.cancel()
        model.close()

    assert in_a_fork(work) == 0
    begun.close()
    assert model.generate(PROMPT, max_new_tokens=8, temperature=0.0).token_ids == expected
    model.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fork_can_load_a_model_of_its_own(reference_bundle: Path, engine: EngineName) -> None:
    """Also while another thread of its parent computes."""
    with ondevice.load(reference_bundle, engine=engine, threads=2) as model:
        expected = model.generate(PROMPT, max_new_tokens=8, temperature=0.0).token_ids
        ended = threading.Event()

        def keep_busy() -> None:
            while not ended.is_set():
                model.generate(PROMPT, max_new_tokens=20)

        def work() -> None:
            with pytest.raises(UsageError, match="before the process was forked"):
                model.generate(PROMPT)  # whose locks the busy thread may hold for ever here
            model.close()
            with ondevice.load(reference_bundle, engine=engine, threads=2) as own:
                assert own.generate(PROMPT, max_new_tokens=8, temperature=0.0).token_ids == expected

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            assert [in_a_fork(work) for _ in range(3)] == [0, 0, 0]
        finally:
            ended.set()
            busy.join()


def test_a_fork_can_drop_a_generation_whatever_other_threads_hold(tmp_path: Path) -> None:
    """Ending one takes locks, each of which a thread of the parent may have at the moment of the fork."""
    with model_over(ToyEngine(), write_bundle(tmp_path)) as model:
        begun = model.stream("abcde", max_new_tokens=50, drafter="ngram")
        next(begun)
        scheduler, held, forked = model._scheduler, threading.Event(), threading.Event()
        owners = (scheduler, scheduler.batch, scheduler._cache, scheduler._costs, scheduler._drafters)

        def hold() -> None:
            with ExitStack() as locks:
                for owner in owners:
                    locks.enter_context(owner._lock.lock)
                held.set()
                forked.wait()

        other = threading.Thread(target=hold)
        other.start()
        held.wait()
        try:
            assert in_a_fork(begun.close) == 0
        finally:
            forked.set()
            other.join()
        assert len(list(begun)) > 0
