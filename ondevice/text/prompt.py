"""What a caller may pass as a prompt, and the token ids it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import SupportsIndex, TypeGuard

from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.chat_options import ChatOptions
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.messages import Message, plain, plain_messages, plain_tools
from ondevice.text.strangers import Strangers
from ondevice.text.tokenizer import Tokenizer

Prompt = str | Sequence[Message] | Sequence[int]

PLAIN = ChatOptions()


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    most_tokens: int | None = None,
    chat: ChatOptions = PLAIN,
) -> list[int]:
    """Token ids of a text, of a list of messages, or of a list of token ids, which stays as it is.

    A plain text is the author's own: control tokens written in it count, as they do in a system message (`<|think|>`).
    In what strangers write they are plain text (`text.strangers`): nobody but the author can end a turn or begin one.

    Args:
        most_tokens: a text that surely has more is refused before it is encoded.
        chat: what the template is told beside the messages.

    Raises:
        UsageError: `chat` says something, and the prompt is no list of messages.
        PromptError: empty, of another type, or of a kind that this bundle cannot encode.
        ContextOverflowError: more than `most_tokens`.
    """
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("the prompt is empty: pass some text, at least one message or at least one token id")
    if chat and (isinstance(prompt, str) or not isinstance(prompt[0], Mapping)):
        raise UsageError("tools, thinking and template_options are for a prompt of messages, not for a text")
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
    return _some(
        _encode_chat(messages, tokenizer, template, most_tokens, chat), "chat template makes no text of these messages"
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
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    most_tokens: int | None,
    chat: ChatOptions,
) -> list[int]:
    said = plain_messages(messages)
    variables = plain({**chat.variables, "tools": plain_tools(chat.tools)}, "template_options")
    strangers = Strangers(tokenizer)
    marked = strangers.marked(said, variables)
    said, variables = marked or (said, variables)
    text = template.render(said, **variables)
    _check_length(text, tokenizer, most_tokens)
    return strangers.encode(text) if marked else tokenizer.encode(text, add_special_tokens=False)
