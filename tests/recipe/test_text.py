"""Corpus, conversations and tokenizer of the recipe, on sources written here."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text import chats, corpus, packages
from text import tokenizer as recipe_tokenizer
from text.dataset import chat_ids, prompt_ids, source_ids
from tokenizers import Tokenizer

SOURCE = '''\
import os

SIZES = {"small": 1, "large": 20, "names": ["first", "second", None]}


def repeat(text, times=3, end="!"):
    """Repeat a text.

    More words.
    """
    for _ in range(times):
        print(text + end)
    return times


class Box:
    def open(self, key="front"):
        """Open the box."""
        return os.path.join("box", key)
'''


@pytest.fixture(scope="module")
def trained() -> str:
    return recipe_tokenizer.train_tokenizer([SOURCE] * 2).to_str()


@pytest.fixture
def tokenizer(trained: str) -> Tokenizer:
    """One of its own for each test: the recipe sets whether a tokenizer reads control tokens as text."""
    return Tokenizer.from_str(trained)


@pytest.fixture
def wheel(tmp_path: Path) -> packages.Package:
    with zipfile.ZipFile(tmp_path / "Some_Package-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/box.py", SOURCE)
        archive.writestr("some/copy.py", SOURCE)
        archive.writestr("some/broken.py", SOURCE + "def (")
        archive.writestr("some/short.py", "x = 1\n")
        archive.writestr("some/data.txt", SOURCE)
    return packages.Package("some_package", "1.0", "MIT")


def conversations() -> list[chats.Chat]:
    return list(chats.chats(corpus.Module("box.py", SOURCE)))


def test_a_wheel_gives_its_usable_sources(wheel: packages.Package, tmp_path: Path) -> None:
    modules = corpus.read_packages([wheel], tmp_path)
    assert sorted(module.path for module in modules) == ["some/box.py", "some/copy.py"]
    assert {module.package for module in modules} == {"some_package"}


def test_copies_of_held_out_modules_are_left_out() -> None:
    own = corpus.Module("own.py", "".join(f"a_line_of_its_own = {number}\n" for number in range(20)))
    secret = corpus.Module("secret.py", SOURCE)
    backport = corpus.Module("backport.py", "# a backport\n" + SOURCE)
    assert corpus.without_copies([own, backport, own], [secret]) == [own]


def test_a_module_gives_every_kind_of_conversation() -> None:
    first = [chat.messages[0]["content"].split("\n")[0] for chat in conversations()]
    assert any(text.startswith("Write a Python function `repeat(text, times=3, end='!')`: Repeat a") for text in first)
    assert 'Repeat a text. Use times = 3 and end = "!".' in first
    assert any("JSON" in text for text in first)


def test_json_answers_are_json() -> None:
    answers = [chat.messages[-1]["content"] for chat in conversations() if "as JSON" in chat.messages[0]["content"]]
    answers += [
        chat.messages[0]["content"].split("\n", 1)[1]
        for chat in conversations()
        if "as a Python literal" in chat.messages[0]["content"]
    ]
    assert {"small": 1, "large": 20, "names": ["first", "second", None]} in map(json.loads, answers)


def test_a_source_with_control_tokens_gives_no_conversation() -> None:
    assert not list(chats.chats(corpus.Module("turns.py", SOURCE + 'END = "<turn|>"\n')))


def test_a_line_break_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False).ids
    for text in ("a\n    b", "a\n\n\n  b\n", "):\n\t\n)", '"""\n    """'):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids.count(line_break) == text.count("\n")
        cut = text.index("\n") + 1  # so a prompt may end in one
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in (text[:cut], text[cut:])]
        assert parts[0] + parts[1] == ids


@pytest.mark.parametrize("text", [SOURCE, "caf\u00e9 \U0001f600\r\n\tx = '\x00'", "  \n   trailing   "])
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_gemmas_marks_are_single_tokens(tokenizer: Tokenizer) -> None:
    text = '<|turn>model\n<|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|><turn|>'
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    assert [token for token in tokens if "|" in token] == [
        *("<|turn>", "<|tool_call>", '<|"|>', '<|"|>', "<tool_call|>", "<turn|>")
    ]


def test_a_special_token_in_a_source_is_text(tokenizer: Tokenizer) -> None:
    (ids,) = source_ids(tokenizer, [corpus.Module("x.py", "x = '<turn|>'")])
    assert recipe_tokenizer.TURN_END not in ids
    assert (ids[0], ids[-1]) == (recipe_tokenizer.BOS, recipe_tokenizer.EOS)


def test_a_conversation_begins_with_its_prompt(tokenizer: Tokenizer) -> None:
    whole = chats.exchange("How?", "So.")
    (ids,) = chat_ids(tokenizer, [whole])
    prompt = prompt_ids(tokenizer, chats.question("How?"))
    assert ids[: len(prompt)].tolist() == prompt
    assert ids[-1] == recipe_tokenizer.EOS


def render(messages: list[dict[str, Any]], **variables: object) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(chats.TEMPLATE_FILE.read_text())
    return template.render(bos_token="<bos>", messages=messages, **variables)


USER = {"role": "user", "content": " Hi. "}
CALL = {"id": "7", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2, "wind": True, "at": None}}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "7", "content": "sunny"}
CALLED = (
    '<|turn>model\n<|tool_call>call:weather{at:null,city:<|"|>Bern<|"|>,days:2,wind:true}<tool_call|>'
    '<|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>'
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:weather{description:<|"|>The weather.<|"|>,parameters:{properties:{city:{description:'
    '<|"|>Where.<|"|>,type:<|"|>STRING<|"|>}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)


@pytest.mark.parametrize(
    ("messages", "variables", "wanted"),
    [
        ([USER], {"add_generation_prompt": True}, "<|turn>user\nHi.<turn|>\n<|turn>model\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi."}]}], {}, "<|turn>user\nHi.<turn|>\n"),
        (
            [{"role": "system", "content": "Be brief."}, USER],
            {"enable_thinking": True},
            "<|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nHi.<turn|>\n",
        ),
        ([USER], {"tools": [TOOL]}, f"<|turn>system\n{DECLARED}<turn|>\n<|turn>user\nHi.<turn|>\n"),
        ([USER, ASKED, TOLD], {"add_generation_prompt": True}, f"<|turn>user\nHi.<turn|>\n{CALLED}"),
        (
            [USER, ASKED, TOLD],
            {"add_generation_prompt": True, "enable_thinking": True},
            f"<|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi.<turn|>\n{CALLED}<|channel>thought\n",
        ),
        (
            [USER, ASKED, TOLD, {"role": "assistant", "content": "Sun."}],
            {},
            f"<|turn>user\nHi.<turn|>\n{CALLED}Sun.<turn|>\n",
        ),
        (
            [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."}],
            {},
            "<|turn>user\nHi.<turn|>\n<|turn>model\n<|channel>thought\nWell.\n<channel|>Yes.<turn|>\n",
        ),
        (
            [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."}, USER],
            {},
            "<|turn>user\nHi.<turn|>\n<|turn>model\nYes.<turn|>\n<|turn>user\nHi.<turn|>\n",
        ),
    ],
)
def test_the_template_writes_gemmas_turns(
    messages: list[dict[str, Any]], variables: dict[str, object], wanted: str
) -> None:
    assert render(messages, **variables) == f"<bos>{wanted}"
