"""Tokenizers from GGUF metadata give the ids of the publishers' own, and of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import transformers

from ondevice.errors import CheckpointError
from ondevice_export.gguf.file import GgufFile
from ondevice_export.gguf.tokenizer import Vocabulary, make_tokenizer
from tests.export.gguf.files_made import add_vocabulary, random_model, state_of, write_gguf, write_vocabulary
from tests.export.gguf.llama_cpp import token_ids
from tests.export.gguf.texts_made import texts
from tests.fixtures.published import published

Kinds = gguf.TokenType
CONTROL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<table>", "<mask>"]


def _made(path: Path, rows: int) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(make_tokenizer(_vocabulary(path, rows)))


def _vocabulary(path: Path, rows: int) -> Vocabulary:
    return Vocabulary(GgufFile(path).metadata, rows, str(path))


def _converted(path: Path, directory: Path, rows: int, **fields: Any) -> Path:
    """A GGUF file with the vocabulary of a `tokenizer.json`, with names for the rows without a token."""
    read = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    added = {token["id"]: token for token in read["added_tokens"]}
    tokens = {number: text for text, number in read["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    size = max(rows, len(tokens))
    kinds = [Kinds.NORMAL if number in tokens else Kinds.UNUSED for number in range(size)]
    for number, token in added.items():
        kinds[number] = Kinds.CONTROL if token["special"] else Kinds.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in read["model"]["merges"]]
    listed = [tokens.get(number, f"[PAD{number}]") for number in range(size)]
    return write_vocabulary(path, tokens=listed, kinds=kinds, merges=merges, **fields)


def _assert_equal(own: tokenizers.Tokenizer, other: tokenizers.Tokenizer, control: Sequence[str]) -> None:
    made = texts(control)
    for is_text in (False, True):
        own.encode_special_tokens = other.encode_special_tokens = is_text
        for text, mine, theirs in zip(made, own.encode_batch(made), other.encode_batch(made), strict=True):
            assert mine.ids == theirs.ids, repr(text)
            for keep in (True, False):
                assert own.decode(mine.ids, skip_special_tokens=keep) == other.decode(
                    mine.ids, skip_special_tokens=keep
                )


QWEN_3 = ("qwen3-tokenizer", 151_936, None, ["<|im_start|>", "<|im_end|>", "<think>", "</tool_call>"])
LLAMA_3 = ("llama3.1-tokenizer", 128_256, 128_000, ["<|begin_of_text|>", "<|eot_id|>", "<|python_tag|>"])


@pytest.mark.parametrize(
    ("pre", "name", "rows", "bos", "control"),
    [("qwen2", *QWEN_3), ("deepseek-r1-qwen", *QWEN_3), ("llama-bpe", *LLAMA_3), ("falcon3", *LLAMA_3)],
)
def test_published_byte_level_tokenizers(
    tmp_path: Path, pre: str, name: str, rows: int, bos: int | None, control: list[str]
) -> None:
    """Qwen3's table has 267 rows more than there are tokens."""
    directory = published(name)
    path = _converted(tmp_path / "vocabulary.gguf", directory, rows, model="gpt2", pre=pre, bos=bos)
    other = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = _vocabulary(path, rows)
    _assert_equal(tokenizers.Tokenizer.from_str(make_tokenizer(vocabulary)), other, control)
    ends = {None: ["<|endoftext|>", "<|im_end|>"], 128_000: ["<|end_of_text|>", "<|eot_id|>"]}
    assert sorted(vocabulary.texts[token] for token in vocabulary.ends()) == sorted(ends[bos])


def test_llama_2(tmp_path: Path) -> None:
    """A SentencePiece vocabulary with a space in front; the order of the merges has the scores of its pieces."""
    directory = published("llama2-tokenizer")
    model = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    places = {merge.replace(" ", ""): -float(place) for place, merge in reversed(list(enumerate(model["merges"])))}
    kinds = [Kinds.UNKNOWN, Kinds.CONTROL, Kinds.CONTROL, *[Kinds.BYTE] * 256, *[Kinds.NORMAL] * (len(tokens) - 259)]
    scores = [places.get(token, -1e6) for token in tokens]
    path = write_vocabulary(
        tmp_path / "vocabulary.gguf", tokens=tokens, kinds=kinds, scores=scores, model="llama", bos=1, unknown=0
    )
    other = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    made = _made(path, 32_000)
    # an older transformers ordered the ways to make one piece otherwise, which makes no difference to ids
    merges = json.loads(made.to_str())["model"]["merges"]
    assert {" ".join(merge) for merge in merges} == set(model["merges"])
    _assert_equal(made, other, ["<s>", "</s>", "<unk>"])


def test_gemma_3() -> None:
    """The published file's vocabulary, whose merges follow from scores; the publisher's has one token more."""
    control = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<unused7>", "<table>", "[multimodal]", "\n\n\n\n"]
    directory = published("gemma3-tokenizer")
    own = json.loads(make_tokenizer(_vocabulary(published("gemma3"), 262_144)))
    read = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    assert own["model"]["merges"] == read["model"]["merges"]
    assert own["model"]["vocab"] == read["model"]["vocab"]
    others = {token["id"]: token["content"] for token in read["added_tokens"]}
    assert {token["id"]: token["content"] for token in own["added_tokens"]} | {262_144: others[262_144]} == others
    made, other = (tokenizers.Tokenizer.from_str(json.dumps(each)) for each in (own, read))
    for text in texts(control):
        assert made.encode(text).ids == other.encode(text).ids, repr(text)


def test_a_vocabulary_with_more_tokens_than_rows(tmp_path: Path) -> None:
    """Tokens beyond the table cannot be embedded: a text is encoded without them."""
    directory = published("qwen3-tokenizer")
    path = _converted(tmp_path / "vocabulary.gguf", directory, 0, model="gpt2", pre="qwen2")
    made = _made(path, 151_650)
    assert made.get_vocab_size() == 151_650
    whole = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "Hello <|im_end|><tool_call>\n"
    assert max(whole.encode(text).ids) > 151_650
    assert max(made.encode(text).ids) < 151_650
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_published_files_give_the_ids_of_llama_cpp(name: str) -> None:
    """But for a `▁` that stands in the text itself, which llama.cpp does not join with spaces."""
    path = published(name)
    made = [text for text in texts(CONTROL) if "▁" not in text]
    assert len(made) > 1500
    own = _made(path, {"smollm2": 49_152, "gemma3": 262_144}[name])
    for text, mine, theirs in zip(made, own.encode_batch(made), token_ids(path, made), strict=True):
        assert mine.ids == theirs, repr(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "pre"),
    [
        ("smollm2", "gpt2", "gpt-2"),
        ("smollm2", "gpt2", "smaug-bpe"),
        ("smollm2", "gpt2", "dbrx"),
        ("smollm2", "gpt2", "gpt-4o"),
        ("smollm2", "gpt2", "tekken"),
        ("smollm2", "gpt2", "refact"),
        ("smollm2", "gpt2", "starcoder"),
        ("smollm2", "gpt2", "exaone4"),
        ("smollm2", "gpt2", "glm4"),
        ("smollm2", "gpt2", "chatglm-bpe"),
        ("smollm2", "gpt2", "seed-coder"),
        ("gemma3", "gemma4", None),
    ],
)
def test_kinds_of_vocabularies_without_a_published_file_give_the_ids_of_llama_cpp(
    tmp_path: Path, name: str, model: str, pre: str | None
) -> None:
    """The tokens and merges of a published file, written into another model as a vocabulary of another kind.

    Of `tekken` and `gpt-4o` llama.cpp knows capital letters of ASCII only.
    """
    rows = {"smollm2": 49_152, "gemma3": 262_144}[name]
    read = _vocabulary(published(name), rows)
    merges = json.loads(make_tokenizer(read))["model"]["merges"]
    config = transformers.Gemma3TextConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip

    def vocabulary(writer: Any) -> None:
        add_vocabulary(
            writer, tokens=read.texts, kinds=[Kinds(kind) for kind in read.types], model=model, pre=pre,
            merges=[" ".join(merge) for merge in merges], bos=read.id("bos"), eos=read.id("eos"),
        )  # fmt: skip

    state = state_of(random_model(transformers.Gemma3ForCausalLM(config)))
    path = write_gguf(
        tmp_path / "model.gguf", "gemma3", config, state, kind=gguf.GGMLQuantizationType.F16, more=vocabulary
    )
    made = [text for text in texts(CONTROL) if "▁" not in text and (pre not in {"tekken", "gpt-4o"} or text.isascii())]
    assert len(made) > 100
    for text, mine, theirs in zip(made, _made(path, rows).encode_batch(made), token_ids(path, made), strict=True):
        assert mine.ids == theirs, repr(text)


def _small(path: Path, **fields: Any) -> Vocabulary:
    texts = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", "<|im_end|>"]
    kinds = [Kinds.CONTROL, Kinds.CONTROL, *[Kinds.NORMAL] * 5, Kinds.CONTROL]
    own = {
        "tokens": texts,
        "kinds": kinds,
        "merges": ["a b", "Ġ a"],
        "model": "gpt2",
        "pre": "gpt-2",
        "bos": 0,
        "eos": 1,
    }
    return _vocabulary(write_vocabulary(path, **{**own, **fields}), 8)


@pytest.mark.parametrize(("said", "by_default"), [(None, False), (True, True), (False, False)])
def test_the_begin_token_is_put_in_front_where_the_file_asks_for_it(
    tmp_path: Path, said: bool | None, by_default: bool
) -> None:
    vocabulary = _small(tmp_path / "a.gguf", add_bos=said)
    assert vocabulary.add_bos == by_default
    ids = tokenizers.Tokenizer.from_str(make_tokenizer(vocabulary)).encode("ab a").ids
    assert ids == [*([0] if by_default else []), 4, 6]
    assert _small(tmp_path / "b.gguf", pre="llama-bpe").add_bos
    assert vocabulary.ends() == [1, 7]


def test_words_of_tekken_end_before_capitals(tmp_path: Path) -> None:
    vocabulary = _small(tmp_path / "a.gguf", pre="tekken")
    assert vocabulary.add_bos
    made = tokenizers.Tokenizer.from_str(make_tokenizer(vocabulary))
    text = "someHTTPServer ÉcoleÉÉa a/\n\n12 don't"
    pieces = [text[slice(*place)] for _, place in made.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["some", "HTTPServer", " École", "ÉÉa", " a", "/\n\n", "1", "2", " don", "'t"]


def test_words_of_gpt_4o_end_before_capitals_and_keep_endings(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(make_tokenizer(_small(tmp_path / "a.gguf", pre="gpt-4o")))
    text = "someHTTPServer's ÉcoleÉÉa वाले's a/\n\n1234 don't"
    pieces = [text[slice(*place)] for _, place in made.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == [
        "some", "HTTPServer's", " École", "ÉÉa", " वाले's", " a", "/\n\n", "123", "4", " don't",
    ]  # fmt: skip


def test_a_space_in_front(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(make_tokenizer(_small(tmp_path / "a.gguf", space_prefix=True)))
    assert made.encode("ab").ids == [5, 4]
    pieces = ["<unk>", "▁", "a", "b", "▁a", "ab"]
    for prefix, ids in ((None, [4, 3]), (True, [4, 3]), (False, [5])):
        path = write_vocabulary(
            tmp_path / "b.gguf",
            tokens=pieces,
            kinds=[Kinds.UNKNOWN, *[Kinds.NORMAL] * 5],
            scores=[0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
            model="llama",
            unknown=0,
            space_prefix=prefix,
        )
        assert _made(path, 6).encode("ab").ids == ids


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("pre-tokenizer 'poro-chat', which is not known .only gpt-2, smollm", {"pre": "poro-chat"}),
        ("pre-tokenizer 'none'", {"pre": None}),
        ("vocabulary of the kind 'bert'", {"model": "bert"}),
        ("no list of merges", {"merges": None}),
        ("damaged vocabulary", {"merges": ["a c"]}),
        ("merges of texts that are not tokens", {"merges": ["b b"]}),
        ("no scores for each of its 8 tokens", {"model": "llama"}),
        ("more than 512 characters", {"tokens": ["x" * 513]}),
        ("no token_type for each of its 8 tokens", {"kinds": [Kinds.NORMAL]}),
    ],
)
def test_what_is_not_read_is_said_in_one_line(tmp_path: Path, said: str, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        make_tokenizer(_small(tmp_path / "a.gguf", **fields))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_of_too_many_merges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 4 MB can have two million of them, which take 1.6 GB."""
    tokens = ["<unk>", *("a" * length for length in range(1, 40))]
    kinds = [Kinds.UNKNOWN, *[Kinds.NORMAL] * 39]
    path = tmp_path / "a.gguf"
    write_vocabulary(path, tokens=tokens, kinds=kinds, scores=[0.0] * 40, model="llama", unknown=0)
    assert make_tokenizer(_vocabulary(path, 40))
    monkeypatch.setattr("ondevice_export.gguf.tokenizer._MOST_MERGES", 700)  # 1 + 2 + ... + 38 are 741
    with pytest.raises(CheckpointError, match="more than 700 merges"):
        make_tokenizer(_vocabulary(path, 40))


def test_a_pre_tokenizer_that_is_no_name() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": np.array([1, 2])}
    with pytest.raises(CheckpointError, match=r"pre is .* expected a text"):
        Vocabulary(metadata, 1, "model.gguf")
