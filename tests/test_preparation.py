"""Preparing a bundle for this machine: once, complete, with progress, and interruptible at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

import ondevice
from ondevice import Model, machine, model
from ondevice.generate.sampling import Sampler
from ondevice.preparation import Group, Preparation

SECOND = """
import json, sys
import ondevice
from ondevice import jit
from ondevice.bundle import Bundle
from ondevice.cli.info import bundle_facts

compiled = []
with jit.counting(lambda: compiled.append(1)):
    for kv_cache, attention in (("fp16", "exact"), ("int8", "exact"), ("int8", "lookup")):
        with ondevice.load(sys.argv[1], threads=1, kv_cache=kv_cache, attention=attention) as model:
            for options in ({"temperature": 0.0}, {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "seed": 1}):
                model.generate("def is_prime(n):", max_new_tokens=40, **options)
print(json.dumps([len(compiled), bundle_facts(Bundle.open(sys.argv[1]))["prepared"]]))
"""


def environment(cache: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return {**others, "ONDEVICE_CACHE": str(cache)}


def test_everything_that_generations_need_is_compiled_at_once(reference_export: Path, first_preparation: Path) -> None:
    announced, ready = (first_preparation / "stderr").read_text("utf-8").splitlines()
    assert announced == "preparing for this machine: compiling kernels once"
    assert ready.startswith(f"{reference_export}: ready on this machine")
    cache = first_preparation / "cache"
    assert not [path for path in cache.rglob("*") if ".tmp." in path.name]

    ended = subprocess.run(
        [sys.executable, "-c", SECOND, str(reference_export)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(cache),
    )
    assert json.loads(ended.stdout) == [0, True]
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
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "ondevice: interrupted while preparing the bundle: kernels compiled so far are kept\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not [path for path in tmp_path.rglob("*") if ".tmp." in path.name or path.suffix == ".part"]


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group that another process compiles for ever."""
    (tmp_path / "endless.py").write_text(
        f"import os, time\nfrom ondevice.engines.simd.kernels.matmul.project import softcap\n"
        f"def calls():\n"
        f"    if os.getpid() != {os.getpid()}:\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"        time.sleep(600)\n"
        f"    return [(softcap, (0, 64, 1, 1.0))]\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(machine, "processors", lambda: 2)
    return Group("endless:calls", 2)


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by signal")
def test_an_exception_from_the_callback_ends_the_processes(endless: Group, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def stop(stage: str, share: float) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    def compile_all() -> None:
        with Preparation(stop) as preparing:
            preparing.compile([endless])
            preparing.finish()

    with pytest.raises(KeyboardInterrupt):
        compile_all()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by signal")
def test_a_process_that_ends_early_leaves_its_work_to_this_one(endless: Group, tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    pid = tmp_path / "pid"

    def kill(stage: str, share: float) -> None:
        heard.append((stage, share))
        if pid.exists() and pid.read_text() and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(int(pid.read_text()), signal.SIGKILL)

    with Preparation(kill) as preparing:
        preparing.compile([endless])
        preparing.finish()
    shares = [share for _, share in heard]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_cache_that_cannot_be_written_is_said_in_the_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    with Preparation() as preparing:
        preparing.compile([Group("ondevice.generate.warm_up:calls", 1)])
        preparing.announce("packing")
        preparing.finish()
    (line,) = caplog.messages
    assert f"at every start, because {tmp_path / 'file' / 'below'} cannot be written to: set ONDEVICE_CACHE" in line
    assert line.endswith(", packing")


def test_a_cancel_while_a_generation_begins_is_not_lost(
    reference_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sampler needs may be compiled then, where nothing was prepared."""
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
