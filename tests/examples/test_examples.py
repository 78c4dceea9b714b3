"""The examples run as they stand there."""

import os
import subprocess
import sys

import ondevice
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
PATIENCE_S = 300


def run(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)


def test_two_replies_in_one_event_loop(reference_bundle):
    ended = run(EXAMPLES / "asyncio" / "two_replies.py", reference_bundle)
    with ondevice.load(reference_bundle) as model:
        reply = model.generate("def is_even(n):", max_new_tokens=200, temperature=0.0)
    assert (ended.returncode, ended.stdout) == (0, f"{reply.text}\n"), ended.stderr


def test_a_parent_and_its_sidecar(reference_bundle):
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "sidecar")!r})
from parent import Sidecar
with Sidecar({str(reference_bundle)!r}) as sidecar:
    sidecar.wait_until_ready()
    asked = [{{"role": "user", "content": "def is_even(n):"}}]
    print("".join(sidecar.chat(asked, max_tokens=30, temperature=0)), end="")
    endless = sidecar.chat(asked)
    next(endless)
print(sidecar._process.returncode)
"""
    ended = run("-c", code)
    asked = [{"role": "user", "content": "def is_even(n):"}]
    with ondevice.load(reference_bundle) as model:
        reply = model.generate(asked, max_new_tokens=30, temperature=0.0)
    assert ended.stdout == f"{reply.text}0\n", ended.stderr


def test_a_sidecar_that_cannot_start_says_why(tmp_path):
    ended = run(EXAMPLES / "sidecar" / "parent.py", tmp_path / "nowhere", "hello")
    assert ended.returncode == 2
    assert "no bundle at" in ended.stderr
    assert "Traceback" not in ended.stderr
