"""Compiled code: where it is kept, and what is said while it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import event

from ondevice import jit
from ondevice.jit import ANNOUNCER, Announcer, kernel


def ours() -> Callable[[int], int]:
    """A function as a module of this package would have it."""

    def double(number: int) -> int:
        return 2 * number

    double.__module__ = "ondevice.somewhere"
    return double


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    return tmp_path


@pytest.fixture
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache directory cannot be written to."""
    monkeypatch.setattr(jit, "can_keep", lambda: False)


def test_code_is_kept_in_the_cache_directory(cache: Path) -> None:
    assert kernel(ours())(4) == 8
    assert list(cache.rglob("*.nbc"))
    assert not vars(numba.config)["CACHE_DIR"], "the host's own functions go where they went"


def test_a_place_that_numba_was_told_of_is_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "told"))
    kernel(ours())(4)
    assert list((tmp_path / "told").rglob("*.nbc"))


@pytest.mark.usefixtures("no_place")
def test_nothing_that_can_be_written_to_is_no_obstacle(cache: Path) -> None:
    assert kernel(ours())(4) == 8
    assert list(cache.iterdir()) == []


def test_a_function_that_allocates_does_not_compile() -> None:
    """Its code would need numba's memory manager, at every call."""

    def allocate(count: int) -> int:
        return len(np.empty(count))

    allocate.__module__ = "ondevice.somewhere"
    with pytest.raises(numba.TypingError, match="empty"):
        kernel(allocate)(4)


def said(caplog: pytest.LogCaptureFixture, *functions: Callable[[int], int]) -> list[str]:
    """What is logged while these are compiled, as if by a new process."""
    event.unregister("numba:compile", ANNOUNCER)
    with event.install_listener("numba:compile", Announcer()):
        for function in functions:
            kernel(function)(4)
    event.register("numba:compile", ANNOUNCER)
    return [record.getMessage() for record in caplog.records]


def test_compiling_is_announced_once_and_loading_is_not(caplog: pytest.LogCaptureFixture) -> None:
    first = ours()
    (message,) = said(caplog, first, ours())
    assert "once" in message
    caplog.clear()
    assert said(caplog, first) == []


@pytest.mark.usefixtures("no_place")
def test_it_says_where_it_wanted_to_keep_the_code(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (message,) = said(caplog, ours())
    assert f"{cache} cannot be written to: set ONDEVICE_CACHE" in message


def test_the_functions_of_others_are_their_own_affair(caplog: pytest.LogCaptureFixture) -> None:
    theirs = ours()
    theirs.__module__ = "json.somewhere"
    assert said(caplog, theirs) == []
