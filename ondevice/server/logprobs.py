"""How likely the model found its tokens, in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ondevice.decoding.record import TokenLogprob
from ondevice.options import GenerationKeywords
from ondevice.server.fields import Fields
from ondevice.text.detokenizer import REPLACEMENT
from ondevice.text.tokenizer import Tokenizer

MOST_TOP = 20


def chat_logprobs(fields: Fields) -> GenerationKeywords:
    """The options of a chat completion: `logprobs` is a flag there."""
    top = fields.whole("top_logprobs", 0, MOST_TOP) or 0
    wanted = fields.flag("logprobs")
    if top and not wanted:
        raise fields.missing_feature("top_logprobs", "needs logprobs to be true")
    return {"logprobs": True, "top_logprobs": top} if wanted else {}


def text_logprobs(fields: Fields) -> GenerationKeywords:
    """The options of a text completion: `logprobs` is a number there."""
    top = fields.whole("logprobs", 0, MOST_TOP)
    return {} if top is None else {"logprobs": True, "top_logprobs": top}


def as_chat(found: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The `logprobs` of a chat's choice; None where none were asked for."""
    if not found or tokenizer is None:
        return None
    content = []
    for each in found:
        top = [_told(tokenizer, token, logprob) for token, logprob in each.top]
        content.append({**_told(tokenizer, each.token_id, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def as_text(found: Sequence[TokenLogprob], tokenizer: Tokenizer | None, offset: int) -> dict[str, Any] | None:
    """The `logprobs` of a text's choice.

    Args:
        offset: where in the text the first token begins.
    """
    if not found or tokenizer is None:
        return None
    tokens = [_written(tokenizer, each.token_id) for each in found]
    offsets = [offset + sum(map(len, tokens[:before])) for before in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [{_written(tokenizer, token): logprob for token, logprob in each.top} for each in found],
        "text_offset": offsets,
    }


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = _written(tokenizer, token)
    known = None if REPLACEMENT in text else list(text.encode())  # of a part of a character
    return {"token": text, "logprob": logprob, "bytes": known}


def _written(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], keep_special=True)
