"""The grammar of a whole reply: thoughts, tool calls in the model's form, and an answer of some form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ondevice.errors import GrammarError, UsageError
from ondevice.grammar.call_forms import call_form, call_opening
from ondevice.grammar.limits import check_tools
from ondevice.grammar.response_format import Grammar, ToolChoice, quoted
from ondevice.text.messages import plain_tools


class Marks(NamedTuple):
    """Control tokens and text around the thoughts and the answer of a reply.

    opening, closing : around a thought; the closing is one control token
    after : between a thought and what follows it
    answer : before an answer. A reply with it is a list of messages: thoughts, remarks, and an answer or a call
    remark : before a remark to the user
    """

    opening: str
    closing: str
    after: str = ""
    answer: str = ""
    remark: str = ""


_MARKS = (
    Marks("<|channel>", "<channel|>"),
    Marks("<think>", "</think>", "\n\n"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>", "\n"),
    Marks(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant",
        "<|channel|>final<|message|>", "<|channel|>commentary<|message|>",
    ),
)  # fmt: skip
"""Marks of Gemma 4, Qwen3 (also EXAONE 4's and Granite 4's), Magistral, Seed-OSS and gpt-oss."""

_CONTROL = re.compile(r"(<\|?/?[\w:]+\|?>|\[/?\w+\])")
"""A control token in marks."""

_SPELLED = r"/(?s:.*)<\/think>/"
"""Thoughts that letters enclose, after their opening."""

_BEFORE_ANSWER = "<|assistant|>", "<|observation|>"
"""Control tokens of models whose answers begin with a line break, GLM-4's and GLM-Z1's; the former begins a message."""

CALLING = ("auto", "required", "one")


@dataclass(frozen=True)
class Parts:
    """Parts of a reply before its calls and its answer, as expressions of Lark.

    Attributes:
        thoughts: thoughts; empty if the reply has none.
        answer: the beginning of an answer; empty if it has none.
        remarks: thoughts and remarks to the user; empty if a reply is not a list of messages.
        text: any text of an answer; likewise.
    """

    thoughts: str = ""
    answer: str = ""
    remarks: str = ""
    text: str = ""

    @classmethod
    def of(
        cls,
        control_ids: Mapping[str, int],
        end_ids: Iterable[int],
        prompt_ids: Sequence[int],
        thinks: bool | None,
        tail: str = "",
    ) -> Parts:
        """
        Args:
            end_ids: tokens that end a reply.
            thinks: whether the reply may begin with thoughts. None: only a reply of messages may, whose model has no
                other way.
            tail: text of the prompt after its last control token.
        """
        marks = next((each for each in _MARKS if control_ids.keys() >= set(_CONTROL.findall("".join(each)))), None)
        if marks is None and control_ids.keys() >= set(_BEFORE_ANSWER):
            begun = tail.strip() == "<think>"
            opened = begun or (not tail and prompt_ids[-1:] == [control_ids[_BEFORE_ANSWER[0]]])
            return cls("thought" if begun else "", '"\\n"' if opened else "")
        if marks is None:
            return cls()
        opening, after, answer, remark = (
            _lark(text, control_ids) for text in (marks.opening, marks.after, marks.answer, marks.remark)
        )
        closing = control_ids[marks.closing]
        ends = [control_ids[text] for text in _CONTROL.findall(marks.closing + marks.after + marks.answer)]
        text = f"<[^{_ids(*ends, *end_ids)}]>*"
        rest = f"{text} <[{closing}]> {after}"
        known = {*ends, *(control_ids[text] for text in _CONTROL.findall(marks.opening))}
        last = next((token for token in reversed(prompt_ids) if token in known), None)
        if not marks.answer:
            begun = last not in (None, closing)
            return cls(rest if begun else f"({opening} {rest})?" if thinks else "")
        if last != control_ids[_CONTROL.findall(marks.after)[0]]:
            return cls()  # the prompt opens no message, or ends inside of one
        thoughts = "" if thinks is False else f"({opening} {rest})*"
        return cls(thoughts, answer, f"(({opening} | {remark}) {rest})*", text)


def reply_grammar(
    answer: Grammar | None,
    choice: ToolChoice,
    parts: Parts,
    control_ids: Mapping[str, int],
    end_ids: Iterable[int],
    *,
    tags: bool = False,
) -> str | None:
    """llguidance's JSON of grammars; None if any reply is allowed.

    Args:
        answer: grammar of the answer; ignored if the reply must be calls.
        parts: what comes before calls and the answer.
        control_ids: ids of the tokenizer's control tokens by their text.
        end_ids: tokens that end a reply.
        tags: whether the chat template writes calls between tags.

    Raises:
        UsageError: calls are wanted, and the model has no tokens for them.
        GrammarError: a tool's schema is invalid.
    """
    if choice.kind == "free" and choice.tools and answer is not None and call_form(control_ids, ()) is not None:
        choice = replace(choice, kind="auto")  # a form of the answer does not keep the model from calling
    calling = choice.kind in CALLING
    answer = None if choice.kind in ("required", "one") else answer
    # in a list of messages an answer is told from a call by its beginning, not by a token
    any_answer = bool(parts.text and choice.tools) and answer is None and choice.kind in ("auto", "none")
    if not calling and answer is None and not any_answer:
        return None
    before = parts.remarks if any_answer else parts.thoughts
    said, rules = "answer", []
    if answer is not None or any_answer:
        rules += [f"answer: {parts.answer} {parts.text if any_answer else '@answer'}"]
    if parts.thoughts == "thought":
        rules += [f"thought[lazy]: {_SPELLED}"]
    if calling:
        check_tools(choice.tools)
        try:
            form = call_form(control_ids, plain_tools(choice.tools) or (), tags=tags)
        except RecursionError as error:
            raise GrammarError("a tool's parameters hold too many objects in each other") from error
        if form is None:
            raise UsageError(
                "holding a reply to its tools (`tool_choice`, `strict`) needs a model that calls functions as Gemma 4, "
                "Qwen, Llama 3 or Mistral does, or gpt-oss, LFM2, Granite, EXAONE 4, Seed-OSS or GLM-4: this tokenizer "
                "has none of their control tokens"
            )
        rules += [f"call: {form.call}", form.rules]
        said = {"auto": f"answer | {form.several}", "required": form.several, "one": "call"}[choice.kind]
        if choice.kind == "auto" and answer is None and not any_answer:
            if (opening := call_opening(control_ids)) is None:
                return None  # nothing tells a call from other text
            rules += [f"free: <[^{_ids(opening, *end_ids)}]>"]
            said, before = f"(free | {form.several})*", ""  # thoughts are free as well
    grammars: list[Grammar] = [{"lark_grammar": "\n".join([f"start: {before} ({said})", *rules])}]
    if answer is not None:
        grammars.append({"name": "answer", **answer})
    try:
        written = json.dumps({"grammars": grammars}, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar holds half a surrogate pair, which is not text") from error
    return written


def _lark(text: str, control_ids: Mapping[str, int]) -> str:
    """A text with control tokens as an expression of Lark."""
    pieces = [piece for piece in _CONTROL.split(text) if piece]
    return " ".join(f"<[{control_ids[each]}]>" if _CONTROL.fullmatch(each) else quoted(each) for each in pieces)


def _ids(*token_ids: int) -> str:
    return ",".join(map(str, sorted(set(token_ids))))
