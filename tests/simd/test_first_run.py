"""The wait for the compiler is announced, once per machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.engines.simd.first_run import announce_compilation


def test_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    announce_compilation()
    announce_compilation()
    assert len(caplog.records) == 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "cache"))
    announce_compilation()
