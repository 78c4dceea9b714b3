"""A draft model over the toy engine, whose next token depends on every one that its cache holds."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice import Model, Reply, UsageError
from ondevice.arrays import Float32Array
from ondevice.bundle import MANIFEST
from ondevice.bundle_format.manifest import FileEntry, Manifest
from ondevice.engines.protocol import Outputs, Rows
from ondevice.generate.costs import Costs, KnownCosts
from ondevice.generate.drafters.draft_model import NEAR, DraftModel, DraftModelDrafter
from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import DraftRequest
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from tests.drafters.rounds import NO_SESSION, observe
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import VOCAB, Clock, ToyEngine, logits_after

PROMPT = [2, 5, 7, 4]
LONG = [4 + number * number % 7 for number in range(300)]
CONSTANT: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}


class Murky(ToyEngine):
    """Sees what the toy sees, not quite clearly: about half of its drafts are right."""

    def __init__(
        self, blur: Callable[[Float32Array], Float32Array], chunk: int = 64, context_length: int = 10_000
    ) -> None:
        super().__init__(context_length, chunk, self._check)
        self.blur = blur
        self.closed = False

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        assert not self.closed
        return [replace(outputs, logits=self.blur(outputs.logits)) for outputs in super().forward(batch)]

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _check(batch: Sequence[Rows]) -> None:
        """A rewind has left nothing else in the caches than the tokens say."""
        for rows in batch:
            session: Any = rows.session
            assert session.held() == session.tokens


def clear(logits: Float32Array) -> Float32Array:
    return logits


def blurred(logits: Float32Array) -> Float32Array:
    return logits + np.float32(1.5) * np.sin(np.float32(1e4) * logits)


def murky(blur: Callable[[Float32Array], Float32Array] = blurred, **options: Any) -> Murky:
    return Murky(blur, **options)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "target")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_bundle(tmp_path / "small"))


def model_with(bundle: Path, draft: ToyEngine) -> Model:
    return model_over(ToyEngine(), bundle, open_draft=lambda bundle, on_prepare: draft)


def generate(model: Model, prompt: Sequence[int], **options: Any) -> Reply:
    return model.generate(list(prompt), **{"max_new_tokens": 60, "temperature": 1.0, "seed": 7, **options})


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
def test_the_text_is_that_of_plain_decoding(
    bundle: Path, path: str, prompt: list[int], temperature: float, schedule: str
) -> None:
    with model_with(bundle, murky()) as model:
        plain = generate(model, prompt, temperature=temperature, drafter="none")
        for drafter in (path, f"auto+{path}", Path(path)):
            options = {"drafter": drafter, "num_assistant_tokens_schedule": schedule, "temperature": temperature}
            drafted = generate(model, prompt, **options)
            assert drafted.token_ids == plain.token_ids
            if schedule == "constant" and drafter == path:
                assert 0 < drafted.stats.accepted < drafted.stats.drafted
                assert drafted.stats.by_source.keys() == {"draft:small"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_always_right(bundle: Path, path: str, temperature: float) -> None:
    with model_with(bundle, murky(clear)) as model:
        stats = generate(model, LONG, temperature=temperature, drafter=path, **CONSTANT).stats
    assert stats.accepted == stats.drafted > 40


def test_a_penalty_and_filters_are_the_target_s(bundle: Path, path: str) -> None:
    sampling = {"top_k": 4, "top_p": 0.9, "repetition_penalty": 1.4}
    with model_with(bundle, murky(clear)) as model:
        stats = generate(model, PROMPT, drafter=path, **sampling, **CONSTANT).stats
        assert stats.accepted == stats.drafted > 40
        ratio = generate(model, PROMPT, drafter=path, draft_sampling="ratio", **sampling, **CONSTANT).stats
        assert ratio.accepted == ratio.drafted > 40


def test_it_reads_a_text_once_and_catches_up_in_one_forward() -> None:
    engine = murky(clear, chunk=64)
    drafter = DraftModelDrafter(DraftModel(engine, "small", 1 << 30), Costs())
    text = [*LONG, 5]
    drafter.begin(LONG, NO_SESSION)
    observe(drafter, [5])
    assert not engine.batches
    first = drafter.draft(DraftRequest(3, context=text))
    assert engine.batches == [[64], [64], [64], [64], [44], [1], [1], [1]]
    assert first.reading_s > 0
    engine.batches.clear()
    wrong = (int(first.tokens[1]) + 1) % VOCAB
    for emitted in ([int(first.tokens[0]), wrong], [5], [6, 7]):
        observe(drafter, emitted)
        text += emitted
    second = drafter.draft(DraftRequest(3, context=text))
    assert engine.batches == [[4], [1], [1]]
    assert second.tokens.tolist() == greedy(text, 3)


def greedy(text: Sequence[int], count: int) -> list[int]:
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(text) :]


def known_costs() -> Costs:
    costs = Costs()
    costs.recall(KnownCosts(0.0, 1.0, dict.fromkeys(range(1, 9), 1.0), {"small": {1: 0.1, 8: 0.8}}, {}))
    return costs


def test_a_long_text_is_read_only_when_that_is_expected_to_pay() -> None:
    """A token read costs 0.02 plain steps, and drafts that save half a step each must save four times all of it."""
    drafter = DraftModelDrafter(DraftModel(murky(), "small", 1 << 30), known_costs())
    drafter.begin(LONG, NO_SESSION)
    generated = 0
    while not len(drafter.forecast(4).survival):
        observe(drafter, [5])
        generated += 1
        assert generated < 1000
    assert 40 < generated < 130
    drafter.begin(LONG[: NEAR - 1], NO_SESSION)
    observe(drafter, [5])
    assert len(drafter.forecast(4).survival) == 4


def test_nothing_is_computed_for_a_drafter_that_never_drafts(bundle: Path, path: str) -> None:
    draft = murky()
    with model_with(bundle, draft) as model:
        generate(model, LONG, drafter=path, max_new_tokens=5)
        generate(model, LONG, drafter="auto", max_new_tokens=5)
        assert draft.forwards == 0
        assert model.engine.forwards > 0  # type: ignore[attr-defined]


def test_one_that_pays_is_used_although_it_was_thought_to_be_dear(bundle: Path, path: str, clock: Clock) -> None:
    """The toys have no weights: a draft model is supposed to cost what the target does, until a probe has told."""
    target, draft = (ToyEngine(before=clock.taking(seconds)) for seconds in (0.004, 0.0004))
    with model_over(target, bundle, open_draft=lambda bundle, on_prepare: draft) as model:
        stats = generate(model, PROMPT, drafter=path, max_new_tokens=120).stats
    assert stats.accepted == stats.drafted > 40


def test_the_next_turn_of_a_chat_is_read_from_where_the_last_one_ended(bundle: Path, path: str) -> None:
    draft = murky()
    with model_with(bundle, draft) as model:
        reply = generate(model, LONG, drafter=path, **CONSTANT)
        draft.batches.clear()
        generate(model, [*LONG, *reply.token_ids, 5, 6], drafter=path, **CONSTANT)
        assert all(rows <= 5 for rows in map(sum, draft.batches))
        model.forget()
        draft.batches.clear()
        generate(model, LONG, drafter=path, **CONSTANT)
        assert sum(map(sum, draft.batches)) > len(LONG)


def test_a_cancellation_ends_its_reading(bundle: Path, path: str) -> None:
    draft = murky(chunk=16)
    with model_with(bundle, draft) as model:
        told: list[int] = []

        def on_prefill(done: int, total: int) -> None:
            told.append(done)
            if told != sorted(told):  # the prompt again, by the draft model
                generation.cancel()

        options: dict[str, Any] = {"drafter": path, "on_prefill": on_prefill, **CONSTANT}
        generation = model.stream(LONG, **options)
        steps = list(generation)
        assert steps[-1].finish_reason == "cancelled"
        assert draft.forwards == 1
        plain = generate(model, LONG, drafter="none")
        assert generate(model, LONG, drafter=path, **CONSTANT).token_ids == plain.token_ids


def test_several_at_once(bundle: Path, path: str) -> None:
    prompts = [[*PROMPT, number] for number in range(3)] + [LONG]
    with model_with(bundle, murky()) as model:
        plain = [generate(model, prompt, drafter="none").token_ids for prompt in prompts]
        model.forget()
        found: dict[int, tuple[int, ...]] = {}

        def work(number: int) -> None:
            found[number] = generate(model, prompts[number], drafter=path, **CONSTANT).token_ids

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(len(prompts))] == plain


def test_it_is_opened_once_and_closed_with_the_model(bundle: Path, path: str) -> None:
    draft, opened = murky(), []

    def open_draft(bundle: object, on_prepare: object) -> ToyEngine:
        opened.append(bundle)
        return draft

    model = model_over(ToyEngine(), bundle, open_draft=open_draft)
    model.draft_with(path)
    assert len(opened) == 1
    with model.stream(PROMPT, max_new_tokens=20) as generation:
        next(generation)
        assert generation.stats.drafter == "draft:small"
        generate(model, PROMPT, drafter=f"auto+{path}")
        model.close()
        assert not draft.closed
    assert draft.closed
    assert len(opened) == 1


def test_a_shorter_context_ends_its_drafts_and_not_the_reply(bundle: Path, path: str) -> None:
    draft = murky(clear, context_length=30)
    with model_with(bundle, draft) as model:
        plain = generate(model, PROMPT, drafter="none")
        for options in (CONSTANT, {}):
            assert generate(model, PROMPT, drafter=path, **options).token_ids == plain.token_ids


def test_a_damaged_one_costs_speed_and_nothing_else(bundle: Path, path: str) -> None:
    with model_with(bundle, murky(lambda logits: logits * np.float32(np.nan))) as model:
        plain = generate(model, PROMPT, drafter="none")
        assert generate(model, PROMPT, drafter=path, **CONSTANT).token_ids == plain.token_ids
        assert generate(model, PROMPT, drafter=path, draft_sampling="ratio", **CONSTANT).stats.drafted == 0


CHI_SQUARE = 170.0
"""The 0.999 quantile for 118 degrees of freedom is 169.6."""


def test_the_ratio_rule_keeps_the_distribution_and_gives_a_seed_its_own_text(bundle: Path, path: str) -> None:
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=8))
    expected: Counter[tuple[int, int]] = Counter()
    for first, p in enumerate(sampler.distribution(logits_after(PROMPT), [])):
        for second, q in enumerate(sampler.distribution(logits_after([*PROMPT, first]), []) if p else []):
            after = sampler.distribution(logits_after([*PROMPT, first, second]), [])
            for third, r in enumerate(after):
                expected[second, third] += p * q * r
    runs, found, other = 4000, Counter[tuple[int, int]](), 0
    with model_with(bundle, murky()) as model:
        for seed in range(runs):
            options = {"seed": seed, "top_k": 8, "max_new_tokens": 3, "drafter": path, **CONSTANT}
            tokens = generate(model, PROMPT, draft_sampling="ratio", **options).token_ids
            found[tokens[1], tokens[2]] += 1
            other += seed < 50 and tokens != generate(model, PROMPT, **options).token_ids
    assert other > 5
    cells = [(runs * p, found[pair]) for pair, p in expected.items() if runs * p >= 5]
    rest = runs - sum(wanted for wanted, _ in cells), runs - sum(count for _, count in cells)
    assert len(cells) < 119
    assert sum((count - wanted) ** 2 / wanted for wanted, count in [*cells, rest] if wanted > 1) < CHI_SQUARE


@pytest.mark.parametrize("drafter", ["auto", "none", "auto+PATH"])
def test_the_ratio_rule_is_for_a_draft_model_that_drafts_alone(bundle: Path, path: str, drafter: str) -> None:
    with model_with(bundle, murky()) as model, pytest.raises(UsageError, match=r"draft_sampling"):
        model.stream(PROMPT, drafter=drafter.replace("PATH", path), draft_sampling="ratio")


def test_a_drafter_of_the_application_takes_no_sampling(bundle: Path) -> None:
    """It draws its tokens itself: the option would have no effect, silently."""
    with model_with(bundle, murky()) as model, pytest.raises(UsageError, match="draft_sampling is for a draft model"):
        model.stream(PROMPT, drafter=NgramDrafter(), draft_sampling="ratio")


def with_other_vocabulary(path: str, size: int | None = None) -> None:
    """Change the size that bundle.json tells, or two tokens of the tokenizer."""
    file, tokenizer = Path(path, MANIFEST), Path(path, "tokenizer.json")
    manifest = Manifest.from_json(file.read_text())
    if size is not None:
        manifest = replace(manifest, target=replace(manifest.target, vocab_size=size))
    else:
        data = json.loads(tokenizer.read_text())
        data["model"]["vocab"].update(a=5, b=4)
        tokenizer.write_text(json.dumps(data))
        files = {**manifest.files, "tokenizer.json": FileEntry(tokenizer.stat().st_size, 64 * "0")}
        manifest = replace(manifest, files=files)
    file.write_text(manifest.to_json())


@pytest.mark.parametrize(
    ("size", "message"), [(12, "it has 12 tokens, and this model 11"), (None, "its tokenizer.json has other tokens")]
)
def test_another_vocabulary_is_refused(bundle: Path, path: str, size: int | None, message: str) -> None:
    with_other_vocabulary(path, size)
    with model_with(bundle, murky()) as model, pytest.raises(UsageError, match=message):
        model.stream(PROMPT, drafter=path)
