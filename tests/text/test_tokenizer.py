import base64
import json
import platform
import subprocess
import sys

import pytest
from tokenizers import processors

from ondevice.errors import BundleCorruptError, PromptError
from ondevice.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.text.tokenizers_made import BOS, KINDS, byte_level, gemma_like, llama_2, metaspace_words

SPECIAL_TURN = 5
EOS = 1


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", ["a b", "<bos>a b", "<bos><bos>a b", ""])
def test_a_raw_prompt_has_exactly_one_bos(make, text):
    ids = make().encode(text)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("text", ["a b", "<eos>", "a" * 20_000, ""])
def test_a_raw_prompt_does_not_end_with_a_token_that_the_tokenizer_puts_there(text):
    """As tokenizers have it that were saved for training, with `add_eos_token`: the model would begin another text."""
    tokenizer = byte_level()
    expected = tokenizer.encode(text)
    added = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=added)
    again = Tokenizer(tokenizer._backend, BOS)
    assert again.encode(text) == expected
    assert again.encode(text, add_special_tokens=False) == expected[1:]


def test_rendered_text_gets_no_bos():
    assert byte_level().encode("a", add_special_tokens=False)[0] != BOS


def test_control_tokens_are_read_only_where_allowed():
    tokenizer = gemma_like()
    turn = tokenizer.encode("<turn|>", add_special_tokens=False)
    assert turn == [SPECIAL_TURN]
    as_text = tokenizer.encode("<turn|>", add_special_tokens=False, parse_special=False)
    assert SPECIAL_TURN not in as_text
    assert tokenizer.encode("<turn|>", add_special_tokens=False) == [SPECIAL_TURN]


def test_decoding_leaves_control_tokens_out():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|turn>hello<turn|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, keep_special=True) == "<bos><|turn>hello<turn|>"


@pytest.mark.parametrize("make", KINDS)
def test_bytes_of_tokens_are_those_of_the_text(make):
    tokenizer, text = make(), "def f(x):\n\t# caf\u00e9 \u65e5\u672c \U0001f600 \ufffd \u00a0"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert len({tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}) > 256
    assert tokenizer.token_bytes(tokenizer.vocab_size + 9) == b""


@pytest.mark.parametrize("make", [*KINDS, llama_2, metaspace_words])
@pytest.mark.parametrize(
    "text", ["", "a", " a", "\n", "{\n", "ab b a", "\N{REPLACEMENT CHARACTER}é世", "<turn|>a", "\0\0a"]
)
def test_inside_of_a_text_nothing_is_put_in_front(make, text):
    tokenizer = make()
    ids = tokenizer.encode_inside(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert not tokenizer.special_ids & set(ids)


def test_training_leftovers_do_not_shorten_a_prompt():
    backend = byte_level()._backend
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend, BOS)
    text = "a long prompt that has more than three tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("prompt", "message"), [("\udcff", "surrogate"), (b"bytes", "not bytes"), (None, "NoneType")])
def test_what_is_no_text_is_named(prompt, message):
    with pytest.raises(PromptError, match=message):
        byte_level().encode(prompt)


def test_reading_a_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level()._backend.to_str(), "utf-8")
    assert Tokenizer.from_file(path, BOS).encode("é") == byte_level().encode("é")


@pytest.mark.parametrize("content", [b"{}", b"nothing", b"\xff\xfe", None])
def test_an_unreadable_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleCorruptError, match="export the bundle again") as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)


ANONYMOUS_BYTES = """
import sys
from pathlib import Path
from ondevice import machine
from ondevice.text.tokenizer import Tokenizer

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

if sys.argv[2] == "keep":
    machine.return_free_memory = lambda: None
before = anonymous_bytes()
tokenizer = Tokenizer.from_file(sys.argv[1])
print(anonymous_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep less")
def test_the_memory_of_parsing_a_large_vocabulary_is_returned(tmp_path):
    letters = [chr(0x4E00 + number) for number in range(300)]
    pairs = [(one, other) for one in letters for other in letters]
    texts = [*letters, *("".join(pair) for pair in pairs)]
    model = {"type": "BPE", "vocab": {text: number for number, text in enumerate(texts)}, "merges": pairs}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model}), "utf-8")
    taken = {}
    for way in ("return", "keep"):
        command = [sys.executable, "-c", ANONYMOUS_BYTES, str(path), way]
        taken[way] = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300).stdout)
    assert taken["return"] < 0.7 * taken["keep"]


def altered(path, **parts):
    """A tokenizer.json with other parts."""
    data = json.loads(gemma_like()._backend.to_str())
    path.write_text(json.dumps({**data, **parts}), "utf-8")
    return path


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Precompiled", "precompiled_charsmap": "////////"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAGFiYwA="},
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\5\0\0\0" + bytes(4)).decode()},
        {"type": "Precompiled", "precompiled_charsmap": 5},
        {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "////////"}]},
    ],
)
@pytest.mark.parametrize("name", ["Precompiled", r"\u0050recompiled"])
def test_a_table_that_claims_too_much_memory_or_has_no_trie_does_not_end_the_process(tmp_path, normalizer, name):
    path = altered(tmp_path / "tokenizer.json", normalizer=normalizer)
    path.write_text(path.read_text("utf-8").replace("Precompiled", name), "utf-8")
    with pytest.raises(BundleCorruptError, match="is not a tokenizer") as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", range(len("Precompiled")))
def test_no_escaped_letter_hides_such_a_table(tmp_path, place):
    path = altered(tmp_path / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "////////"})
    name = "Precompiled"
    hidden = f"{name[:place]}\\u{ord(name[place]):04X}{name[place + 1 :]}"
    path.write_text(path.read_text("utf-8").replace(name, hidden), "utf-8")
    with pytest.raises(BundleCorruptError, match="character map is damaged"):
        Tokenizer.from_file(path)


def test_none_of_two_normalizers_hides_such_a_table(tmp_path):
    path = altered(tmp_path / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "////////"})
    path.write_text(path.read_text("utf-8").removesuffix("}") + ', "normalizer": null}', "utf-8")
    with pytest.raises(BundleCorruptError, match="character map is damaged"):
        Tokenizer.from_file(path)


def replacement(pattern, content, times):
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}


def around(single, ids=1):
    """A post-processor with these pieces, of which the token stands for so many."""
    tokens = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["a"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": [TEXT, TEXT], "special_tokens": tokens}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": replacement({"String": "a"}, "a" * 200, 6)}),
        ("normalizer", {"type": "Sequence", "normalizers": replacement({"String": ""}, "ab", 6)}),
        ("normalizer", {"type": "Sequence", "normalizers": replacement({"Regex": "(?=a)"}, "aaaa", 4)}),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 5000}),
        ("decoder", {"type": "Sequence", "decoders": replacement({"String": "a"}, "a" * 1000, 5)}),
        ("post_processor", {"type": "Sequence", "processors": [around([TEXT] * 20)] * 8}),
        ("post_processor", around([TOKEN, TEXT], ids=100_000)),
    ],
)
def test_a_file_that_makes_texts_many_times_as_long_is_refused(tmp_path, name, step):
    path = altered(tmp_path / "tokenizer.json", **{name: step})
    with pytest.raises(BundleCorruptError, match=r"times as long|too many tokens"):
        Tokenizer.from_file(path)


def test_usual_replacements_are_read(tmp_path):
    steps = [*replacement({"String": " "}, "▁", 3), {"type": "Prepend", "prepend": "▁"}]
    path = altered(tmp_path / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    assert Tokenizer.from_file(path).encode("abc")


def test_a_file_with_control_characters_is_parsed_once(tmp_path, monkeypatch):
    """Gemma's vocabulary has some: to parse it twice took half a second."""
    normalizer = {"type": "Replace", "pattern": {"String": "\x02"}, "content": " "}
    path = altered(tmp_path / "tokenizer.json", normalizer=normalizer)
    assert r"\u0002" in path.read_text("utf-8")
    parse, whole = json.loads, len(path.read_bytes())
    monkeypatch.setattr("ondevice.text.tokenizer.json.loads", lambda text: parse(text[: whole // 2]))  # or it fails
    assert Tokenizer.from_file(path).encode("abc")


def test_a_table_that_is_as_long_as_it_claims_is_read(tmp_path):
    """A trie of 256 empty entries, 1024 bytes, and no texts after it."""
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0\4\0\0" + bytes(1024)).decode()}
    assert Tokenizer.from_file(altered(tmp_path / "tokenizer.json", normalizer=table)).encode("abc")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_a_panic_of_the_library_is_an_error(tmp_path, parts):
    """Panics are no `Exception`, which nobody expects who guards against errors."""
    tokenizer = Tokenizer.from_file(altered(tmp_path / "tokenizer.json", **parts), BOS)
    with pytest.raises(BundleCorruptError, match="the tokenizer cannot encode this"):
        tokenizer.encode("a" * 40 + "!")


def test_a_panic_in_decoding_is_an_error(tmp_path):
    decoder = {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}
    tokenizer = Tokenizer.from_file(altered(tmp_path / "tokenizer.json", decoder=decoder), BOS)
    with pytest.raises(BundleCorruptError, match="the tokenizer cannot decode this"):
        tokenizer.decode(tokenizer.encode("aab"))


class TooLateError(Exception):
    """Raised by an application's signal handler."""


@pytest.mark.parametrize("raised", [TooLateError, TimeoutError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_is_no_error_of_the_library(raised, monkeypatch):
    class Backend:
        def decode(self, *_, **__):
            raise raised

    tokenizer = gemma_like()
    monkeypatch.setattr(tokenizer, "_backend", Backend())
    with pytest.raises(raised):
        tokenizer.decode([5])
