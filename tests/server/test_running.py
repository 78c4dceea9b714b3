"""`ondevice serve` as a process: its line for a parent, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest

from tests.conftest import ROOT
from tests.server.served import PATIENCE_S, wait_until


@pytest.fixture
def slow(tmp_path):
    """A program whose replies take a while, whatever machine this is: a signal comes in the middle of one."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nfrom ondevice.engines.simd.engine import SimdEngine\n"
        "forward = SimdEngine.forward\n"
        "def late(engine, batch):\n    time.sleep(0.01)\n    return forward(engine, batch)\n"
        "SimdEngine.forward = late\n"
        "from ondevice.terminal.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return [str(script)]


@contextmanager
def process(bundle, *words, program=("-m", "ondevice")):
    """The server, and what its line says."""
    command = [sys.executable, *program, "serve", str(bundle), "--port", "0", "--threads", "1", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as started:
        try:
            assert started.stdout is not None
            yield started, json.loads(started.stdout.readline())
        finally:
            started.kill()


def is_ready(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def endless(told):
    """A stream that has begun."""
    connection = HTTPConnection(told["host"], told["port"], timeout=PATIENCE_S)
    fields = {"prompt": "import os\n", "stream": True, "temperature": 1, "max_tokens": 2000, "drafter": "none"}
    connection.request("POST", "/v1/completions", json.dumps(fields).encode())
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


def test_it_ends_with_its_parent(reference_bundle, slow):
    with process(reference_bundle, "--exit-with-parent", program=slow) as (started, told):
        assert told["pid"] == started.pid
        assert told["url"] == f"http://127.0.0.1:{told['port']}"
        wait_until(lambda: is_ready(told["url"]))
        answer = endless(told)
        started.stdin.close()
        assert started.wait(PATIENCE_S) == 0
        assert answer.read()
        assert started.stderr.read() == f"ondevice: reference at {told['url']} (Ctrl-C ends it)\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_it_cleanly(reference_bundle, slow, sent, code):
    with process(reference_bundle, program=slow) as (started, told):
        wait_until(lambda: is_ready(told["url"]))
        answer = endless(told)
        started.send_signal(sent)
        assert started.wait(PATIENCE_S) == code
        assert b'"code": 503' in answer.read()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_second_ctrl_c_ends_it_at_once(tmp_path, reference_bundle):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import sys, time\nimport ondevice.terminal.serve as serve\n"
        "serve.load_model = lambda args, tell: time.sleep(3600)\n"
        "from ondevice.terminal.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    with process(reference_bundle, program=[str(script)]) as (started, told):
        wait_until(lambda: not is_ready(told["url"]))
        started.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert started.poll() is None
        started.send_signal(signal.SIGINT)
        assert started.wait(PATIENCE_S) == -signal.SIGINT
