"""The form of an answer, as the command line says it: JSON, a schema, a pattern, a few choices, a grammar."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice.errors import UsageError
from ondevice.text.prompt_file import read_text

WORDS = ("auto", "required", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "form of the answer", "No token can leave it; what it forces is drafted. Needs the extra [grammar]."
    )
    forms = group.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that keeps to the schema in this file")
    forms.add_argument("--json-object", action="store_true", help="a JSON object")
    forms.add_argument("--regex", metavar="PATTERN", help="all of it matches this regular expression")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; to be repeated")
    forms.add_argument("--lark", type=Path, metavar="FILE", help="a grammar in Lark's syntax, as llguidance reads it")
    group.add_argument(
        "--tool-choice",
        metavar="WHAT",
        help="with --tools: auto holds calls to their declarations, required wants one, none forbids them, "
        "and a function's name wants a call of that one",
    )


def response_format(args: argparse.Namespace) -> dict[str, Any] | None:
    """The option of that name; None where any text will do.

    Raises:
        UsageError: a file that cannot be read, or is no JSON.
    """
    if args.json_schema is not None:
        return {"type": "json_schema", "json_schema": {"schema": _json(args.json_schema)}}
    if args.json_object:
        return {"type": "json_object"}
    if args.lark is not None:
        return {"type": "lark", "lark": read_text(args.lark)}
    if args.regex is not None:
        return {"type": "regex", "regex": args.regex}
    return None if args.choice is None else {"type": "choice", "choice": args.choice}


def tool_choice(args: argparse.Namespace) -> str | Mapping[str, Any] | None:
    """The option of that name; a name of none of the words is a function's."""
    chosen: str | None = args.tool_choice
    if chosen is None or chosen in WORDS:
        return chosen
    return {"type": "function", "function": {"name": chosen}}


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
