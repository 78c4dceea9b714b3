"""Limits of what a grammar may cost: checked before it is compiled, in addition to llguidance's own limits.

A grammar comes from a stranger, and compiling it must take neither seconds nor gigabytes. llguidance counts its work
as "fuel", which bounds repetitions (`(a{1000}){1000}`), long texts and large schemas. Some things escape it, because a
single step of it can take any time:

- the intersection of many patterns, which doubles with every pattern (a schema of 2 KB with 40 patterns in an `allOf`
  takes all memory of the machine);
- `multipleOf`, whose automaton has a state per remainder (12 s for 1,000,003);
- `maxLength` beside a pattern, which can take a step per character;
- the bounds of a range of integers, which are negated: -2**63 is its own negative there, which recurses until the stack
  overflows, and the process ends with a segmentation fault (llguidance 1.8 to 1.9.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import isfinite, lcm
from typing import TYPE_CHECKING, Any

from ondevice.errors import GrammarError, shown
from ondevice.text.messages import text_length

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_CHARACTERS = 1 << 17
"""Longest grammar: texts and names of a schema or of tools, a pattern, or all words of a `choice`."""

MAX_WORDS = 10_000
"""Most words of a `choice`."""

MAX_PATTERNS = 8
"""Most patterns of a schema that may intersect them: eight take 1.5 s, and every further one takes 2.6 times that."""

MAX_OPERATORS = 3
"""Most `&` and `~` of a Lark grammar. Each can double the number of patterns that are intersected, through a rule that
is used twice."""

MAX_DIVISOR = 10_000
"""Largest `multipleOf`, without zeros at its end, which cost nothing. 2**20 takes 1.2 s, and 2**31 no end."""

MAX_LENGTHS = 50_000
"""Largest sum of the `minLength` and `maxLength` that may intersect a pattern. 100,000 take 2.4 s beside `\\\\d+`."""

MIN_NUMBER = 1024 - 2**63
"""Least number of a schema. llguidance reads the integers below it as the float -2**63, and takes those still smaller
for it."""

FUEL = 100_000
"""llguidance's limit for compiling, and for the text that a grammar forces at one place: 50,000 characters take 80 ms,
in which no other thread runs."""

MAX_STATES = 50_000
"""llguidance's limit for the states of a lexer, of 1 to 2 KB each."""

MAX_RULES = 20_000
"""llguidance's limit for the size of a grammar: about seven for each property of a schema. Where thousands of
alternatives are possible at one place, looking for forced tokens takes a time in the square of their number, in which
no other thread runs: 5,000 take 0.2 s, and 2,000 objects of five properties in an `anyOf` took 0.9 s."""

COMBINING = ("anyOf", "oneOf", "$ref")
DESCRIBING = ("pattern", "format", "multipleOf", "properties", "patternProperties", "additionalProperties", "items")

TOKENS = re.compile(
    r"""(?x)
    (?://|\#)[^\n]*                # comment
    | "(?:\\.|[^"\\\n])*+"?        # text
    | /(?:\\.|[^/\\])++/?          # pattern
    | <[^<>\s]+>                   # special token
    | (?P<operator>&|~(?!\s*\d))   # `~ 3` is a repetition
    | (?P<json>%json\s*)
    """
)
"""Tokens of llguidance's Lark in which an operator is none, and those that count. An open text or pattern is an error
of the compiler."""


def library_limits(fuel: int = FUEL) -> LLParserLimits:
    """The limits that llguidance keeps itself."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=fuel, max_lexer_states=MAX_STATES, max_grammar_size=MAX_RULES, verbose_errors=False
    )


def check_length(value: Any, what: str) -> None:
    """
    Raises:
        GrammarError: the texts in a value of JSON are longer than MAX_CHARACTERS.
    """
    if (length := text_length(value)) > MAX_CHARACTERS:
        raise GrammarError(f"{what} of {length} characters is too long: {MAX_CHARACTERS} are possible")


def check_schema(schema: Any) -> None:
    """
    Raises:
        GrammarError: a JSON schema is too long, intersects too many patterns, or has a number that is infinite, too
            small or too large a `multipleOf`.
    """
    check_length(schema, "a schema")
    _check_numbers(schema)
    nodes = list(_objects(schema))
    combines = intersects(schema)
    patterns = {(name, str(node[name])) for node in nodes for name in ("pattern", "format") if name in node}
    if combines and len(patterns) > MAX_PATTERNS:
        raise GrammarError(
            f"a schema with allOf, or with {', '.join(COMBINING)} beside other keywords, may have {MAX_PATTERNS} "
            f"different patterns and formats, not {len(patterns)}"
        )
    _check_divisors(nodes, intersects=combines)
    _check_lengths(nodes, intersects=combines)


def check_tools(tools: Any) -> None:
    """
    Raises:
        GrammarError: declarations of tools are too long, or have a number that is too small or too large a
            `multipleOf`.
    """
    check_length(tools, "declarations of tools")
    _check_numbers(tools)
    nodes = list(_objects(tools))
    _check_divisors(nodes, intersects=False)
    _check_lengths(nodes, intersects=intersects(tools))


def intersects(schema: Any, describing: Collection[str] = DESCRIBING) -> bool:
    """Whether a value may have to follow two descriptions of a schema at the same time.

    Args:
        describing: the keywords that are a description where they stand beside anyOf, oneOf or $ref.
    """
    return any(_intersects(node, describing) for node in _objects(schema))


def check_lark(text: str) -> None:
    """
    Raises:
        GrammarError: a Lark grammar is too long, has too many operators, or a schema that `check_schema` refuses.
    """
    check_length(text, "a grammar")
    operators = 0
    for token in TOKENS.finditer(text):
        operators += token["operator"] is not None
        if token["json"] is not None:
            try:
                schema, _ = json.JSONDecoder().raw_decode(text, token.end())
            except (ValueError, RecursionError):
                continue  # the compiler says where it is wrong
            check_schema(schema)
    if operators > MAX_OPERATORS:
        raise GrammarError(f"a grammar may have {MAX_OPERATORS} operators & and ~, not {operators}")


def check_words(words: Sequence[str]) -> None:
    """
    Raises:
        GrammarError: a `choice` has too many words, or they are too long.
    """
    if len(words) > MAX_WORDS:
        raise GrammarError(f"choice has {len(words)} words: {MAX_WORDS} are possible")
    check_length(words, "a choice")


def _values(value: Any) -> Iterator[Any]:
    """All values in a value of JSON, and itself."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in a value of JSON. Some may be no schemas, as those in an `enum`."""
    return (each for each in _values(value) if isinstance(each, Mapping))


def _check_numbers(schema: Any) -> None:
    for each in _values(schema):
        if isinstance(each, float) and not isfinite(each):  # Python's reader of JSON takes NaN, Infinity and 1e999
            raise GrammarError(f"a schema may not have the number {each}")
        if isinstance(each, int | float) and each < MIN_NUMBER:
            raise GrammarError(f"a schema may have numbers from {MIN_NUMBER}, not {shown(each)}")


def _check_divisors(nodes: Iterable[Mapping[str, Any]], *, intersects: bool) -> None:
    """
    Args:
        intersects: whether a number may have to be a multiple of several of them.
    """
    divisors = [_divisor(node["multipleOf"]) for node in nodes if "multipleOf" in node]
    if (largest := lcm(*divisors) if intersects else max(divisors, default=1)) > MAX_DIVISOR:
        raise GrammarError(f"multipleOf may be {MAX_DIVISOR} without zeros at its end, not {shown(largest)}")


def _check_lengths(nodes: Iterable[Mapping[str, Any]], *, intersects: bool) -> None:
    """
    Args:
        intersects: whether a text may have to follow a pattern and a length of different objects.
    """
    limited = [node for node in nodes if intersects or "pattern" in node or "format" in node]
    lengths = [node.get(name) for node in limited for name in ("minLength", "maxLength")]
    if (total := sum(max(each, 0) for each in lengths if isinstance(each, int | float))) > MAX_LENGTHS:
        raise GrammarError(f"minLength and maxLength beside patterns may be {MAX_LENGTHS} together, not {shown(total)}")


def _intersects(node: Mapping[str, Any], describing: Collection[str]) -> bool:
    """Whether a value must follow two descriptions at the same time."""
    combined = sum(name in node for name in COMBINING)
    return "allOf" in node or combined > 1 or (combined == 1 and any(name in node for name in describing))


def _divisor(value: Any) -> int:
    """The digits of a number as a whole number without zeros at its end; 1 for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 1
    digits = abs(int("".join(map(str, Decimal(str(value)).as_tuple().digits))))
    while digits % 10 == 0:
        digits //= 10
    return digits
