"""Replies that an accelerator writes: those of the target alone, whatever shares a forward with them. Run on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import replies_on_device
from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lessons
from drafters.replies import MARK, OWN, Asked, ChatIds
from drafters.replies_on_device import DeviceWriter, up_to_repetition, write_replies_on_device
from text.prompts import PASSAGE, Prompt

from tests.fixtures.tiny_families import save_family
from tests.fixtures.tiny_models import VOCAB

END = 7


def chat(ends: list[int]) -> ChatIds:
    """A token for every character; a message stands between angle brackets."""

    def encode(prompt: Any) -> list[int]:
        return [ord(letter) for letter in (prompt if isinstance(prompt, str) else f"<{prompt[0]['content']}>")]

    return ChatIds(encode, lambda ids: "".join(map(chr, ids)), ends)


def writer_of(tmp_path: Path, family: str, ends: list[int]) -> DeviceWriter:
    save_family(tmp_path / "target", family)
    return DeviceWriter(FrozenTarget.load(tmp_path / "target", "tiny", torch.device("cpu")), chat(ends))


@pytest.mark.parametrize("family", ["smollm2", "gemma3", "lfm2", "qwen3-moe", "gpt-oss", "granite"])
def test_greedy_replies_are_those_of_the_target_alone(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies_on_device, "ROWS", 4)
    monkeypatch.setattr("drafters.replies.REPEATED", 21)  # more than there are: the model is compared over all 20
    random = np.random.default_rng(0)
    prompts = [random.integers(8, VOCAB, count).tolist() for count in (5, 40, 17, 6, 23, 90)]
    writer = writer_of(tmp_path, family, [])
    whole = writer.continued(prompts, [0.0] * len(prompts), 20)
    for prompt, reply in zip(prompts, whole, strict=True):
        ids = torch.tensor([prompt])
        alone = writer.target.model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)
        assert reply == alone[0, len(prompt) :].tolist()
    writer.ends = torch.tensor([whole[1][9]])
    ended = writer.continued(prompts, [0.0] * len(prompts), 20)
    cut = [reply.index(whole[1][9]) + 1 if whole[1][9] in reply else 20 for reply in whole]
    assert ended == [reply[:count] for reply, count in zip(whole, cut, strict=True)]


def test_a_reply_ends_where_it_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.replies.REPEATED", 3)
    assert up_to_repetition([5, 6, 7, 8, 6, 7, 9, 6, 7, 8, 5]) == [5, 6, 7, 8, 6, 7, 9, 6, 7, 8]
    assert up_to_repetition([5] * 9) == [5] * 4
    assert up_to_repetition([5, 6, 7, 5, 6]) == [5, 6, 7, 5, 6]


def test_sampled_tokens_have_the_probabilities_of_the_target(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, "smollm2", [])
    torch.manual_seed(0)
    prompt, count = [9, 8, 33], 3000
    drawn = writer.continued([prompt] * count, [0.7] * count, 1)
    with torch.no_grad():
        wanted = (writer.target.model(torch.tensor([prompt])).logits[0, -1].float() / 0.7).softmax(dim=-1).numpy()
    found = np.bincount([row[0] for row in drawn], minlength=len(wanted)) / count
    best = np.argsort(-wanted)[:5]
    assert (np.abs(found - wanted)[best] < 4 * np.sqrt(wanted[best] / count)).all()


def test_what_stands_before_a_message_has_nothing_of_it_where_the_mark_is_several_tokens() -> None:
    assert len(MARK) > 1
    assert chat([]).opening == [ord("<")]


@pytest.mark.parametrize(("prompt", "unended"), [(OWN, None), (Prompt("summary", f"Short: {PASSAGE}"), "Short: Hi")])
def test_what_the_target_wrote_completes_a_message_and_a_message_of_its_own_must_have_an_end(
    prompt: Prompt, unended: str | None
) -> None:
    made = [[72, 105, 32, END], [72, 105], [END]]
    found = [chat([END]).completed(Asked(1, 1.0, prompt), answer) for answer in made]
    texts = [None if each is None else each.prompt.text for each in found]
    assert texts == [prompt.text.replace(PASSAGE, "Hi"), unended, None]


@pytest.mark.parametrize("first", [0, 60])
def test_waves_are_appended_and_a_second_call_goes_on_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(replies_on_device, "WAVE", 6)
    monkeypatch.setattr(replies_on_device, "MOST", 6)
    monkeypatch.setattr(
        replies_on_device, "asked", lambda n: Asked(n, float(n % 2), OWN if n % 3 == 0 else Prompt("chat", f"say {n}"))
    )
    writer = writer_of(tmp_path, "smollm2", [])
    monkeypatch.setattr(
        writer.chat, "completed", lambda each, _: replace(each, prompt=OWN) if each.number % 2 else None
    )
    for tokens in (20, 20, 40):
        write_replies_on_device(writer, tmp_path, tokens, first)
    known = Lessons(tmp_path, torch.device("cpu"))
    assert sorted(fact[0] - first for fact in known.facts) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert [fact[1] for fact in known.facts].count("own") == 2
    assert bytes(known[0].tokens[: known[0].prompt].tolist()) == f"<say {first + 1}>".encode()
    assert known.lengths == [prompt + 6 for *_, prompt in known.facts]


def test_a_reply_ends_with_the_token_that_ends_it(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, "smollm2", [])
    message = Asked(1, 0.0, Prompt("chat", "say"))
    (whole,) = writer.lessons([message], 12)
    tokens = whole.tokens[whole.prompt :].tolist()
    writer.ends = torch.tensor([tokens[7]])
    (ended,) = writer.lessons([message], 12)
    assert ended.tokens[ended.prompt :].tolist() == tokens[: tokens.index(tokens[7]) + 1]
