"""`tokenizer.json` from a GGUF file's metadata, for the `tokenizers` package.

Two kinds of vocabulary are read: byte-level BPE (`gpt2`) with the pre-tokenizers of `_SPLITS`, and SentencePiece
(`llama`, and `gemma4` with its merges listed), whose merges are derived from the scores of its pieces. The results are
those of the publishers' own `tokenizer.json`, token for token (`tests/export/gguf/test_tokenizer.py`).

Sources: `llama-vocab.cpp` of llama.cpp for what the metadata means; `SpmConverter` and `generate_merges` of
transformers 5.22.2 (`convert_slow_tokenizer.py`, `tokenization_utils_sentencepiece.py`) for SentencePiece as BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from ondevice.errors import CheckpointError, pass_on, reason
from ondevice_export.checkpoint.json_fields import JsonFields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (`enum llama_token_type`)."""

_MOST_MERGES = 1 << 20
"""Most merges that are derived of a vocabulary, each of 400 bytes here; Gemma 3's 262,144 tokens give 514,906."""
_LONGEST = 512
"""Longest token in characters; Gemma's has 31, and merges are looked for at every place in a token."""

_GEMMA_4_CONTROL = {
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
}  # fmt: skip
"""Control tokens that the conversion marks as the user's, so that llama.cpp prints them."""

_END_TEXTS = {
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|end|>", "<|observation|>",
}  # fmt: skip
"""Control tokens that end a reply, whichever of them the metadata name. Source: `llama-vocab.cpp`."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Mistral's own pattern, of `tekken.json`, by which words end before a capital letter. llama.cpp's takes letters beyond
ASCII for both kinds."""


_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of `o200k_base`, which Phi-4-mini has."""


_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Seed-OSS's pattern, by which a line's end is not part of the signs before it."""


_QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's pattern: marks belong to words."""


def _split(numbers: str) -> list[dict[str, Any]]:
    """The steps that split a text into words, with this pattern for numbers."""
    return _split_by(f"{_WORDS}|{numbers}|{_REST}")


def _split_by(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]


_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2")
_GLM = ("glm4", "chatglm-bpe")
_STARCODER = ("smollm", "refact", "starcoder")
_QWEN_2 = ("qwen2", "deepseek-r1-qwen")
"""Names of one pre-tokenizer each."""

_WHOLE = (*_LLAMA_3, "tekken")
"""Pre-tokenizers whose words are one token if there is one, whatever the merges, and whose texts begin with the begin
token unless the file says otherwise."""

_SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    **{name: [{"type": "Digits", "individual_digits": True}] for name in _STARCODER},
    "exaone4": [],
    **dict.fromkeys((*_LLAMA_3, *_GLM, "smaug-bpe", "dbrx"), _split(r"\p{N}{1,3}")),
    **dict.fromkeys(_QWEN_2, _split(r"\p{N}")),
    "qwen35": _split_by(_QWEN_3_5),
    "tekken": _split_by(_TEKKEN),
    "gpt-4o": _split_by(_GPT_4O),
    "seed-coder": _split_by(_SEED),
}
"""Pre-tokenizers by the name in `tokenizer.ggml.pre`: the steps before bytes. Without `Split` the words are GPT-2's."""


class Vocabulary:
    """The tokens of a file, cut to the rows of the model's token table.

    Attributes:
        texts: the text of every token.
        types: the type of every token.
        ids: token ids by text.
        add_bos: whether every text begins with the begin token.
    """

    def __init__(self, metadata: Mapping[str, Any], rows: int, origin: str) -> None:
        """
        Raises:
            CheckpointError: the lists of the vocabulary are missing, damaged or contradict each other.
        """
        self.origin = origin
        self.fields = JsonFields(
            {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}, origin
        )
        texts = self.fields.data.get("tokens")
        if not isinstance(texts, list):
            raise CheckpointError(f"{origin} has no list of tokens")
        if any(len(text) > _LONGEST for text in texts):
            raise CheckpointError(f"{origin} has a token of more than {_LONGEST} characters: it is damaged")
        self.complete = len(texts) <= rows
        self.texts: list[str] = texts[:rows]
        self.types = self._numbers("token_type", np.full(len(texts), NORMAL)).astype(np.int64)[:rows]
        if self.model != "gpt2":
            # the conversion writes tokens that the publisher defined with spaces
            for token in np.flatnonzero(self.types == USER_DEFINED).tolist():
                self.texts[token] = self.texts[token].replace(" ", "▁")
        self.ids: dict[str, int] = {}
        for token, text in enumerate(self.texts):
            self.ids.setdefault(text, token)
        # llama.cpp's defaults, for files that do not say
        by_default = self.model != "gpt2" or self.fields.text("pre", "none") in _WHOLE
        self.add_bos = self.fields.flag("add_bos_token", by_default) and self.id("bos") is not None

    @property
    def model(self) -> str:
        """The kind of vocabulary: `gpt2`, `llama` or `gemma4` if it is read."""
        return str(self.fields.data.get("model", "none"))

    def id(self, name: str) -> int | None:
        """The token that the metadata name as `bos`, `eos` and so on; None if there is none, or none in the table."""
        value = self.fields.data.get(f"{name}_token_id")
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < len(self.texts) else None

    def ends(self) -> list[int]:
        """The tokens that end a reply: first those that the metadata name."""
        named = [token for name in ("eos", "eot", "eom") if (token := self.id(name)) is not None]
        known = sorted(self.ids[text] for text in _END_TEXTS & self.ids.keys())
        return list(
            dict.fromkeys([*named, *(token for token in known if self.types[token] in (CONTROL, USER_DEFINED))])
        )

    def scores(self) -> Any:
        """The score of every token, float32."""
        return self._numbers("scores", None)[: len(self.texts)]

    def merges(self) -> list[list[str]]:
        """The listed merges, without those of tokens that are not in the token table."""
        listed = self.fields.data.get("merges")
        if not isinstance(listed, list):
            raise CheckpointError(f"{self.origin} has no list of merges")
        pairs = [merge.split(" ") if merge.count(" ") == 1 else _uneven(merge) for merge in listed]
        known = [pair for pair in pairs if {*pair, "".join(pair)} <= self.ids.keys()]
        if self.complete and len(known) < len(pairs):
            raise CheckpointError(f"{self.origin} has a damaged vocabulary: merges of texts that are not tokens")
        return known

    def _numbers(self, name: str, default: Any) -> Any:
        """A list of numbers, one for every token."""
        values = self.fields.data.get(name, default)
        tokens = len(self.fields.data["tokens"])
        if not isinstance(values, np.ndarray) or len(values) != tokens or values.dtype.kind not in "iuf":
            raise CheckpointError(f"{self.origin} has no {name} for each of its {tokens} tokens")
        return values


def _uneven(merge: str) -> list[str]:
    """A merge whose parts have spaces themselves: the parts are divided by the space that is not the first letter."""
    at = merge.find(" ", 1)
    return [merge[:at], merge[at + 1 :]]


def make_tokenizer(vocabulary: Vocabulary) -> str:
    """The text of `tokenizer.json`.

    Raises:
        CheckpointError: the vocabulary's kind or its pre-tokenizer is not known, or its lists make no tokenizer.
    """
    model = vocabulary.model
    if model == "gpt2":
        made = _byte_level(vocabulary)
    elif model in ("llama", "gemma4"):
        made = _sentence_piece(vocabulary)
    else:
        raise CheckpointError(
            f"{vocabulary.origin} has a vocabulary of the kind {model!r:.99}, which is not read "
            "(only gpt2, llama, gemma4)"
        )
    text = json.dumps({**_EMPTY, **made, "added_tokens": _added_tokens(vocabulary)}, ensure_ascii=False)
    try:
        tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises nothing narrower
        pass_on(error)
        raise CheckpointError(f"{vocabulary.origin} has a damaged vocabulary ({reason(error)})") from error
    return text


_EMPTY = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None}
_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.fields.text("pre", "none")
    if name not in _SPLITS:
        raise CheckpointError(
            f"{vocabulary.origin} splits texts by the pre-tokenizer {name!r:.99}, which is not known "
            f"(only {', '.join(_SPLITS)})"
        )
    split = _SPLITS[name]
    whole = {"trim_offsets": False, "use_regex": not any(step["type"] == "Split" for step in split)}
    level = {"type": "ByteLevel", "add_prefix_space": vocabulary.fields.flag("add_space_prefix"), **whole}
    return {
        "normalizer": {"type": "NFC"} if name in (*_QWEN_2, "qwen35") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, level]},
        "post_processor": _begin(vocabulary),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            **_BPE,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _WHOLE,
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges(),
        },
    }


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.fields.flag("add_space_prefix", vocabulary.model == "llama"):
        space = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.id("unknown")
    return {
        "normalizer": space,
        "post_processor": _begin(vocabulary),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_BPE,
            "unk_token": None if unknown is None else vocabulary.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _derived_merges(vocabulary) if vocabulary.model == "llama" else vocabulary.merges(),
        },
    }


def _derived_merges(vocabulary: Vocabulary) -> list[Sequence[str]]:
    """Every way to make a token of two others, tokens of a high score first.

    SentencePiece joins the two neighbours that make the token of the highest score; BPE joins the pair that stands
    first in this list. Tokens that the publisher defined have score 0 in SentencePiece, the highest; a file may have
    another. Among equal scores, as of runs of spaces, longer parts come first.
    """
    ids, texts = vocabulary.ids, vocabulary.texts
    scores = np.where(vocabulary.types == USER_DEFINED, 0.0, vocabulary.scores())
    pairs: list[tuple[str, str]] = []
    places: list[tuple[int, int, int, int]] = []
    for token in np.flatnonzero(np.isin(vocabulary.types, (NORMAL, USER_DEFINED))).tolist():
        text = texts[token]
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                pairs.append((left, right))
                places.append((token, at, len(text) - at, ids[left]))
        if len(pairs) > _MOST_MERGES:
            raise CheckpointError(f"{vocabulary.origin} has a damaged vocabulary: more than {_MOST_MERGES} merges")
    tokens, left_sizes, right_sizes, left_ids = np.array(places, np.int64).reshape(-1, 4).T
    order = np.lexsort((left_ids, tokens, -right_sizes, -left_sizes, -scores[tokens]))
    return [pairs[at] for at in order]


def _begin(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """The step that puts the begin token in front."""
    begin = vocabulary.id("bos")
    if begin is None or not vocabulary.add_bos:
        return None
    text = vocabulary.texts[begin]
    first = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [begin], "tokens": [text]}},
    }


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split: control tokens and those that the publisher defined."""
    added = []
    for token in np.flatnonzero(np.isin(vocabulary.types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist():
        text = vocabulary.texts[token]
        if text:
            special = vocabulary.types[token] != USER_DEFINED or text in _GEMMA_4_CONTROL
            kept = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": vocabulary.ids[text], "content": text, **kept, "special": bool(special)})
    return added
