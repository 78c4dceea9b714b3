"""The text side of a bundle: prompts to token ids, and token ids of a reply to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TypeGuard

from ondevice.bundle import CHAT_TEMPLATE, RESPONSE_TEMPLATE, TOKENIZER, Bundle
from ondevice.bundle_format.manifest import Manifest
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.messages import ChatOptions, Message, plain, plain_messages, plain_tools
from ondevice.text.reply_parser import ReplyParser, ResponseTemplate, begun_reply
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.untrusted_text import ControlTokens, marked_messages, marked_values

Prompt = str | Sequence[Message] | Sequence[int]
"""A text, a list of messages, or a list of token ids."""

PLAIN = ChatOptions()

BEGINNING = 8
"""Characters for each token of the context, at the beginning of a text that may be too long."""

MOST_CHANGED = 64
"""Tokens at the end of a beginning that further text may join."""


class TextCodec:
    """Tokenizer, chat template and response template of a bundle; each is optional.

    Without a tokenizer only token ids pass, and without a response template all of a reply is text.
    """

    def __init__(self, bundle: Bundle) -> None:
        """
        Raises:
            BundleCorruptError: a file cannot be read.
        """
        self.tokenizer: Tokenizer | None = None
        self._controls: ControlTokens | None = None
        self._response: ResponseTemplate | None = None
        self._vocab_size = bundle.manifest.target.vocab_size
        path, template = bundle.file(TOKENIZER), bundle.file(CHAT_TEMPLATE)
        if path is None:
            return
        manifest = bundle.manifest
        self.tokenizer = tokenizer = Tokenizer.from_file(path, manifest.bos_token_id)
        eos = manifest.eos_token_ids[0] if manifest.eos_token_ids else None
        names = {"bos_token": manifest.bos_token_id, "eos_token": eos, "pad_token": manifest.pad_token_id}
        special = {name: tokenizer.text_of(token) for name, token in names.items()}
        if (response := bundle.file(RESPONSE_TEMPLATE)) is not None:
            self._response = ResponseTemplate.from_file(response, tokenizer)
        if template is not None:
            self._controls = ControlTokens(tokenizer, ChatTemplate.from_file(template, special), self._acting(manifest))

    def encode(self, prompt: Prompt, context_length: int, chat: ChatOptions = PLAIN) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context.

        Raises:
            PromptError: as `encode_prompt` does, or for an id out of range.
            ContextOverflowError: no room is left for a reply.
        """
        token_ids = encode_prompt(prompt, self.tokenizer, self._controls, context_length, chat)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise PromptError(f"token id {token} is out of range: this model has ids 0 to {self._vocab_size - 1}")
        if len(token_ids) >= context_length:
            raise ContextOverflowError(len(token_ids), context_length)
        return token_ids

    def reply_stream(
        self, prompt_ids: Sequence[int], stop: str | Sequence[str] | None, *, single_call: bool = False
    ) -> ReplyStream | None:
        """A `ReplyStream` for the reply to a prompt; None without a tokenizer.

        Raises:
            UsageError: stop strings were given, and the bundle has no tokenizer.
        """
        if self.tokenizer is None:
            if stop:
                raise UsageError("stop strings need a tokenizer, and this bundle has none")
            return None
        text_ids = [token for token in prompt_ids if token >= 0]  # without the soft tokens of pictures
        return ReplyStream(self.tokenizer, stop, self._parser(self.tokenizer, text_ids), single_call=single_call)

    def _acting(self, manifest: Manifest) -> set[int]:
        """Ids of the tokens that end a reply or stand around and for media, and those of the response template."""
        acting = set(manifest.eos_token_ids) | set(self._response.controls if self._response else ())
        if (vision := manifest.vision) is not None:
            acting |= {vision.begin_token_id, vision.image_token_id, vision.end_token_id}
        if (audio := manifest.audio) is not None:
            acting |= {audio.begin_token_id, audio.audio_token_id, audio.end_token_id}
        return acting

    def _parser(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> ReplyParser | None:
        """A parser for the reply; None if the whole reply is text, as after a prompt that opens no reply."""
        if self._response is None:
            return None
        begun = begun_reply(self._response, tokenizer, prompt_ids)
        return None if begun is None else ReplyParser(self._response, begun)


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    controls: ControlTokens | None,
    most_tokens: int | None = None,
    chat: ChatOptions = PLAIN,
) -> list[int]:
    """Token ids of a text, of a list of messages, or of a list of token ids, which stays as it is.

    A plain text is the application's own: control tokens written in it count, as in a system message (`<|think|>`).
    In untrusted text they are plain characters (`text.untrusted_text`): only the application can end or begin a turn.

    Args:
        tokenizer: the bundle's; None if it has none.
        controls: the control tokens of chats, with the chat template; None if the bundle has none.
        most_tokens: longest prompt; a text that must have more is refused before it is encoded.
        chat: tools and other variables of the template.

    Raises:
        UsageError: `chat` is not empty, and the prompt is no list of messages.
        PromptError: the prompt is empty, of another type, or this bundle cannot encode its kind.
        ContextOverflowError: the prompt has more than `most_tokens`.
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
        return _not_empty(tokenizer.encode(prompt), "tokenizer makes no token of this prompt")
    if most_tokens is not None and len(prompt) > most_tokens:  # before rendering them, which takes seconds
        raise ContextOverflowError(len(prompt), most_tokens, counted=False)
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if len(messages) < len(prompt):
        raise PromptError("a prompt list holds either messages with 'role' and 'content' or token ids, nothing else")
    if controls is None:
        raise PromptError("this bundle has no chat_template.jinja: pass the prompt as plain text instead of messages")
    ids = _encode_chat(messages, controls, most_tokens, chat)
    return _not_empty(ids, "chat template makes no text of these messages")


def _is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and all(hasattr(item, "__index__") for item in prompt)


def _not_empty(ids: list[int], obstacle: str) -> list[int]:
    if not ids:
        raise PromptError(f"the prompt is empty: this bundle's {obstacle}")
    return ids


def _check_length(text: str, tokenizer: Tokenizer, most_tokens: int | None) -> None:
    """Refuse a text that is too long by its number of characters, or by the tokens of its beginning.

    Encoding takes some microseconds and 200 bytes per character; a token has about four.
    """
    if most_tokens is None or len(text) <= most_tokens:
        return
    fewest = tokenizer.fewest_tokens(text)
    if fewest <= most_tokens and len(text) > 2 * BEGINNING * most_tokens:
        # Further text may change the tokens at the cut, of which a text without spaces has a few.
        begun = len(tokenizer.encode(text[: BEGINNING * most_tokens], add_special_tokens=False))
        fewest = begun - MOST_CHANGED if begun > most_tokens + MOST_CHANGED else fewest
    if fewest > most_tokens:
        raise ContextOverflowError(fewest, most_tokens, counted=False)


def _encode_chat(
    messages: Sequence[Message], controls: ControlTokens, most_tokens: int | None, chat: ChatOptions
) -> list[int]:
    checked = marked_messages(plain_messages(messages))
    variables = plain({**chat.variables, "tools": plain_tools(chat.tools)}, "template_options")
    text = controls.template.render(checked, **marked_values(variables))
    _check_length(text, controls.tokenizer, most_tokens)
    return controls.encode(text)
