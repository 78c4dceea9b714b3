"""The spelling of tool calls as Gemma 4 writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ondevice.grammar.call_rules import WORD, Brackets, CallRules
from ondevice.grammar.response_format import quoted

CALL = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Control tokens of a call: before it, after it, and around a string in it."""


class CallTokens(NamedTuple):
    """Ids of Gemma's control tokens around a call, and around a string in it."""

    opening: int
    closing: int
    quote: int


class GemmaCalls(CallRules):
    """A call is `<|tool_call>call:NAME{key:value,...}<tool_call|>`, with keys bare and in the order of jinja's
    `dictsort`, in which the template writes earlier calls; strings between `<|"|>`, in which nothing is escaped; other
    values as in JSON.
    """

    arguments = objects = Brackets("{", "}", lambda name: quoted(f"{name}:"), f'{WORD} ":"')
    comma = ","
    words = {word: quoted(word) for word in ("true", "false", "null")}  # noqa: RUF012

    def __init__(self, tools: Iterable[Mapping[str, Any]], tokens: CallTokens) -> None:
        """
        Raises:
            GrammarError: a schema with a `$ref` that leads nowhere.
        """
        self._tokens = tokens
        super().__init__(tools)

    def called(self, name: str, arguments: str) -> str:
        return f"<[{self._tokens.opening}]> {quoted(f'call:{name}')} {arguments} <[{self._tokens.closing}]>"

    def string(self, text: str) -> str:
        return self._between(quoted(text))

    def strings(self, schema: Mapping[str, Any]) -> str:
        return self._between(self.texts(schema))

    def ordered(self, pairs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return sorted(pairs.items(), key=lambda item: item[0].lower())

    def _between(self, text: str) -> str:
        return f"<[{self._tokens.quote}]> {text} <[{self._tokens.quote}]>"
