"""`/tokenize` and `/detokenize`, as llama.cpp has them."""

from __future__ import annotations

from typing import Any

from ondevice.model import Model
from ondevice.server.fields import Fields
from ondevice.server.request_error import RequestError
from ondevice.text.tokenizer import Tokenizer


def tokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """Token ids of a text; `with_pieces` adds how each token is written."""
    fields.needed("content")
    text = fields.text("content") or ""
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(
        text,
        add_special_tokens=fields.flag("add_special"),
        parse_special=fields.flag("parse_special") if "parse_special" in fields else True,
    )
    if fields.flag("with_pieces"):
        return {"tokens": [{"id": each, "piece": tokenizer.text_of(each)} for each in ids]}
    return {"tokens": ids}


def detokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    fields.needed("tokens")
    tokens = fields.array("tokens")
    most = model.manifest.target.vocab_size - 1
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= most for each in tokens):
        raise RequestError(400, f"tokens must be token ids from 0 to {most}", param="tokens")
    return {"content": _tokenizer(model).decode(tokens, keep_special=True)}


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise RequestError(400, "this bundle has no tokenizer")
    return model.tokenizer
