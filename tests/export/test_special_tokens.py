"""Chat templates of a checkpoint, as transformers renders them: special tokens that its tokenizer names, and named
templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from ondevice.bundle import Bundle
from ondevice.bundle_format.checks import InvalidFieldError
from ondevice.bundle_format.manifest import Manifest
from ondevice.errors import BundleCorruptError
from ondevice.text.codec import TextCodec
from ondevice.text.messages import ChatOptions
from ondevice_export import export
from tests.fixtures.tiny_families import save_family
from tests.text.tokenizers_made import chat_with

SPECIALS = ["<s>", "</s>", "<pad>", "<unk>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{{ unk_token }}{{ pad_token }}{% if bos_token is defined %}!{% endif %}"
)
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def save_chat_model(directory: Path, named: dict[str, Any], ends: list[str] | str, begin: str | None) -> None:
    """A model whose tokenizer names some special tokens, and whose `generation_config.json` ends replies at others."""
    save_family(directory, "smollm2")
    tokenizer = chat_with(SPECIALS)
    ids = {text: tokenizer.encode(text, add_special_tokens=False)[0] for text in SPECIALS}
    (directory / "tokenizer.json").write_text(tokenizer._backend.to_str())
    configured = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(configured))
    eos = ids[ends] if isinstance(ends, str) else [ids[text] for text in ends]
    own = {"bos_token_id": begin and ids[begin], "eos_token_id": eos}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | own))
    (directory / "generation_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("named", "ends", "begin"),
    [
        (NAMED, "</s>", "<s>"),
        (NAMED, ["<|end|>", "</s>"], "<s>"),
        (NAMED, "</s>", None),
        (NAMED, "</s>", "<|end|>"),
        ({**NAMED, "bos_token": None, "unk_token": None}, "</s>", "<s>"),
        ({**NAMED, "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True}}, "</s>", "<s>"),
    ],
)
def test_templates_write_the_tokens_that_the_tokenizer_names(
    named: dict[str, Any], ends: list[str] | str, begin: str | None, tmp_path: Path
) -> None:
    save_chat_model(tmp_path / "model", named, ends, begin)
    bundle = export(tmp_path / "model", tmp_path / "bundle", quantize="int8")
    original = AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = original.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert list(TextCodec(Bundle.open(bundle)).encode(CHAT, 256)) == list(expected)


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
@pytest.mark.parametrize("end", ["<|end|>", {"content": "<|end|>", "special": True}])
def test_older_checkpoints_name_their_tokens_in_a_file_of_its_own(
    end: Any, decoder: dict[str, Any], tmp_path: Path
) -> None:
    """`special_tokens_map.json` counts more than `tokenizer_config.json`, unless that has `added_tokens_decoder`."""
    save_chat_model(tmp_path / "model", {**NAMED, **decoder}, "</s>", "<s>")
    (tmp_path / "model" / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="int8"))
    original = AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = original.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert list(TextCodec(bundle).encode(CHAT, 256)) == list(expected)
    assert bundle.manifest.special_tokens["eos_token"] == original.eos_token == ("</s>" if decoder else "<|end|>")


@pytest.mark.parametrize("files", [False, True])
def test_a_template_for_tools_is_taken_where_there_are_tools(files: bool, tmp_path: Path) -> None:
    """As in Hermes 2 and 3, and Command R: the field lists named templates, which transformers 5 saves as files."""
    with_tools = (
        "{%- set mark = '!' -%}\n{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}\n"
    )
    named = [{"name": "default", "template": f"{TEMPLATE}\n"}, {"name": "tool_use", "template": with_tools}]
    save_chat_model(tmp_path / "model", {**NAMED, "chat_template": named}, "</s>", "<s>")
    original = AutoTokenizer.from_pretrained(tmp_path / "model")
    if files:
        original.save_pretrained(tmp_path / "model")
        assert "chat_template" not in json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    codec = TextCodec(Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="int8")))
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    for tools in (None, [tool]):
        expected = original.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
        assert list(codec.encode(CHAT, 256, ChatOptions(tools=tools))) == list(expected)


def test_tokens_that_the_tokenizer_s_file_lacks_are_named(tmp_path: Path) -> None:
    """Transformers adds those of `tokenizer_config.json`, and saves them in both files."""
    notes = list[str]()
    save_chat_model(tmp_path / "model", NAMED, "</s>", "<s>")
    path = tmp_path / "model" / "tokenizer_config.json"
    config, ids = json.loads(path.read_text()), Tokenizer.from_file(str(path.with_name("tokenizer.json"))).get_vocab()
    added = {text: {"content": text, "special": True} for text in ("<s>", "</s>", "<new>", "<newer>")}
    ids |= {"<new>": len(ids), "<newer>": len(ids) + 1}
    path.write_text(json.dumps({**config, "added_tokens_decoder": {ids[text]: added[text] for text in added}}))
    export(tmp_path / "model", tmp_path / "bundle", quantize="int8", note=notes.append)
    assert [line for line in notes if "letter by letter" in line and "lacks 2" in line and "'<new>'" in line]
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    notes.clear()
    export(tmp_path / "model", tmp_path / "again", quantize="int8", note=notes.append)
    assert not [line for line in notes if "letter by letter" in line]


def test_a_template_for_tools_alone_is_for_all_chats(tmp_path: Path) -> None:
    """Transformers takes it with tools, and has none for other chats."""
    named = [{"name": "tool_use", "template": f"{{{{ tools | tojson }}}}{TEMPLATE}"}]
    save_chat_model(tmp_path / "model", {**NAMED, "chat_template": named}, "</s>", "<s>")
    original = AutoTokenizer.from_pretrained(tmp_path / "model")
    codec = TextCodec(Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="int8")))
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    expected = original.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
    assert list(codec.encode(CHAT, 256, ChatOptions(tools=tools))) == list(expected)
    assert codec.encode(CHAT, 256)


@pytest.mark.parametrize("said", [{}, {"add_bos_token": True}])
def test_texts_begin_with_the_token_that_the_tokenizer_names(said: dict[str, bool], tmp_path: Path) -> None:
    """The configuration of a model may name the token of the one that it was trained from."""
    save_chat_model(tmp_path / "model", {**NAMED, **said}, "</s>", "<|end|>")
    path = tmp_path / "model" / "tokenizer.json"
    made = Tokenizer.from_file(str(path))
    begin = made.token_to_id("<s>")
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    made.save(str(path))
    bundle = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="int8"))
    expected = AutoTokenizer.from_pretrained(tmp_path / "model").encode("abc")
    assert list(TextCodec(bundle).encode("abc", 256)) == expected
    assert bundle.manifest.first_token_id == begin == expected[0]


def test_names_that_the_tokenizer_leaves_out_are_those_of_the_ids(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model", {"pad_token": "<pad>"}, "</s>", "<s>")
    manifest = Bundle.open(export(tmp_path / "model", tmp_path / "bundle", quantize="int8")).manifest
    assert manifest.special_tokens == {"pad_token": "<pad>"}
    codec = TextCodec(Bundle.open(tmp_path / "bundle"))
    assert codec.tokenizer is not None
    ids = codec.encode(CHAT[:1], 256)
    assert codec.tokenizer.decode(ids, keep_special=True) == "<s>user: a</s><pad>!"
    assert Manifest.from_json(manifest.to_json()).special_tokens == manifest.special_tokens


def test_a_bundle_names_no_other_variables(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model", NAMED, "</s>", "<s>")
    path = export(tmp_path / "model", tmp_path / "bundle", quantize="int8") / "bundle.json"
    text = path.read_text()
    with pytest.raises(BundleCorruptError, match="unknown name 'messages'") as caught:
        Manifest.from_json(text.replace('"unk_token": "<unk>"', '"messages": "<unk>"'))
    assert isinstance(caught.value.__cause__, InvalidFieldError)


def test_padding_outside_of_the_vocabulary_is_none(tmp_path: Path) -> None:
    """Conversions of Llama have -1. Nothing is computed of it."""
    save_family(tmp_path / "model", "llama2")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for pad in (-1, config["vocab_size"]):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"pad_token_id": pad, "eos_token_id": 0}))
        manifest = Bundle.open(export(tmp_path / "model", tmp_path / f"bundle{pad}", quantize="int8")).manifest
        assert (manifest.pad_token_id, manifest.eos_token_ids) == (None, (0,))
