"""A reply as it appears: text as it comes, thoughts folded away, calls in a line each; or JSON, a line per step."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Protocol

from ondevice.reply import Reply, Step
from ondevice.terminal.style import dim
from ondevice.text.tool_call import ToolCall


class View(Protocol):
    """Sees every step, and then the reply."""

    def step(self, step: Step) -> None: ...

    def end(self, reply: Reply) -> None: ...


class TextView:
    """Text on standard output. Of thoughts, one dim line on standard error says that they are there."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """
        Args:
            as_ids: without a tokenizer, write the ids themselves, in the form that `--ids` reads.
        """
        self._as_ids = as_ids
        self._last = ""
        """The character that was written last."""
        self._thinks_since = 0.0

    def step(self, step: Step) -> None:
        if step.reasoning and not self._thinks_since:
            self._thinks_since = perf_counter()
            self._say("(thinking ...", end="")
        if self._as_ids and step.token_ids:
            self._write(("," if self._last else "") + ",".join(map(str, step.token_ids)))
        self._write(step.text)
        for call in step.tool_calls:
            self._write(("" if self._last in ("", "\n") else "\n") + f"{written(call)}\n")

    def end(self, reply: Reply) -> None:
        self._fold()
        if self._last != "\n":
            print(flush=True)

    def _write(self, text: str) -> None:
        if text:
            self._fold()
            self._last = text[-1]
            sys.stdout.write(text)
            sys.stdout.flush()

    def _fold(self) -> None:
        """The thoughts are over."""
        if self._thinks_since:
            self._say(f" {perf_counter() - self._thinks_since:.1f} s)", end="\n")
            self._thinks_since = 0.0

    def _say(self, text: str, end: str) -> None:
        print(dim(text, sys.stderr), end=end, file=sys.stderr, flush=True)


class JsonLinesView:
    """One object per step on standard output."""

    def step(self, step: Step) -> None:
        fields = {"text": step.text, "reasoning": step.reasoning, "token_ids": list(step.token_ids)}
        if step.tool_calls:
            fields["tool_calls"] = [call.as_openai() for call in step.tool_calls]
        print(json.dumps(fields), flush=True)

    def end(self, reply: Reply) -> None:
        """What there is to say at the end is the command's business."""


def written(call: ToolCall) -> str:
    """A call in one line."""
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
