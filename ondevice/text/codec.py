"""The text side of a bundle: prompts to token ids, and token ids of a reply to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Protocol, TypeGuard, runtime_checkable

from ondevice.bundle import CHAT_TEMPLATE, RESPONSE_TEMPLATE, TOKENIZER, Bundle
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.messages import (
    ChatOptions,
    Message,
    Tool,
    begun_answer,
    plain,
    plain_messages,
    plain_tools,
    text_length,
)
from ondevice.text.reply_parser import ReplyParser, ResponseTemplate, begun_reply
from ondevice.text.reply_stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer
from ondevice.text.untrusted_text import MARK, UntrustedText


@runtime_checkable
class TokenArray(Protocol):
    """Token ids as an array of numpy, which this layer does not import, or of another library."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[Message] | Sequence[int] | TokenArray
"""A text, a list of messages, or token ids as a list or an array."""

PLAIN = ChatOptions()

CHARACTERS_PER_TOKEN = 8
MIN_CHARACTERS = 1 << 16
"""Most characters of a prompt for each token of the context, and for a small context. Text has 3 to 5 in a token.
Encoding takes up to 300 bytes of memory for each character."""


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
        self._untrusted: UntrustedText | None = None
        self._response: ResponseTemplate | None = None
        self.tags = False
        """Whether the chat template writes calls between tags."""
        self._vocab_size = bundle.manifest.target.vocab_size
        path, template = bundle.file(TOKENIZER), bundle.file(CHAT_TEMPLATE)
        if path is None:
            return
        manifest = bundle.manifest
        self.tokenizer = tokenizer = Tokenizer.from_file(path, manifest.first_token_id)
        eos = manifest.eos_token_ids[0] if manifest.eos_token_ids else None
        ids = {"bos_token": manifest.bos_token_id, "eos_token": eos, "pad_token": manifest.pad_token_id}
        texts = {name: tokenizer.text_of(token) for name, token in ids.items()} | manifest.special_tokens
        special = {name: text for name, text in texts.items() if text is not None}
        if (response := bundle.file(RESPONSE_TEMPLATE)) is not None:
            self._response = ResponseTemplate.from_file(response, tokenizer)
        if template is not None:
            acting = {*manifest.eos_token_ids}
            if (vision := manifest.vision) is not None:
                acting |= {vision.begin_token_id, vision.image_token_id, vision.end_token_id}
            if (audio := manifest.audio) is not None:
                acting |= {audio.begin_token_id, audio.audio_token_id, audio.end_token_id}
            if self._response is not None:
                acting |= self._response.controls.keys()
            answers = self._response is not None and self._response.answer is not None
            chat = ChatTemplate.from_file(template, special)
            self.tags = chat.tags
            self._untrusted = UntrustedText(tokenizer, chat, acting, answers=answers)

    def encode(self, prompt: Prompt, context_length: int, chat: ChatOptions = PLAIN) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context.

        Raises:
            PromptError: as `encode_prompt` does, or for an id out of range.
            ContextOverflowError: no room is left for a reply.
        """
        token_ids = encode_prompt(prompt, self.tokenizer, self._untrusted, context_length, chat)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise PromptError(f"token id {token} is out of range: this model has ids 0 to {self._vocab_size - 1}")
        if len(token_ids) >= context_length:
            raise ContextOverflowError(len(token_ids), context_length)
        return token_ids

    def reply_stream(
        self,
        prompt_ids: Sequence[int],
        stop: str | Sequence[str] | None,
        *,
        is_chat: bool,
        single_call: bool,
        continues: bool,
        calls: bool,
        tools: Sequence[Tool] = (),
    ) -> ReplyStream | None:
        """A `ReplyStream` for the reply to a prompt; None without a tokenizer.

        Args:
            is_chat: whether the prompt is a list of messages. The reply to another one continues its text, unless the
                prompt opens a reply by itself.
            single_call: whether the reply ends after its first tool call.
            continues: whether it continues the last message.
            calls: whether it may be calls; False for an answer of some form, which can look like Llama's.
            tools: declarations of the functions that may be called.

        Raises:
            UsageError: stop strings were given, and the bundle has no tokenizer.
        """
        if self.tokenizer is None:
            if stop:
                raise UsageError("stop strings need a tokenizer, and this bundle has none")
            return None
        text_ids = [token for token in prompt_ids if token >= 0]  # without the soft tokens of pictures
        parser = self._parser(self.tokenizer, text_ids, calls=calls, tools=tools)
        before = text_ids[-1:] if continues or not (is_chat or parser) else ()
        return ReplyStream(self.tokenizer, stop, parser, single_call=single_call, before=before)

    def _parser(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, calls: bool, tools: Sequence[Tool]
    ) -> ReplyParser | None:
        """A parser for the reply; None if the whole reply is text, as after a prompt that opens no reply."""
        if self._response is None:
            return None
        begun = begun_reply(self._response, tokenizer, prompt_ids)
        return None if begun is None else ReplyParser(self._response, begun, tools=tools, ends_calls=calls)


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list of messages, by its first item."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def vocabulary_difference(bundle: Bundle, other: Bundle) -> str | None:
    """How the tokens of a bundle differ from those of another one, for a message; None if they are the same."""
    wanted, found = other.manifest.target.vocab_size, bundle.manifest.target.vocab_size
    if wanted != found:
        return f"it has {found} tokens, and this model {wanted}"
    files = [each.manifest.files.get(TOKENIZER) for each in (bundle, other)]
    if None in files or len({file.sha256 for file in files if file}) == 1:
        return None
    one, two = (Tokenizer.from_file(each.path / TOKENIZER).vocabulary for each in (bundle, other))
    return "its tokenizer.json has other tokens" if one != two else None


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    untrusted: UntrustedText | None,
    most_tokens: int | None = None,
    chat: ChatOptions = PLAIN,
) -> list[int]:
    """Token ids of a text, of a list of messages, or of a list of token ids, which stays as it is.

    A plain text is the application's own: control tokens written in it count, as in a system message (`<|think|>`).
    In untrusted text they are plain characters (`text.untrusted_text`): only the application can end or begin a turn.

    Args:
        untrusted: renders and encodes messages; None if the bundle has no chat template.
        most_tokens: longest prompt; a text that must have more is refused before it is encoded.
        chat: tools and other variables of the template.

    Raises:
        UsageError: `chat` is not empty, and the prompt is not a list of messages.
        PromptError: the prompt is empty, of another type, or this bundle cannot encode its kind.
        ContextOverflowError: the prompt has more than `most_tokens`.
    """
    if isinstance(prompt, TokenArray) and not isinstance(prompt, str):  # numpy's strings have an array's methods
        prompt = _ids_of_array(prompt)
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("the prompt is empty: pass some text, at least one message or at least one token id")
    if chat and not is_chat(prompt):
        raise UsageError(
            "tools, thinking, template_options and continue_final are for a prompt of messages, not for a text"
        )
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
    if untrusted is None:
        raise PromptError("this bundle has no chat_template.jinja: pass the prompt as plain text instead of messages")
    return _not_empty(
        _encode_chat(messages, tokenizer, untrusted, most_tokens, chat), "chat template makes no text of these messages"
    )


def _ids_of_array(prompt: TokenArray) -> list[int]:
    ids = prompt.tolist()
    if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise PromptError("an array of token ids has one dimension, and integers in it")
    return ids


def _is_token_ids(prompt: str | Sequence[Message] | Sequence[int]) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and all(
        hasattr(item, "__index__") and not isinstance(item, bool) for item in prompt
    )


def _not_empty(ids: list[int], obstacle: str) -> list[int]:
    if not ids:
        raise PromptError(f"the prompt is empty: this bundle's {obstacle}")
    return ids


def check_characters(length: int, most_tokens: int | None) -> None:
    """Refuse a prompt by its number of characters, before anything looks at its text.

    Args:
        length: characters of a prompt.
        most_tokens: tokens of a prompt at most; None for no limit.

    Raises:
        ContextOverflowError: it has more characters than so many long tokens.
    """
    if most_tokens is not None and length > (most := max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * most_tokens)):
        raise ContextOverflowError(None, most_tokens, characters=f"{length} characters > {most} maximum")


def _check_length(text: str, tokenizer: Tokenizer, most_tokens: int | None) -> None:
    check_characters(len(text), most_tokens)
    if most_tokens is not None and len(text) > most_tokens and tokenizer.fewest_tokens(text) > most_tokens:
        raise ContextOverflowError(tokenizer.fewest_tokens(text), most_tokens, counted=False)


def _encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    untrusted: UntrustedText,
    most_tokens: int | None,
    chat: ChatOptions,
) -> list[int]:
    check_characters(text_length([messages, chat.variables, chat.tools]), most_tokens)
    checked = plain_messages(messages)
    variables = plain({**chat.variables, "tools": plain_tools(chat.tools)}, "template_options")
    text = untrusted.render(checked, variables, begun_answer(checked) if chat.continue_final else None)
    _check_length(text.replace(MARK, ""), tokenizer, most_tokens)
    return untrusted.encode(text)
