"""Replies that an accelerator writes: those of the target alone, whatever shares a forward with them. Run on a CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafters import replies_on_device
from drafters.replies import MARK, Asked, before_a_message, read_replies
from drafters.replies_on_device import DeviceWriter, write_replies_on_device
from drafters.states import FrozenTarget

from tests.fixtures.tiny_families import save_family
from tests.fixtures.tiny_models import VOCAB

END = 7


class Codec:
    """A token for every character."""

    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))

    def encode(self, prompt: Any, context_length: int) -> list[int]:
        return [ord(letter) for letter in (prompt if isinstance(prompt, str) else f"<{prompt[0]['content']}>")]


def writer_of(tmp_path: Path, family: str, ends: list[int]) -> DeviceWriter:
    save_family(tmp_path / "target", family)
    target = FrozenTarget.load(tmp_path / "target", "tiny", torch.device("cpu"))
    return DeviceWriter(target, Codec(), ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])  # the second has sliding windows, which end in the prompts
def test_greedy_replies_are_those_of_the_target_alone(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies_on_device, "ROWS", 4)
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
    codec = Codec()
    assert MARK
    assert before_a_message(lambda prompt: codec.encode(prompt, 100), codec.tokenizer.decode) == [ord("<")]


def test_waves_are_appended_and_a_second_call_goes_on_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies_on_device, "WAVE", 6)
    monkeypatch.setattr(replies_on_device, "MOST", 4)
    monkeypatch.setattr(
        replies_on_device, "asked", lambda n: Asked(n, "own" if n % 3 == 0 else "chat", float(n % 2), f"say {n}")
    )
    writer = writer_of(tmp_path, "smollm2", [END])
    writer.own = lambda messages: [each for each in messages if each.number % 2]  # type: ignore[method-assign]
    file = tmp_path / "replies-0.jsonl"
    for tokens in (20, 20, 40):
        write_replies_on_device(writer, file, tokens)
    known = list(read_replies(file))
    assert [each.number for each in known] == [3, 1, 2, 4, 5, 9, 7, 8, 10, 11]
    assert known[1].prompt == [ord(letter) for letter in "<say 1>"]
    assert all(len(each.reply) == 4 or each.reply[-1] == END for each in known)


def test_messages_by_the_target_are_those_that_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(tmp_path, "smollm2", [END])
    made = [[72, 105, 32, END], [72, 105], [END]]
    monkeypatch.setattr(writer, "continued", lambda prompts, temperatures, most: made)
    assert [each.text for each in writer.own([Asked(n, "own", 1.0) for n in range(3)])] == ["Hi"]
