"""`ondevice serve` as a process: the line of JSON for its parent, signals, and the end of its parent."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest

from tests.conftest import ROOT
from tests.server.served import PATIENCE_S, wait_until


@pytest.fixture
def slow(tmp_path):
    """A program whose forwards take 10 ms at least, so that a signal arrives in the middle of a reply."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nfrom ondevice.engines.simd.engine import SimdEngine\n"
        "forward = SimdEngine.forward\n"
        "def late(engine, batch):\n    time.sleep(0.01)\n    return forward(engine, batch)\n"
        "SimdEngine.forward = late\n"
        "from ondevice.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return [str(script)]


@contextmanager
def process(bundle, *words, program=("-m", "ondevice")):
    """The process, and the line of JSON that it prints."""
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


def listens(address):
    try:
        socket.create_connection((address["host"], address["port"]), PATIENCE_S).close()
    except ConnectionError:
        return False
    return True


def endless(address):
    """A long stream that has begun, and does not end by itself."""
    fields = {"prompt": "import os\n", "stream": True, "max_tokens": 2000, "drafter": "none", "ignore_eos": True}
    connection = HTTPConnection(address["host"], address["port"], timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(fields).encode())
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


def test_exit_with_parent(reference_bundle, slow):
    with process(reference_bundle, "--exit-with-parent", program=slow) as (started, address):
        assert address["pid"] == started.pid
        assert address["url"] == f"http://127.0.0.1:{address['port']}"
        wait_until(lambda: is_ready(address["url"]))
        answer = endless(address)
        started.stdin.close()
        assert started.wait(PATIENCE_S) == 0
        assert answer.read()
        assert started.stderr.read() == f"ondevice: reference at {address['url']} (Ctrl-C ends it)\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_cancels_replies_and_ends_it(reference_bundle, slow, sent, code):
    with process(reference_bundle, program=slow) as (started, address):
        wait_until(lambda: is_ready(address["url"]))
        answer = endless(address)
        started.send_signal(sent)
        assert started.wait(PATIENCE_S) == code
        assert b'"code": 503' in answer.read()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_second_ctrl_c_ends_it_at_once(tmp_path, reference_bundle):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import sys, time\nimport ondevice.cli.serve as serve\n"
        "serve.load_model = lambda args, tell: time.sleep(3600)\n"
        "from ondevice.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    with process(reference_bundle, program=[str(script)]) as (started, address):
        wait_until(lambda: not is_ready(address["url"]))
        started.send_signal(signal.SIGINT)
        wait_until(lambda: not listens(address))
        assert started.poll() is None
        started.send_signal(signal.SIGINT)
        assert started.wait(PATIENCE_S) == -signal.SIGINT
