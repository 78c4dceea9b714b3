"""Preparing a bundle for this machine: once, complete, with progress, and interruptible at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model, model
from ondevice.generate.sampling.sampler import Sampler
from ondevice.native import building, library
from ondevice.preparation import Preparation

SECOND = """
import json, sys
import ondevice
from ondevice.bundle import Bundle
from ondevice.cli.info import bundle_facts

for kv_cache, attention in (("fp16", "exact"), ("int8", "exact"), ("int8", "lookup")):
    with ondevice.load(sys.argv[1], threads=1, kv_cache=kv_cache, attention=attention) as model:
        for options in ({"temperature": 0.0}, {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "seed": 1}):
            model.generate("def is_prime(n):", max_new_tokens=40, **options)
print(json.dumps(["numba" in sys.modules, bundle_facts(Bundle.open(sys.argv[1]))["prepared"]["done"]]))
"""


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "ONDEVICE_CACHE": str(cache)}


def test_everything_that_generations_need_is_compiled_at_once(reference_export: Path, first_preparation: Path) -> None:
    """An export announces it once, and nothing is left for later commands."""
    assert (first_preparation / "export").read_text("utf-8") == "preparing for this machine: compiling kernels once\n"
    ready = (first_preparation / "prepare").read_text("utf-8")
    assert ready.startswith(f"{reference_export}: ready on this machine")
    cache = first_preparation / "cache"
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} <= {
        ".block",
        ".json",
        ".origin",
        ".pack",
        ".used",
    }

    ended = subprocess.run(
        [sys.executable, "-c", SECOND, str(reference_export)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(cache),
    )
    assert json.loads(ended.stdout) == [False, True]
    assert ended.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_it_with_one_line(reference_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ondevice", "generate", str(reference_bundle), "x"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert "preparing" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said == "ondevice: interrupted while preparing the bundle: kernels compiled so far are kept\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") or path.suffix == ".part"]


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the builder's process write its number to the returned file, and then never end."""
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print(flush=True); time.sleep(600)"
    monkeypatch.setattr(building, "_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setattr(library, "missing", list)
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    return pid


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by signal")
def test_an_exception_from_the_callback_ends_the_process(endless: Path) -> None:
    def stop(stage: str, share: float) -> None:
        if endless.exists() and endless.read_text():
            raise KeyboardInterrupt

    def build() -> None:
        with Preparation(stop) as preparing:
            preparing.compile(["tokens"])
            preparing.finish()

    with pytest.raises(KeyboardInterrupt):
        build()
    with pytest.raises(ProcessLookupError):
        os.kill(int(endless.read_text()), 0)


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by signal")
def test_a_process_that_is_killed_is_an_error_of_one_line(endless: Path) -> None:
    def kill(stage: str, share: float) -> None:
        if endless.exists() and endless.read_text():
            os.kill(int(endless.read_text()), signal.SIGKILL)

    with Preparation(kill) as preparing:
        preparing.compile(["tokens"])
        with pytest.raises(ondevice.OndeviceError, match=r"^kernels for this CPU could not be built: exit code -9$"):
            preparing.finish()


def test_a_cache_that_cannot_be_written_is_said_in_the_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(library, "_unkept", {})
    heard: list[float] = []
    with Preparation(lambda stage, share: heard.append(share)) as preparing:
        preparing.compile(["roofline"])
        preparing.announce("packing")
        preparing.finish()
    if library.choice().file is None:  # in memory, for the rest of the process
        assert library.missing(["roofline", "tokens"]) == ["tokens"]
        assert library.find("roofline") is not None
    (line,) = caplog.messages
    assert f"at every start, because {tmp_path / 'file' / 'below'} cannot be written to: set ONDEVICE_CACHE" in line
    assert line.endswith(", packing")
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_kernels_that_cannot_be_written_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk, which shows only when they are written. A directory of the file's name is as good here."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_unkept", {})
    monkeypatch.setattr(library, "SHIPPED", tmp_path / "none")
    library.choice.cache_clear()
    file = library.cached("roofline")
    file.mkdir(parents=True)
    with Preparation() as preparing:
        preparing.compile(["roofline"])
        preparing.finish()
    assert library.find("roofline") is not None
    assert caplog.messages[-1] == f"{file.parent} could not be written to (Is a directory): kernels stay in memory"
    assert list(file.parent.iterdir()) == [file]
    library.choice.cache_clear()


def test_a_cancel_while_a_generation_begins_is_not_lost(
    reference_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a sampler may be compiled then, where nothing was prepared."""
    sampler = Sampler

    def slow(*words: Any, **named: Any) -> object:
        reference_model.cancel()
        return sampler(*words, **named)

    monkeypatch.setattr(model, "Sampler", slow)
    reply = reference_model.generate("x", max_new_tokens=300)
    assert (reply.finish_reason, reply.token_ids) == ("cancelled", ())


def test_prepare_loads_and_leaves_nothing_open(reference_bundle: Path) -> None:
    ondevice.prepare(reference_bundle, engine="ort", threads=1)
    with pytest.raises(ondevice.UsageError, match="on_prepare must be a function"):
        ondevice.prepare(reference_bundle, on_prepare=3)  # type: ignore[arg-type]
