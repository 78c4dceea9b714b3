"""`ondevice chat` at a real terminal, made with `pty`: pasted lines, and keys typed while a reply is written."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

readline = pytest.importorskip("readline", reason="not on Windows")
pty = pytest.importorskip("pty", reason="not on Windows")

READ_MESSAGES = """
from ondevice.cli.chat import messages, typed_lines
for text, is_quoted in messages(typed_lines()):
    print("got", [text], "quoted" if is_quoted else "", flush=True)
"""

REPLY = """
import sys
from ondevice.cli.terminal.progress import unseen_keys
with unseen_keys():
    print("begun", flush=True)
    sys.stdin.readline()
    print("reply", flush=True)
print("ended", flush=True)
print("got", sys.stdin.readline(), flush=True)
"""


@contextmanager
def terminal_running(code: str, **environment: str) -> Iterator[int]:
    """Run Python code at a new terminal; yields a descriptor to type and read there."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, **environment}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, env=variables)
    os.close(theirs)
    try:
        yield ours
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def read_until(terminal: int, words: bytes) -> str:
    """The output until some words appear, or for five minutes."""
    found, ends = b"", time.monotonic() + 300
    while words not in found and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.1)[0]:
            found += os.read(terminal, 4096)
    return found.decode()


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste")
def test_pasted_lines_are_one_message():
    with terminal_running(READ_MESSAGES, TERM="xterm") as terminal:
        assert "\x1b[?2004h" in read_until(terminal, b"> ")  # asks the terminal to mark pasted text
        os.write(terminal, b"\x1b[200~def f(x):\n    return x\x1b[201~\r")
        assert "got ['def f(x):\\n    return x'] quoted" in read_until(terminal, b"quoted")


def test_a_dumb_terminal_gets_no_codes():
    with terminal_running(READ_MESSAGES, TERM="dumb") as terminal:
        assert read_until(terminal, b"> ") == "> "


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste")
def test_pasted_quotes_wait_for_no_others():
    with terminal_running(READ_MESSAGES, TERM="xterm") as terminal:
        read_until(terminal, b"> ")
        os.write(terminal, b'\x1b[200~"""Sums."""\nimport math\x1b[201~\r')
        assert """got ['\"\"\"Sums.\"\"\"\\nimport math'] quoted""" in read_until(terminal, b"quoted")


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit completes without the space")
def test_tab_completes_a_command():
    with terminal_running(READ_MESSAGES, TERM="xterm") as terminal:
        read_until(terminal, b"> ")
        os.write(terminal, b"/reg\t\r")
        assert "got ['/regenerate']" in read_until(terminal, b"enerate']")


def test_keys_typed_during_a_reply_are_not_echoed_and_not_lost():
    with terminal_running(REPLY) as terminal:
        read_until(terminal, b"begun\r\n")
        os.write(terminal, b"go\nnext\n")
        seen = read_until(terminal, b"got next")
    assert seen.splitlines()[:3] == ["reply", "ended", "got next"]
