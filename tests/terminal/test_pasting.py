"""Lines that are pasted into a chat, at a terminal with GNU readline."""

import os
import select
import subprocess
import sys
import time

import pytest

readline = pytest.importorskip("readline", reason="Windows has none")
pty = pytest.importorskip("pty", reason="Windows has none")

CODE = """
from ondevice.terminal.lines import messages, typed
for message in messages(typed()):
    print("got", [message], flush=True)
"""


def read_until(terminal, words):
    """What is written up to some words; all of it where they do not come."""
    found, ends = b"", time.monotonic() + 30
    while words not in found and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.1)[0]:
            found += os.read(terminal, 4096)
    return found.decode()


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit knows no bracketed paste")
def test_pasted_lines_are_one_message():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", CODE], stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    try:
        assert "\x1b[?2004h" in read_until(ours, b"> ")  # asks the terminal to mark what is pasted
        os.write(ours, b"\x1b[200~def f(x):\n    return x\x1b[201~\r")
        assert "got ['def f(x):\\n    return x']" in read_until(ours, b"return x']")
    finally:
        child.kill()
        child.wait()
        os.close(ours)
