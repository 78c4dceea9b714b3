"""The file that answers are appended to as they come, and how a run that was killed goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from ondevice.errors import UsageError
from ondevice.terminal.batch.answer import Answer
from ondevice.terminal.batch.request import Request

if sys.platform != "win32":
    import fcntl

FIRST = b'{"line": '
"""How every answer begins. What is no beginning of one was not written here, and is left alone."""


class AnswerFile:
    """One JSON object per line. Every line is written at once, and a last one that was cut off by a kill is removed
    when the file is opened again: its prompt is asked again, so that nothing is lost and nothing is there twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = 0
        """Answers that are an error."""
        self._asked: dict[int, str] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        """
        Raises:
            OSError: it cannot be written.
            UsageError: another process writes to it, or it holds something else.
        """
        self._file = self.path.open("a+b", buffering=0)
        try:
            self._hold()
            self._recall()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def __len__(self) -> int:
        """Lines that are answered."""
        return len(self._asked)

    def has(self, request: Request) -> bool:
        """Whether a line is answered.

        Raises:
            UsageError: it was, and asked something else then.
        """
        asked = self._asked.get(request.line)
        if asked not in (None, request.asked):
            raise UsageError(
                f"{self.path} answers another question than line {request.line} asks: the prompts, the options or the "
                "bundle changed. Name another file with --out"
            )
        return asked is not None

    def write(self, answer: Answer) -> None:
        assert self._file is not None
        line = json.dumps(answer.record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        while line:  # one system call, but where the disk is full
            line = line[self._file.write(line) :]
        self._asked[answer.record["line"]] = answer.record["asked"]
        self.errors += answer.is_error

    def _hold(self) -> None:
        """Let no other process append to it, as long as this one lives. Windows has no such lock."""
        assert self._file is not None
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"another process writes to {self.path}: wait for it") from error
            except OSError:  # a disk that knows no locks
                pass

    def _recall(self) -> None:
        """Read what is answered, and cut off what is not a whole line."""
        assert self._file is not None
        self._file.seek(0)
        whole = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if line[: len(FIRST)] != FIRST[: len(line)] and line.strip(b"\0"):
                        raise self._stranger(number)
                    break
                whole += len(line)
                self._take(number, line)
        self._file.truncate(whole)

    def _take(self, number: int, content: bytes) -> None:
        try:
            record: Any = json.loads(content)
            line, asked, error = record["line"], record["asked"], record.get("error")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise self._stranger(number) from problem
        if line in self._asked:
            raise UsageError(f"{self.path} line {number} answers line {line} again: remove one of the two")
        self._asked[line] = asked
        self.errors += error is not None

    def _stranger(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path} line {number} was not written by `ondevice batch`: name another file with --out"
        )
