"""The text side of a bundle: prompts to token ids, and token ids of a reply to text."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.chat_options import ChatOptions
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.prompt import PLAIN, Prompt, encode_prompt
from ondevice.text.stream import TextStream
from ondevice.text.tokenizer import Tokenizer


class TextCodec:
    """Tokenizer and chat template, as far as a bundle has them. Without a tokenizer it passes token ids through."""

    def __init__(self, bundle: Bundle) -> None:
        """
        Raises:
            BundleCorruptError: a file cannot be read.
        """
        self.tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
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

    def stream(self, stop: str | Sequence[str] | None) -> TextStream | None:
        """What makes the text of one reply; None without a tokenizer.

        Raises:
            UsageError: stop strings, and no tokenizer to find them with.
        """
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, stop)
        if stop:
            raise UsageError("stop strings need a tokenizer, and this bundle has none")
        return None
