"""Replies that the engine writes together: each is that of the model alone, with the states of PyTorch's target."""

import itertools
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafters import replies
from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lessons
from drafters.replies import (
    OWN,
    Asked,
    ChatIds,
    EngineWriter,
    are_answered,
    held_out,
    write_held_out,
    write_replies,
    write_share,
)
from drafters.replies_on_device import Written, with_states
from text.prompts import PASSAGE, Prompt
from tokenizers import Tokenizer, models, pre_tokenizers

import ondevice
from ondevice_export import export as export_bundle
from tests.fixtures.tiny_families import VOCAB, save_family

END = 7
WORDS = np.random.default_rng(0).integers(20, VOCAB, 70).tolist()
CPU = torch.device("cpu")


@pytest.fixture(params=["smollm2", "gemma3"])
def bundle(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A tiny target's, with a tokenizer of words and a chat template."""
    directory = tmp_path / "target"
    save_family(directory, request.param)
    words = {f"w{number}": number for number in range(VOCAB) if number != 8} | {replies.MARK: 8}
    tokenizer = Tokenizer(models.WordLevel(words, "w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("w4 {% for m in messages %}w5 {{ m['content'] }} w6{% endfor %}")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    export_bundle(directory, tmp_path / "bundle", drafter="none", heads="none", quantize="int8")
    return tmp_path / "bundle"


def text(count: int, first: int = 0) -> str:
    return " ".join(f"w{word}" for word in WORDS[first : first + count])


MESSAGES = [
    Asked(1, 0.0, Prompt("chat", text(3))),
    Asked(2, 1.0, Prompt("summary", text(60))),  # longer than a piece
    Asked(3, 1.0, OWN),
    Asked(4, 0.7, Prompt("translation", f"w11 {PASSAGE} w12", source=text(5, 9))),
    *(Asked(number, 1.0, Prompt("chat", text(4, number))) for number in range(32, 52)),
]


def alone(model: ondevice.Model, prompt: list[int], most: int, temperature: float, seed: int) -> list[int]:
    reply = model.generate(prompt, max_new_tokens=most, temperature=temperature, seed=seed, top_k=0, top_p=1.0)
    return list(reply.token_ids)


def test_replies_are_those_of_the_model_alone(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_ASKED", 9)
    writer = EngineWriter(bundle, most=24)
    assert writer.chat.opening == [4, 5]
    found = {lesson.number: lesson for lesson in writer.lessons(iter(MESSAGES))}
    assert set(found) >= {1, 2, 4, *range(32, 52)}
    with ondevice.load(bundle, threads=1) as model:
        for message in MESSAGES:
            if (lesson := found.get(message.number)) is None:
                continue
            prompt, reply = lesson.tokens[: lesson.prompt].tolist(), lesson.tokens[lesson.prompt :].tolist()
            assert reply == alone(model, prompt, 24, message.temperature, message.number)
            assert (lesson.kind, lesson.temperature) == (message.prompt.kind, message.temperature)
            if PASSAGE not in message.prompt.text:
                assert prompt == [4, 5, *(int(word[1:]) for word in message.prompt.text.split()), 6]
        passage = [token for token in alone(model, [4, 5, *WORDS[9:14], 6], 9, 1.0, 4) if token != END]
    assert found[4].tokens[: found[4].prompt].tolist() == [4, 5, 11, *passage, 12, 6]


@pytest.mark.parametrize("begin", [[], [2]])
def test_without_a_template_a_text_of_the_target_goes_on(begin: list[int]) -> None:
    def encode(prompt: object) -> list[int]:
        if not isinstance(prompt, str):
            raise ondevice.UsageError("there is no chat template")
        return [*begin, *(8 if word == replies.MARK else int(word) for word in prompt.split())]

    def decode(ids: list[int]) -> str:
        return " ".join(replies.MARK if token == 8 else str(token) for token in ids if token != 2)

    chat = ChatIds(encode, decode, {END})
    assert (chat.has_template, chat.opening) == (False, begin)
    assert chat.first(Asked(1, 1.0, OWN)) == begin
    for answer in ([11, 12], [11, 12, END]):
        begun = chat.completed(Asked(1, 1.0, OWN), answer)
        assert begun is not None
        assert chat.first(begun) is None
        assert chat.message(begun.prompt.text) == [*begin, 11, 12]
    assert chat.completed(Asked(1, 1.0, OWN), [END]) is None


def test_a_reply_ends_where_it_repeats_itself(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "REPEATED", 3)
    messages = [Asked(number, 0.0, Prompt("chat", text(4, number))) for number in range(32, 52)]
    cut = 0
    with ondevice.load(bundle, threads=1) as model:
        for lesson in EngineWriter(bundle, most=40).lessons(iter(messages)):
            prompt, reply = lesson.tokens[: lesson.prompt].tolist(), lesson.tokens[lesson.prompt :].tolist()
            whole = alone(model, prompt, 40, 0.0, lesson.number)
            parts = [tuple(whole[at : at + 3]) for at in range(len(whole) - 2)]
            again = [at + 3 for at, part in enumerate(parts) if part in parts[:at]]
            assert reply == whole[: min(again, default=40)]
            cut += len(reply) < len(whole)
    assert cut > 3


@pytest.mark.parametrize(
    "bundle",
    [
        *("smollm2", "gemma3", "smollm3", "mistral-full", "phi4-mini", "granite", "hyperclova-x", "exaone4", "glm4"),
        *("ernie4.5", "lfm2", "olmo3"),
    ],
    indirect=True,
)
def test_states_are_those_of_the_target(bundle: Path) -> None:
    target = FrozenTarget.load(bundle.parent / "target", "tiny", CPU)
    for lesson in EngineWriter(bundle, most=24).lessons(iter(MESSAGES[:2])):
        row = Written(MESSAGES[0], lesson.prompt, lesson.tokens.tolist())
        (wanted,) = with_states(target, [row])
        said, known = slice(lesson.prompt - 1, -1), slice(0, -1)
        for ours, theirs in (
            (lesson.hidden[said], wanted.hidden[said]),
            (lesson.cache[0, known], wanted.cache[0, known]),
            (lesson.cache[1, known], wanted.cache[1, known]),
        ):
            assert ours.shape == theirs.shape
            apart = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            assert apart < 0.06  # weights and activations have 8 bits


def test_a_share_goes_on_with_the_missing_messages(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST", 12)
    monkeypatch.setattr(replies, "asked", lambda number: Asked(number, 1.0, Prompt("chat", text(4, number % 60))))
    for tokens in (150, 150, 300):
        write_share(bundle, bundle.parent, 1, itertools.count(1, 2), tokens)
    known = Lessons(bundle.parent, CPU)
    numbers = [fact[0] for fact in known.facts]
    assert len(set(numbers)) == len(numbers)
    assert {number % 2 for number in numbers} == {1}
    assert 300 <= sum(known.lengths) - sum(fact[3] for fact in known.facts) < 300 + 2 * 12


def test_another_number_of_cores_writes_no_reply_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        """Runs its work in this process when it is joined."""

        exitcode = 0

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.work = partial(target, *pickle.loads(pickle.dumps(args)))
            self.start = lambda: None

        def join(self) -> None:
            self.work()

    monkeypatch.setattr("multiprocessing.get_context", lambda _: SimpleNamespace(Process=Process))
    monkeypatch.setattr(replies, "MOST", 12)
    monkeypatch.setattr(replies, "asked", lambda number: Asked(number, 1.0, Prompt("chat", text(4, number % 60))))
    for cores, tokens in ((2, 200), (3, 400), (1, 400)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        write_replies(bundle, bundle.parent, tokens, 5)
    known = Lessons(bundle.parent, CPU)
    numbers = [fact[0] for fact in known.facts]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) == 5
    assert 400 <= sum(known.lengths) - sum(fact[3] for fact in known.facts) < 400 + 3 * 12


def test_given_prompts_are_answered_at_both_temperatures(bundle: Path) -> None:
    file, work = bundle.parent / "riddles.jsonl", bundle.parent / "held-out"
    lines = [{"prompt": text(3)}, {"turns": [text(4), "w9"], "category": "maths"}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    messages = held_out([file])
    write_held_out(EngineWriter(bundle, most=9).lessons(iter(messages)), messages, work)
    known = Lessons(work, CPU)
    facts = sorted(fact[:3] for fact in known.facts)
    first = 32_000_000
    assert facts == [
        [first, "riddles", 0.0], [first + 32, "riddles", 1.0], [first + 64, "maths", 0.0], [first + 96, "maths", 1.0]
    ]  # fmt: skip
    assert known.split() == ([], [0, 1, 2, 3])
    assert are_answered(work, held_out([file]))
    file.write_text(json.dumps({"prompt": text(5)}))
    assert not are_answered(work, held_out([file]))


@pytest.mark.parametrize("line", ["riddle", "5", '{"text": "x"}', '{"prompt": 5}', '{"turns": []}', "[]"])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "riddles.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n\n{line}\n')
    with pytest.raises(SystemExit, match=r"riddles\.jsonl, line 3: this is not JSON with a `prompt` or with `turns`"):
        held_out([file])
