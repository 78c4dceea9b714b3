"""`/image` and `/audio` of `ondevice chat` at a terminal of 40 columns: lines, and files that are none."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from tests.cli.terminal.test_keys import read_until, terminal_running
from tests.media.pictures_made import png
from tests.media.sounds_made import tone, wav

fcntl = pytest.importorskip("fcntl", reason="not on Windows")
termios = pytest.importorskip("termios", reason="not on Windows")

COLUMNS = 40
CHAT = """
import os, sys
os.dup2(1, 2)
os.chdir({directory!r})
from ondevice.cli.main import main
sys.exit(main(["chat", {bundle!r}, "--plain", "-n", "3", "--threads", "1", "--engine", "simd"]))
"""
ESCAPE_CODE = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")
REFUSED = {
    "gone": "cannot read gone: No such file or directory",
    ".": "cannot read .: Is a directory",
    "/dev/zero": "cannot read /dev/zero: it is a device or a pipe, not a file",
    "fifo": "cannot read fifo: it is a device or a pipe, not a file",
}
"""Answers that `/image` and `/audio` share, by the name of the file."""
DAMAGED = {
    "/image": "picture 1 is damaged, or no PNG, JPEG, WEBP or GIF file",
    "/audio": "sound 1 is not a sound file: WAV, and with soundfile FLAC, Ogg, MP3 and AIFF can be read",
}


class Chat:
    """A chat at a terminal."""

    def __init__(self, terminal: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self._terminal = terminal
        self.begins = self._lines()

    def answer(self, line: str) -> list[str]:
        """The lines that a typed line leads to, until the next prompt."""
        os.write(self._terminal, f"{line}\r".encode())
        echo, *found = self._lines()
        assert echo == line
        return found

    def _lines(self) -> list[str]:
        found = ESCAPE_CODE.sub("", read_until(self._terminal, b"> \x1b[0m")).replace("\r", "")
        assert found.endswith("\n> "), found
        return found.removesuffix("\n> ").split("\n")


def check_words(lines: list[str], text: str) -> None:
    """Check that the lines are the text, and none is wider than the terminal."""
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= COLUMNS


def test_lines_and_files_that_are_none(chat_bundle: Path, tmp_path: Path) -> None:
    files = {"photo.png": png(50, 50), "other.png": png(30, 90), "it.wav": wav(tone(0.5)), "no": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "fifo")
    code = CHAT.format(directory=str(tmp_path), bundle=str(chat_bundle))
    with terminal_running(code, TERM="xterm", COLUMNS="", ONDEVICE_HOME=str(tmp_path / "home")) as terminal:
        chat = Chat(terminal)
        assert max(map(len, chat.begins)) <= COLUMNS
        for command, damaged in DAMAGED.items():
            for name, complaint in REFUSED.items():
                check_words(chat.answer(f"{command} {name}"), f"ondevice: {complaint}")
            check_words(chat.answer(f"{command} no"), f"ondevice: {damaged}")
        check_words(chat.answer("/image"), "(nothing goes with the next message)")
        for line in ("/image photo.png", "/image other.png"):
            found = chat.answer(line)
        check_words(
            chat.answer("/audio it.wav"),
            "(with the next message: photo.png (66 tokens), other.png (58 tokens), it.wav (15 tokens))",
        )
        assert len(found) == 2
        assert "(cut at --max-new-tokens)" in chat.answer("the fox")[-2:]
        check_words(chat.answer("/audio"), "(nothing goes with the next message)")
