"""Complaints of llguidance about grammars: all those that do not depend on the tokenizer, each in one line."""

from __future__ import annotations

import json
import re

from ondevice.errors import GrammarError, MissingDependencyError, one_line, pass_on, reason
from ondevice.grammar.limits import FUEL, library_limits

PATTERN_FUEL = 1000
"""Enough for the complaint about a pattern; compiling a large one may take more."""

UNREADABLE = re.compile("regex parse error|lookarounds")
"""Complaints about the syntax of a schema's pattern, which must be that of Rust's `regex` without look-around, and with
anchors only at its ends. `[^[]` and `a{,3}`, which other languages read, are none."""

PICTURE = re.compile(r"\s*(\^+|\d+ \| .*)?\s*")
"""A line of llguidance's error messages that shows the place of the mistake, or is empty."""


def complaint(grammar: str, fuel: int = FUEL) -> str | None:
    """The complaint about a grammar, which was checked for its length; None if there is none.

    Args:
        grammar: llguidance's JSON of grammars.
        fuel: llguidance's limit.

    Raises:
        GrammarError: llguidance failed in another way.
        MissingDependencyError: llguidance is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise MissingDependencyError("llguidance", "grammar", what="a reply with a grammar") from error
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=library_limits(fuel))
    except BaseException as error:
        pass_on(error)
        raise GrammarError(f"this grammar cannot be compiled: {reason(error)}") from error
    return said(messages[0]) if failed else None


def is_readable(pattern: str) -> bool:
    """Whether llguidance can read the pattern of a schema: 0.2 ms."""
    schema = {"type": "string", "pattern": pattern}
    found = complaint(json.dumps({"grammars": [{"json_schema": schema}]}), PATTERN_FUEL)
    return found is None or UNREADABLE.match(found) is None


def said(message: str) -> str:
    """An error message of llguidance in one line, without pictures of the place, the parser's state or the stack."""
    for more in ("<state>", "<non-verbose/>", "<backtrace>", "; following special tokens"):
        message = message.partition(more)[0]
    lines = message.splitlines()
    return one_line(" ".join(line.strip() for line in lines if not PICTURE.fullmatch(line)))[:300].strip()
