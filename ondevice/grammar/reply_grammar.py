"""The grammar of a whole reply: thoughts, tool calls in the model's form, and an answer of some form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ondevice.errors import GrammarError, UsageError
from ondevice.grammar.call_forms import call_form, call_opening
from ondevice.grammar.limits import check_tools
from ondevice.grammar.response_format import Grammar, ToolChoice, quoted
from ondevice.text.messages import plain_tools

_MARKS = (("<|channel>", "<channel|>", ""), ("<think>", "</think>", "\n\n"), ("[THINK]", "[/THINK]", ""))
"""Control tokens around thoughts, of Gemma 4, Qwen3 and Magistral, and the text between a thought and the answer."""

CALLING = ("auto", "required", "one")


@dataclass(frozen=True)
class Thoughts:
    """Tokens of a thought before the answer.

    Attributes:
        opening: token id that begins a thought.
        closing: token id that ends it.
        begun: whether the prompt ends inside a thought.
        after: text between a thought and the answer.
    """

    opening: int
    closing: int
    begun: bool
    after: str = ""

    @classmethod
    def of(cls, control_ids: Mapping[str, int], prompt_ids: Sequence[int], wanted: bool) -> Thoughts | None:
        """None if the reply has no thought, or the model has no tokens for it."""
        known = next((marks for marks in _MARKS if control_ids.keys() >= set(marks[:2])), None)
        if known is None:
            return None
        opening, closing = (control_ids[text] for text in known[:2])
        last = next((token for token in reversed(prompt_ids) if token in (opening, closing)), None)
        begun = last == opening
        return cls(opening, closing, begun, known[2]) if wanted or begun else None


def reply_grammar(
    answer: Grammar | None,
    choice: ToolChoice,
    thoughts: Thoughts | None,
    control_ids: Mapping[str, int],
    end_ids: Iterable[int],
) -> str | None:
    """llguidance's JSON of grammars; None if any reply is allowed.

    Args:
        answer: grammar of the answer; ignored if the reply must be calls.
        control_ids: ids of the tokenizer's control tokens by their text.
        end_ids: tokens that end a reply.

    Raises:
        UsageError: calls are wanted, and the model has no tokens for them.
        GrammarError: a tool's schema is invalid.
    """
    if choice.kind == "free" and choice.tools and answer is not None and call_form(control_ids, ()) is not None:
        choice = replace(choice, kind="auto")  # a form of the answer does not keep the model from calling
    calling = choice.kind in CALLING
    answer = None if choice.kind in ("required", "one") else answer
    if not calling and answer is None:
        return None
    said, rules = "answer", [] if answer is None else ["answer: @answer"]
    if calling:
        check_tools(choice.tools)
        try:
            form, opening = call_form(control_ids, plain_tools(choice.tools) or ()), call_opening(control_ids)
        except RecursionError as error:
            raise GrammarError("a tool's parameters hold too many objects in each other") from error
        if form is None:
            raise UsageError(
                "holding a reply to its tools (`tool_choice`, `strict`) needs a model that calls functions as Gemma 4, "
                "Qwen, Llama 3 or Mistral does: this tokenizer has none of their control tokens"
            )
        rules += [f"call: {form.call}", form.rules]
        said = {"auto": f"answer | {form.several}", "required": form.several, "one": "call"}[choice.kind]
        if choice.kind == "auto" and answer is None:
            if opening is None:
                return None  # nothing tells a call from other text
            rules += [f"free: <[^{_ids(opening, *end_ids)}]>"]
            said, thoughts = f"(free | {form.several})*", None  # thoughts are free as well
    if thoughts is not None:
        after = quoted(thoughts.after) if thoughts.after else ""
        rules += [f"thought: <[^{_ids(thoughts.closing, *end_ids)}]>* <[{thoughts.closing}]> {after}"]
        said = f"thought ({said})" if thoughts.begun else f"(<[{thoughts.opening}]> thought)? ({said})"
    grammars: list[Grammar] = [{"lark_grammar": "\n".join([f"start: {said}", *rules])}]
    if answer is not None:
        grammars.append({"name": "answer", **answer})
    try:
        written = json.dumps({"grammars": grammars}, ensure_ascii=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar holds half a surrogate pair, which is not text") from error
    return written


def _ids(*token_ids: int) -> str:
    return ",".join(map(str, sorted(set(token_ids))))
