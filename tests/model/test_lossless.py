"""End to end on the pair that ships: the output is that of plain decoding, with every drafter, engine and attention.

That drafts change nothing is tested in full over a toy engine (`tests/generate/test_loop.py`). Drafters that run the
target's own layers are in `tests/drafters/test_own_layers.py`, draft models in `tests/drafters/test_draft_models.py`.
One setting has two threads; that their number changes no bit is tested in `tests/simd/test_exactness.py`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Model, Reply
from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import Draft, DraftRequest
from ondevice.options import ScheduleName
from tests.conftest import ENGINES
from tests.fixtures.pairwise import pairwise

SHORT = "def fibonacci(n):"
LONG = (
    "import os\nimport re\n\n\nclass Parser:\n"
    + "".join(f"    def field_{i}(self):\n        return self._fields[{i}]\n\n" for i in range(30))
    + "    def close(self):"
)
"""Past the window of 256 tokens, and repetitive, so that n-grams have something to find."""

PROMPTS = {"short": SHORT, "long": LONG}
DRAFTERS = ("mtp", "ngram", "medusa", "blockwise", "auto")
SCHEDULES = (("constant", 1), ("constant", 7), ("heuristic", 4), ("auto", None))

ATTENTIONS = ("int8", "lookup", "lookup-drafts", "nomad")
"""Options of the simd engine, besides exact attention over an fp16 cache."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9},
    "biased": {"temperature": 0.0, "logit_bias": {214: -100.0, 400: 5.5}, "presence_penalty": 1.5},
    "penalised": {"temperature": 0.9, "frequency_penalty": 2.0, "repetition_penalty": 1.3, "top_k": 40},
    "all": {
        "temperature": 0.9, "logit_bias": {300: 3.0}, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "top_logprobs": 5,
    },
    "logprobs": {"temperature": 0.0, "logprobs": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(reference_bundle: Path) -> Iterator[Callable[[str], Model]]:
    """The model with an engine or an attention, loaded where a test first asks for it."""
    with ExitStack() as models:

        @cache
        def load(setting: str) -> Model:
            if setting == "simd":
                return models.enter_context(ondevice.load(reference_bundle, engine="simd", threads=2))
            if setting == "ort":
                return models.enter_context(ondevice.load(reference_bundle, engine="ort", threads=1))
            if setting == "int8":
                return models.enter_context(ondevice.load(reference_bundle, engine="simd", threads=1, kv_cache="int8"))
            # as small as these, a prompt of 600 tokens is long enough for lookups
            settings = LookupSettings(setting, keys=32, window=64, learn=64)  # type: ignore[arg-type]
            bundle = Bundle.open(reference_bundle)
            return models.enter_context(Model(bundle, SimdEngine(bundle, 1, lookup=settings), 1))

        yield load


@pytest.fixture(scope="module")
def expected(loaded: Callable[[str], Model]) -> Callable[[str, str, str], Reply]:
    """The reply of plain decoding, computed once."""

    @cache
    def reply(setting: str, prompt: str, way: str) -> Reply:
        return loaded(setting).generate(PROMPTS[prompt], max_new_tokens=48, seed=11, drafter="none", **WAYS[way])

    return reply


@pairwise(
    setting=(*ENGINES, *ATTENTIONS),
    drafter=DRAFTERS,
    way=list(WAYS),
    schedule=SCHEDULES,
    prompt=list(PROMPTS),
)
def test_output_is_that_of_plain_decoding(
    loaded: Callable[[str], Model],
    expected: Callable[[str, str, str], Reply],
    setting: str,
    drafter: str,
    way: str,
    schedule: tuple[ScheduleName, int | None],
    prompt: str,
) -> None:
    name, k = schedule
    reply = loaded(setting).generate(
        PROMPTS[prompt],
        max_new_tokens=48,
        seed=11,
        drafter=drafter,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule=name,
        **WAYS[way],
    )
    plain = expected(setting, prompt, way)
    assert reply.token_ids == plain.token_ids
    assert reply.text == plain.text
    assert reply.logprobs == plain.logprobs
    if name == "constant" and drafter == "mtp":
        assert 0 < reply.stats.accepted < reply.stats.drafted


@pytest.mark.parametrize("way", ["biased", "penalised", "all"])
def test_biases_and_penalties_change_the_text(expected: Callable[[str, str, str], Reply], way: str) -> None:
    """Otherwise the test above would compare what it compares without them."""
    without = "greedy" if WAYS[way]["temperature"] == 0.0 else "seeded"
    assert expected("simd", "long", way).token_ids != expected("simd", "long", without).token_ids


def test_lookups_change_the_text(expected: Callable[[str, str, str], Reply]) -> None:
    """And of the target alone; otherwise the test above would compare exact attention with exact attention."""
    exact = expected("simd", "long", "logprobs")
    for setting in ("lookup", "nomad"):
        assert expected(setting, "long", "logprobs").logprobs != exact.logprobs
    assert expected("lookup-drafts", "long", "logprobs").logprobs == exact.logprobs


def test_drafting_saves_forwards(reference_model: Model) -> None:
    options: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    reply = reference_model.generate(LONG, max_new_tokens=64, temperature=0.0, drafter="mtp", **options)
    assert reply.stats.target_forwards < 63


def test_a_logits_processor_sees_the_draft_path(loaded: Callable[[str], Model]) -> None:
    """One that forbids the last token but one: what it does depends on every token before."""
    model, contexts = loaded("simd"), list[int]()

    def no_echo(logits: np.ndarray, context: Sequence[int]) -> np.ndarray:
        contexts.append(len(context))
        logits[context[-2]] = -np.inf
        return logits

    options: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0, "logits_processors": [no_echo]}
    wanted = model.generate(SHORT, drafter="none", **options)
    assert contexts == list(range(contexts[0], contexts[0] + 48))
    assert all(a != b for a, b in zip(wanted.token_ids, wanted.token_ids[2:], strict=False))
    drafted = model.generate(
        SHORT, drafter="mtp", num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
    )
    assert drafted.token_ids == wanted.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_suppressed_tokens_never_appear(
    loaded: Callable[[str], Model], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling options that a checkpoint's generation_config.json names, with every drafter."""
    model = loaded("simd")
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": 3}
    suppressed = tuple(sorted(set(model.generate(LONG, **options).token_ids))[::2])
    monkeypatch.setattr(model, "defaults", dataclasses.replace(model.defaults, suppress_tokens=suppressed))
    plain = model.generate(LONG, drafter="none", **options)
    assert set(suppressed).isdisjoint(plain.token_ids)
    for drafter in DRAFTERS:
        drafted = model.generate(
            LONG, drafter=drafter, num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
        )
        assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
def test_a_reply_that_was_cut_off_goes_on_as_it_would_have(loaded: Callable[[str], Model], drafter: str) -> None:
    """With its seed, and any drafter: draws depend on the position in the text, not on earlier draws."""
    model = loaded("simd")
    whole = model.generate(SHORT, max_new_tokens=48, temperature=1.0, seed=5, drafter="none")
    begun = [*model.encode(SHORT), *whole.token_ids[:20]]
    rest = model.generate(begun, max_new_tokens=28, temperature=1.0, seed=5, drafter=drafter)
    assert rest.token_ids == whole.token_ids[20:]


def test_drafts_that_share_the_target_s_noise_are_right_more_often(loaded: Callable[[str], Model]) -> None:
    class Greedy(MtpDrafter):
        def widths(self, request: DraftRequest) -> tuple[Sequence[int], Float32Array]:
            return (), super().widths(request)[1]  # the engine would draw with the noise

        def draft(self, request: DraftRequest) -> Draft:
            return super().draft(DraftRequest(request.nodes))

    model = loaded("simd")
    target = model.manifest.target
    taken = []
    for kind in (Greedy, MtpDrafter):
        drafter = kind(target.vocab_size)
        options: dict[str, Any] = {"drafter": drafter, "num_assistant_tokens_schedule": "constant"}
        replies = [
            model.generate(SHORT, max_new_tokens=100, temperature=1.0, seed=seed, **options) for seed in range(6)
        ]
        rounds = sum(each.stats.num_drafts_per_pos[0] for each in replies)
        taken.append(sum(each.stats.num_accepted_tokens_per_pos[0] for each in replies) / rounds)
    assert taken[1] > 1.1 * taken[0]


def test_logprobs_belong_to_the_tokens(loaded: Callable[[str], Model]) -> None:
    model = loaded("simd")
    reply = model.generate(SHORT, max_new_tokens=24, temperature=0.0, top_logprobs=3)
    assert tuple(each.token_id for each in reply.logprobs) == reply.token_ids
    for each in reply.logprobs:
        assert len(each.top) == 3
        assert each.top[0] == (each.token_id, each.logprob)  # greedy takes the likeliest
        assert 0 >= each.top[0][1] >= each.top[1][1] >= each.top[2][1]
    assert model.generate(SHORT, max_new_tokens=4).logprobs == ()


@pytest.mark.parametrize("setting", [*ENGINES, *ATTENTIONS])
@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_a_text_is_scored_as_it_was_generated(loaded: Callable[[str], Model], setting: str, drafter: str) -> None:
    """The log probabilities of a prompt are those that its tokens have when they are generated, bit for bit."""
    model = loaded(setting)
    options: dict[str, Any] = {"drafter": drafter, "top_logprobs": 3, "temperature": 0.9, "seed": 5}
    reply = model.generate(LONG, max_new_tokens=40, **options)
    ids = [*model.encode(LONG), *reply.token_ids]
    scored = model.generate(ids, max_new_tokens=0, prompt_logprobs=True, top_logprobs=3, drafter=drafter)
    assert (scored.token_ids, scored.text, scored.finish_reason) == ((), "", "length")
    assert scored.stats.cached_tokens == 0
    assert [each.token_id for each in scored.prompt_logprobs] == ids[1:]
    assert scored.prompt_logprobs[-40:] == reply.logprobs
    continued = model.generate(ids[:-20], max_new_tokens=20, prompt_logprobs=True, **options)
    assert continued.token_ids == reply.token_ids[-20:]
    assert continued.prompt_logprobs == scored.prompt_logprobs[: len(ids) - 21]
    assert model.generate(ids, max_new_tokens=1).prompt_logprobs == ()


def test_scoring_beside_other_generations_changes_nothing(loaded: Callable[[str], Model]) -> None:
    model = loaded("simd")
    alone = model.generate(LONG, max_new_tokens=0, prompt_logprobs=True).prompt_logprobs
    others = [model.stream(SHORT, max_new_tokens=200, temperature=0.0, seed=seed) for seed in range(2)]
    found: list[Reply] = []
    scoring = threading.Thread(
        target=lambda: found.append(model.generate(LONG, max_new_tokens=0, prompt_logprobs=True))
    )
    for each in others:
        next(each)
    scoring.start()
    for each in others:
        for _ in each:
            pass
    scoring.join(300)
    assert found[0].prompt_logprobs == alone


def test_a_stop_string_cuts_logprobs_with_the_ids(loaded: Callable[[str], Model]) -> None:
    model = loaded("simd")
    whole = model.generate(SHORT, max_new_tokens=40, temperature=0.0)
    reply = model.generate(SHORT, max_new_tokens=40, temperature=0.0, stop=whole.text[10:14], logprobs=True)
    assert reply.finish_reason == "stop"
    assert len(reply.token_ids) < 40
    assert tuple(each.token_id for each in reply.logprobs) == reply.token_ids
