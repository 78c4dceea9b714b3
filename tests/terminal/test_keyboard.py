"""Keys that are typed while a reply is written, at a terminal."""

import os
import subprocess
import sys

import pytest

from tests.terminal.test_pasting import read_until

pytest.importorskip("termios", reason="Windows has none")
pty = pytest.importorskip("pty", reason="Windows has none")

CODE = """
import sys
from ondevice.terminal.keyboard import unseen_keys
with unseen_keys():
    print("begun", flush=True)
    sys.stdin.readline()
    print("reply", flush=True)
print("ended", flush=True)
print("got", sys.stdin.readline(), flush=True)
"""


def test_they_are_not_seen_and_not_lost():
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", CODE], stdin=theirs, stdout=theirs)
    os.close(theirs)
    try:
        read_until(ours, b"begun\r\n")
        os.write(ours, b"go\nnext\n")
        seen = read_until(ours, b"got next")
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert seen.splitlines()[:3] == ["reply", "ended", "got next"]
