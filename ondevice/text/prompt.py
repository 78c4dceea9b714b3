"""What a caller may pass as a prompt, and the token ids it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import SupportsIndex, TypeGuard

from ondevice.errors import ContextOverflowError, PromptError
from ondevice.text.chat_template import ChatTemplate, Message, check_messages
from ondevice.text.tokenizer import Tokenizer

Prompt = str | Sequence[Message] | Sequence[int]

STRANGERS = ("user", "tool")
"""Roles whose messages are not written by the application or by the model."""

OPENING, CLOSING = "\ue000", "\ue001"
"""Private-use characters around a control token that a user wrote, while the template is rendered."""


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, template: ChatTemplate | None, most_tokens: int | None = None
) -> list[int]:
    """Token ids of a text, of a list of messages, or of a list of token ids, which stays as it is.

    A plain text is the author's own: control tokens written in it count, as they do in a system message (`<|think|>`).
    In the messages of users and tools they are plain text, because a stranger must not be able to end a turn or begin
    one.

    Args:
        most_tokens: a text that surely has more is refused before it is encoded.

    Raises:
        PromptError: empty, of another type, or of a kind that this bundle cannot encode.
        ContextOverflowError: more than `most_tokens`.
    """
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("the prompt is empty: pass some text, at least one message or at least one token id")
    if _is_token_ids(prompt):
        return [index(token_id) for token_id in prompt]
    if tokenizer is None:
        raise PromptError("this bundle has no tokenizer.json: pass token ids (on the command line: --ids 2,5,7)")
    if isinstance(prompt, str):
        _check_length(prompt, tokenizer, most_tokens)
        return _some(tokenizer.encode(prompt), "tokenizer makes no token of this prompt")
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if len(messages) < len(prompt):
        raise PromptError("a prompt list holds either messages with 'role' and 'content' or token ids, nothing else")
    if template is None:
        raise PromptError("this bundle has no chat_template.jinja: pass the prompt as plain text instead of messages")
    check_messages(messages)
    return _some(
        _encode_chat(messages, tokenizer, template, most_tokens), "chat template makes no text of these messages"
    )


def _is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and all(isinstance(item, SupportsIndex) for item in prompt)


def _some(ids: list[int], obstacle: str) -> list[int]:
    if not ids:
        raise PromptError(f"the prompt is empty: this bundle's {obstacle}")
    return ids


def _check_length(text: str, tokenizer: Tokenizer, most_tokens: int | None) -> None:
    if most_tokens is not None and len(text) > most_tokens and tokenizer.fewest_tokens(text) > most_tokens:
        raise ContextOverflowError(tokenizer.fewest_tokens(text), most_tokens, counted=False)


def _encode_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, template: ChatTemplate, most_tokens: int | None
) -> list[int]:
    specials = "|".join(map(re.escape, tokenizer.special_texts)) or "(?!)"
    control = re.compile(specials)
    if not any(control.search(message["content"]) for message in messages if message["role"] in STRANGERS):
        text = template.render(messages)
        _check_length(text, tokenizer, most_tokens)
        return tokenizer.encode(text, add_special_tokens=False)
    text = template.render([_mark(message, control) for message in messages])
    _check_length(text, tokenizer, most_tokens)
    # One group: every second piece is a marked control token, or None where the template tore its marks apart.
    pieces = re.split(f"{OPENING}({specials}){CLOSING}|[{OPENING}{CLOSING}]", text)
    ids: list[int] = []
    for position, piece in enumerate(pieces):
        if piece:
            ids += tokenizer.encode(piece, add_special_tokens=False, parse_special=position % 2 == 0)
    return ids


def _mark(message: Message, control: re.Pattern[str]) -> Message:
    """What the model said keeps its control tokens too: the template looks for them to drop old thoughts."""
    if message["role"] not in STRANGERS:
        return message
    content = message["content"].replace(OPENING, "").replace(CLOSING, "")
    return {**message, "content": control.sub(rf"{OPENING}\g<0>{CLOSING}", content)}
