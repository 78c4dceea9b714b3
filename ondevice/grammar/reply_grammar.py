"""The grammar of a whole reply: thoughts, calls, and an answer of some form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ondevice.errors import GrammarError, UsageError
from ondevice.grammar.call_rules import CallRules, CallTokens
from ondevice.grammar.response_format import Grammar, ResponseFormat
from ondevice.grammar.tool_choice import ToolChoice
from ondevice.text.messages import plain_tools

CALL = ("<|tool_call>", "<tool_call|>", '<|"|>')
THOUGHT = ("<|channel>", "<channel|>")
CALLING = ("auto", "required", "one")


@dataclass(frozen=True)
class Thoughts:
    """Where a reply thinks before it answers.

    opening, closing : token ids around a thought
    begun : whether the prompt ends inside one
    """

    opening: int
    closing: int
    begun: bool

    @classmethod
    def of(cls, control_ids: Mapping[str, int], prompt_ids: Sequence[int], wanted: bool) -> Thoughts | None:
        """None where the model does not think, or knows no such tokens."""
        if not all(text in control_ids for text in THOUGHT):
            return None
        opening, closing = (control_ids[text] for text in THOUGHT)
        last = next((token for token in reversed(prompt_ids) if token in (opening, closing)), None)
        begun = last == opening
        return cls(opening, closing, begun) if wanted or begun else None


def reply_grammar(
    answer: ResponseFormat,
    choice: ToolChoice,
    thoughts: Thoughts | None,
    control_ids: Mapping[str, int],
    end_ids: Iterable[int],
) -> str | None:
    """llguidance's JSON of grammars; None where any reply will do.

    Args:
        control_ids: of the tokenizer's control tokens, by how they are written.
        end_ids: tokens that end a reply.

    Raises:
        UsageError: calls, for a model that knows no such tokens.
        GrammarError: a tool's schema that makes no sense.
    """
    calling, answering = choice.kind in CALLING, answer.grammar is not None and choice.kind not in ("required", "one")
    if not calling and not answering:
        return None
    said, rules = "answer", ["answer: @answer"] if answering else []
    if calling:
        calls = CallRules(plain_tools(choice.tools) or (), _call_tokens(control_ids, choice))
        rules += [f"call: {calls.start}", calls.text]
        said = {"auto": "answer | call+", "required": "call+", "one": "call"}[choice.kind]
    if calling and choice.kind == "auto" and not answering:
        rules += [f"free: <[^{_ids(control_ids[CALL[0]], *end_ids)}]>"]
        said, thoughts = "(free | call)*", None  # thoughts are free as well
    if thoughts is not None:
        rules += [f"thought: <[^{_ids(thoughts.closing, *end_ids)}]>* <[{thoughts.closing}]>"]
        said = f"thought ({said})" if thoughts.begun else f"(<[{thoughts.opening}]> thought)? ({said})"
    grammars: list[Grammar] = [{"lark_grammar": "\n".join([f"start: {said}", *rules])}]
    if answering and answer.grammar is not None:
        grammars.append({"name": "answer", **answer.grammar})
    try:
        written = json.dumps({"grammars": grammars}, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar holds half a surrogate pair, which is not text") from error
    return written


def _call_tokens(control_ids: Mapping[str, int], choice: ToolChoice) -> CallTokens:
    for text in CALL:
        if text not in control_ids:
            raise UsageError(
                f"tool_choice {choice.kind!r} needs a model that calls functions as Gemma 4 does: "
                f"this tokenizer has no {text}"
            )
    return CallTokens(*(control_ids[text] for text in CALL))


def _ids(*token_ids: int) -> str:
    return ",".join(map(str, sorted(set(token_ids))))
