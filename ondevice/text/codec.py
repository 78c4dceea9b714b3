"""The text side of a bundle: prompts to token ids, and token ids of a reply to text."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.bundle import CHAT_TEMPLATE, RESPONSE_TEMPLATE, TOKENIZER, Bundle
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.chat_options import ChatOptions
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.prompt import PLAIN, Prompt, encode_prompt
from ondevice.text.reply_parser import ReplyParser, begun_reply
from ondevice.text.response_template import ResponseTemplate
from ondevice.text.stream import ReplyStream
from ondevice.text.tokenizer import Tokenizer


class TextCodec:
    """Tokenizer, chat template and response template, as far as a bundle has them. Without a tokenizer token ids pass
    through, and without a response template all of a reply is text.
    """

    def __init__(self, bundle: Bundle) -> None:
        """
        Raises:
            BundleCorruptError: a file cannot be read.
        """
        self.tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
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
        self._template = None if template is None else ChatTemplate.from_file(template, special)
        if (response := bundle.file(RESPONSE_TEMPLATE)) is not None:
            self._response = ResponseTemplate.from_file(response, tokenizer)

    def encode(self, prompt: Prompt, context_length: int, chat: ChatOptions = PLAIN) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context.

        Raises:
            PromptError: as `encode_prompt` does, or for an id out of range.
            ContextOverflowError: no room is left for a reply.
        """
        token_ids = encode_prompt(prompt, self.tokenizer, self._template, context_length, chat)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise PromptError(f"token id {token} is out of range: this model has ids 0 to {self._vocab_size - 1}")
        if len(token_ids) >= context_length:
            raise ContextOverflowError(len(token_ids), context_length)
        return token_ids

    def reply_stream(self, prompt_ids: Sequence[int], stop: str | Sequence[str] | None) -> ReplyStream | None:
        """What makes text of the reply to a prompt; None without a tokenizer.

        Raises:
            UsageError: stop strings, and no tokenizer to find them with.
        """
        if self.tokenizer is None:
            if stop:
                raise UsageError("stop strings need a tokenizer, and this bundle has none")
            return None
        return ReplyStream(self.tokenizer, stop, self._parser(self.tokenizer, prompt_ids))

    def _parser(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> ReplyParser | None:
        """None where all is text: also behind a prompt that begins no reply."""
        if self._response is None:
            return None
        begun = begun_reply(self._response, tokenizer, prompt_ids)
        return None if begun is None else ReplyParser(self._response, begun)
