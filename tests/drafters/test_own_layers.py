"""Drafts by the target's own layers change no token: `self`, `swift` and early exits, on bundles of every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import ondevice
from ondevice import Model, Reply, UsageError
from ondevice.bundle import SKIPPED_LAYERS, Bundle
from ondevice.engines.layer_path import PathMemory, SkipRecord, Skips, free_sub_layers
from ondevice.engines.protocol import KVCacheType
from ondevice.generate.drafters import registry, self_speculative
from ondevice.generate.drafters.self_speculative import EarlyExitDrafter, NextLogits, SwiftDrafter
from ondevice.generate.drafters.skip_search import SkipCosts, SkipSearch
from ondevice_export import export
from tests.conftest import MakePair
from tests.fixtures.tiny_models import CONTEXT, QUANTISED

STACK = "import os\nimport sys\n\n\nclass Stack:\n"
CONSTANT: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_k": 20},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "ignore_eos": True},
]
WAY_NAMES = ("greedy", "sampled", "penalty")

BUNDLES = (*QUANTISED, "reference")
SETTINGS = [(name, get_args(KVCacheType)[number % 2], WAYS[number % 3]) for number, name in enumerate(BUNDLES)]
"""Every layout of layers; every type of cache with every way of sampling."""

each_bundle = pytest.mark.parametrize(
    ("directory", "kind", "way"),
    SETTINGS,
    indirect=["directory"],
    ids=[f"{name}-{kind}-{WAY_NAMES[WAYS.index(way)]}" for name, kind, way in SETTINGS],
)
two_bundles = pytest.mark.parametrize("directory", ["e2b", "reference"], indirect=True)
"""One whose upper layers read the caches of lower ones, and one where every layer has its own."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layers that `swift` finds in one test are unknown in the next."""
    place = tmp_path / "skips"
    monkeypatch.setattr(PathMemory, "_cached", lambda self, name: (place / f"{name}.json",))
    return place


@pytest.fixture(scope="module")
def directories(
    make_pair: MakePair, tmp_path_factory: pytest.TempPathFactory, reference_bundle: Path
) -> dict[str, Path]:
    """Bundles that may be written to."""
    made = {}
    for family in QUANTISED:
        directory = make_pair(family)
        made[family] = export(directory / "target", directory / "bundle")
    made["reference"] = tmp_path_factory.mktemp("own") / "reference"
    shutil.copytree(reference_bundle, made["reference"])
    return made


@pytest.fixture(params=BUNDLES)
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Path]:
    path = directories[request.param]
    yield path
    (path / SKIPPED_LAYERS).unlink(missing_ok=True)


def remember(model: Model, skips: Skips, speed_up: float = 1.5) -> None:
    """As if `ondevice tune` had found these."""
    memory = model.engine.paths
    assert memory is not None
    tried = {skips: (0.8, 0.6, 0.5)}
    memory.write(memory.tuned_files, SkipRecord(skips, speed_up, 0.5, "here", tried))


def some(model: Model, seed: int) -> Skips:
    """A random half of what may be left out."""
    free = free_sub_layers(model.engine.target)
    chosen = np.random.default_rng(seed).permutation(len(free))[: max(1, len(free) // 2)]
    return frozenset(free[index] for index in chosen)


def prompt_of(model: Model, length: int = 20, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.manifest.target.vocab_size, length).tolist()


@each_bundle
def test_self_says_what_plain_decoding_says(directory: Path, kind: KVCacheType, way: dict[str, Any]) -> None:
    """With two random choices of layers to leave out."""
    with ondevice.load(directory, engine="simd", threads=1, kv_cache=kind) as model:
        if not free_sub_layers(model.engine.target):
            assert "self" not in registry.offered(model.engine)
            return
        drafted = 0
        for seed in range(2):
            remember(model, some(model, seed))
            model._scheduler._drafters._idle.clear()
            model.forget()
            options: dict[str, Any] = {"max_new_tokens": 40, **way}
            plain = model.generate(prompt_of(model), drafter="none", **options)
            for schedule in (CONSTANT, {"num_assistant_tokens_schedule": "auto"}):
                reply = model.generate(prompt_of(model), drafter="self", **options, **schedule)
                assert reply.token_ids == plain.token_ids
                drafted += reply.stats.drafted
        assert drafted


def test_it_is_right_where_nothing_is_missing(directories: dict[str, Path]) -> None:
    """Without the last feed-forward block of the reference model, about as often as it should be."""
    with ondevice.load(directories["reference"], engine="simd", threads=1) as model:
        remember(model, frozenset({("attention", 9)}))
        try:
            options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.0}
            reply = model.generate("class Stack:\n    def push(self, item):\n", drafter="self", **options, **CONSTANT)
            assert reply.stats.accepted > 0.5 * reply.stats.drafted > 10
        finally:
            (directories["reference"] / SKIPPED_LAYERS).unlink()


@two_bundles
def test_drafts_share_forwards_with_other_sequences(directory: Path) -> None:
    """With verifications and prefills of others."""
    with ondevice.load(directory, engine="simd", threads=2, max_sequences=4) as model:
        remember(model, some(model, 0))
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 4}
        prompts = [prompt_of(model, 8 + 30 * number, number) for number in range(4)]
        alone = [model.generate(prompt, drafter="none", **options).token_ids for prompt in prompts]
        model.forget()

        def reply(number: int) -> Reply:
            return model.generate(prompts[number], drafter=("self", "mtp")[number % 2], **options, **CONSTANT)

        with ThreadPoolExecutor(4) as pool:
            assert [each.token_ids for each in pool.map(reply, range(4))] == alone


def test_to_the_end_of_the_context_and_from_a_kept_prefix(directories: dict[str, Path]) -> None:
    with ondevice.load(directories["e2b"], engine="simd", threads=1) as model:
        remember(model, some(model, 3))
        try:
            prompt = prompt_of(model, CONTEXT - 40)
            options: dict[str, Any] = {"max_new_tokens": 100, "temperature": 1.0, "seed": 1}
            plain = model.generate(prompt, drafter="none", **options)
            assert plain.finish_reason == "context"
            for _ in range(2):  # the second time with what the cache has of the first
                reply = model.generate(prompt, drafter="self", **options, **CONSTANT)
                assert (reply.token_ids, reply.finish_reason) == (plain.token_ids, plain.finish_reason)
            assert reply.stats.cached_tokens > 0
        finally:
            (directories["e2b"] / SKIPPED_LAYERS).unlink()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], SwiftDrafter]:
    """`swift` searches in every round, and takes whatever it finds."""
    monkeypatch.setattr(self_speculative, "MIN_SPEED_UP", 0.0)
    monkeypatch.setattr(self_speculative, "SAMPLE_AGE", 64)
    return lambda model: SwiftDrafter(model.engine, model._scheduler._costs, share=1e9)


@each_bundle
def test_swift_says_what_plain_decoding_says(
    directory: Path, cache: Path, eager: Callable[[Model], SwiftDrafter], kind: KVCacheType, way: dict[str, Any]
) -> None:
    with ondevice.load(directory, engine="simd", threads=1, kv_cache=kind) as model:
        if not free_sub_layers(model.engine.target):
            return
        drafter = eager(model)
        options: dict[str, Any] = {"max_new_tokens": 100, **way}
        plain = model.generate(prompt_of(model, 50), drafter="none", **options)
        model.forget()
        reply = model.generate(prompt_of(model, 50), drafter=drafter, **options, **CONSTANT)
        assert reply.token_ids == plain.token_ids
        assert drafter.searched_s > 0
        assert reply.stats.drafted
        assert cache.is_dir()
        again = eager(model)  # as another process would
        assert again.path is not None


def test_swift_keeps_to_its_share_and_seconds(directories: dict[str, Path]) -> None:
    with ondevice.load(directories["reference"], engine="simd", threads=1) as model:
        drafter = SwiftDrafter(model.engine, model._scheduler._costs, share=0.02)
        model.generate(prompt_of(model, 50), drafter=drafter, max_new_tokens=200, temperature=0.0)
        assert drafter.searched_s <= 0.02 * drafter._generated_s + drafter._step_s
        memory = model.engine.paths
        assert memory is not None
        memory.swift_seconds = 0.0
        drafter = SwiftDrafter(model.engine, model._scheduler._costs, share=1e9)
        model.generate(prompt_of(model, 50), drafter=drafter, max_new_tokens=50, temperature=0.0)
        assert drafter.searched_s == 0.0


def test_swift_writes_a_finished_search_once(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[SkipRecord] = []
    monkeypatch.setattr(PathMemory, "keep", lambda self, files, record: kept.append(record))
    with ondevice.load(directories["reference"], engine="simd", threads=1) as model:
        search = SkipSearch(free_sub_layers(model.engine.target), SkipCosts([1.0, 1.1], 0.1, 0.1))
        while (skips := search.propose()) is not None:
            search.learn(skips, (0.5,))
        drafter = SwiftDrafter(model.engine, model._scheduler._costs)
        drafter._search, drafter._finished = search, True
        for _ in range(3):
            drafter.rest()
    assert [record.finished for record in kept] == [True]


def test_which_drafters_are_offered(directory: Path) -> None:
    with ondevice.load(directory, engine="simd", threads=1) as model:
        assert "self" not in registry.offered(model.engine)
        if not free_sub_layers(model.engine.target):
            assert "swift" not in registry.offered(model.engine)
            with pytest.raises(UsageError, match="too few layers"):
                model.generate([5], drafter="swift", max_new_tokens=2)
            return
        assert "swift" in registry.offered(model.engine)
        with pytest.raises(UsageError, match="ondevice tune"):
            model.generate([5], drafter="self", max_new_tokens=2)
        remember(model, some(model, 0), speed_up=0.9)
        assert "self" not in registry.offered(model.engine)
        assert "self" not in registry.methods(model.engine)
        remember(model, frozenset())
        with pytest.raises(UsageError, match="found no layers"):
            model.generate([5], drafter="self", max_new_tokens=2)
        remember(model, some(model, 0))
        assert "self" in registry.offered(model.engine)


def test_auto_has_own_layers_only_where_tune_measured_that_they_pay(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ondevice.load(directory, engine="simd", threads=1) as model:
        monkeypatch.setattr(model.engine, "drafter", None)
        if not free_sub_layers(model.engine.target):
            return

        def parts() -> set[str]:
            made = registry.entry("auto", model.engine).make(model.engine, model._scheduler._costs)
            return {drafter.name for drafter in made} & {"self", "swift"}

        assert parts() == set()
        remember(model, some(model, 0), speed_up=0.9)
        assert parts() == set()
        remember(model, some(model, 0), speed_up=1.1)
        assert parts() == {"self", "swift"}


def test_self_can_be_tried_where_it_is_expected_to_lose(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the best layers that were found, and only where it is named."""
    with ondevice.load(directory, engine="simd", threads=1) as model:
        if not free_sub_layers(model.engine.target):
            return
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
        plain = model.generate(prompt_of(model), drafter="none", **options)
        remember(model, some(model, 0), speed_up=0.9)
        reply = model.generate(prompt_of(model), drafter="self", **options, **CONSTANT)
        assert reply.token_ids == plain.token_ids
        assert reply.stats.by_source["self"].num_draft_tokens > 10
        assert "predicts 0.90 times plain decoding" in caplog.text
        assert "self" not in model.generate(prompt_of(model), drafter="auto", **options, **CONSTANT).stats.by_source


@pytest.mark.needs("onnxruntime")
def test_ort_says_why_it_cannot(reference_bundle: Path) -> None:
    with ondevice.load(reference_bundle, engine="ort") as model:
        names = ("self", "swift", "early-exit")
        assert not set(names) & set(registry.offered(model.engine))
        for name in names:
            with pytest.raises(UsageError, match="--engine simd"):
                model.generate([5], drafter=name, max_new_tokens=2)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"schema": 2}', "x" * 100])
def test_a_damaged_record_is_none(directories: dict[str, Path], damage: str) -> None:
    bundle = Bundle.open(directories["e2b"])
    (directories["e2b"] / SKIPPED_LAYERS).write_text(damage)
    memory = PathMemory(bundle)
    assert memory.read(memory.tuned_files) is None
    (directories["e2b"] / SKIPPED_LAYERS).unlink()


@pytest.mark.parametrize("name", ["speed_up", "draft_share"])
def test_a_record_with_a_number_that_no_float_holds_is_none(directories: dict[str, Path], name: str) -> None:
    bundle = Bundle.open(directories["e2b"])
    free = frozenset(free_sub_layers(bundle.manifest.target)[:1])
    memory = PathMemory(bundle)
    path = memory.write(memory.tuned_files, SkipRecord(free, 1.5, 0.5, "here", {free: (0.5,)}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 10**400}))
    found = PathMemory(bundle)
    assert found.read(found.tuned_files) is None
    path.unlink()


def test_a_record_of_another_bundle_is_none(directories: dict[str, Path]) -> None:
    of = {name: PathMemory(Bundle.open(directories[name])) for name in ("e2b", "e4b")}
    free = frozenset(free_sub_layers(Bundle.open(directories["e2b"]).manifest.target)[:1])
    path = of["e2b"].write(of["e2b"].tuned_files, SkipRecord(free, 1.5, 0.5, "here", {free: (0.5,)}))
    shutil.copy(path, directories["e4b"] / SKIPPED_LAYERS)
    assert of["e4b"].read(of["e4b"].tuned_files) is None
    for name in ("e2b", "e4b"):
        (directories[name] / SKIPPED_LAYERS).unlink()


def test_where_a_bundle_cannot_be_written_to(directories: dict[str, Path], tmp_path: Path) -> None:
    """The cache directory has what was found."""
    bundle = Bundle.open(directories["e2b"])
    memory = PathMemory(bundle)
    memory._in_bundle = tmp_path / "file" / SKIPPED_LAYERS
    (tmp_path / "file").write_text("no directory")
    free = frozenset(free_sub_layers(bundle.manifest.target)[:1])
    path = memory.write(memory.tuned_files, SkipRecord(free, 1.5, 0.5, "here", {free: (0.5,)}))
    assert path.parent != tmp_path / "file"
    found = PathMemory(bundle)
    found._in_bundle = memory._in_bundle
    record = found.read(found.tuned_files)
    assert record is not None
    assert record.skips == free


def untrained(model: Model, seed: int = 0) -> EarlyExitDrafter:
    """An early exit whose head is random: after the layers that own a cache, or after the first one."""
    engine = model.engine
    layers, vocabulary = engine.target.layers, engine.target.vocab_size
    shared = [index for index, layer in enumerate(layers) if layer.mixer.kv_source is not None]
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((vocabulary, engine.target.hidden_size)).astype(np.float32)
    return EarlyExitDrafter(engine, shared[0] if shared else 1, lambda session, hidden: NextLogits(weights @ hidden))


@each_bundle
def test_early_exits_say_what_plain_decoding_says(directory: Path, kind: KVCacheType, way: dict[str, Any]) -> None:
    with ondevice.load(directory, engine="simd", threads=1, kv_cache=kind) as model:
        options: dict[str, Any] = {"max_new_tokens": 40, **way}
        plain = model.generate(prompt_of(model), drafter="none", **options)
        for schedule in (CONSTANT, {"num_assistant_tokens_schedule": "auto"}):
            model.forget()
            reply = model.generate(prompt_of(model), drafter=untrained(model), **options, **schedule)
            assert reply.token_ids == plain.token_ids
            assert reply.stats.drafted or schedule is not CONSTANT  # `auto` need not draft where it does not pay


@two_bundles
def test_an_early_exit_that_knows_is_right(directory: Path) -> None:
    """Its head has the plain reply by heart, but for every third token: the text is right all the same."""
    with ondevice.load(directory, engine="simd", threads=1) as model:
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
        prompt = prompt_of(model)
        plain = model.generate(prompt, drafter="none", **options)
        model.forget()
        drafter = untrained(model)
        vocabulary, real = model.manifest.target.vocab_size, drafter.scores
        text = [*prompt, *plain.token_ids]

        def by_heart(session: Any, tokens: list[int]) -> NextLogits | None:
            scores = real(session, tokens)
            assert scores is not None
            place = session.length + len(tokens)
            if place < len(text) and place % 3:
                scores.logits[text[place]] = 1e6
            return NextLogits(scores.logits[:vocabulary])

        drafter.scores = by_heart  # type: ignore[method-assign,assignment]
        reply = model.generate(prompt, drafter=drafter, **options, **CONSTANT)
        assert reply.token_ids == plain.token_ids
        assert reply.stats.accepted > 10


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_the_trained_exit_says_what_plain_decoding_says(directories: dict[str, Path], way: dict[str, Any]) -> None:
    with ondevice.load(directories["reference"], engine="simd", threads=2, max_sequences=2) as model:
        options: dict[str, Any] = {"max_new_tokens": 80, **way}
        prompts = ["def fibonacci(n):\n", STACK]
        plain = [model.generate(prompt, drafter="none", **options).token_ids for prompt in prompts]
        model.forget()

        def drafted(prompt: str) -> Reply:
            return model.generate(prompt, drafter="early-exit", **options, **CONSTANT)

        replies = [drafted(prompt) for prompt in prompts]
        assert [reply.token_ids for reply in replies] == plain
        assert sum(reply.stats.accepted for reply in replies) > 4
        with ThreadPoolExecutor(2) as pool:  # the second time after a kept prefix
            assert [reply.token_ids for reply in pool.map(drafted, prompts)] == plain


def test_the_trained_exit_leaves_after_the_layer_of_its_head(directories: dict[str, Path]) -> None:
    """A layer earlier or later, its head is accepted less often."""
    with ondevice.load(directories["reference"], engine="simd", threads=1) as model:
        layer = model.engine.heads["exit"].layer
        assert layer is not None

        def rate(drafter: str | EarlyExitDrafter) -> float:
            stats = model.generate(STACK, drafter=drafter, max_new_tokens=80, temperature=0.0, **CONSTANT).stats
            return stats.draft_acceptance_rate

        earlier, own, later = (rate(EarlyExitDrafter(model.engine, stop)) for stop in (layer, layer + 1, layer + 2))
        assert rate("early-exit") == own > max(earlier, later)


def test_damaged_heads_cost_no_reply(directories: dict[str, Path]) -> None:
    with ondevice.load(directories["e2b"], engine="simd", threads=1) as model:
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
        plain = model.generate(prompt_of(model), drafter="none", **options)
        logits = np.zeros(3, np.float32)
        wrong = (np.array([1, 2, 1 << 40]), np.array([-1, 0, 1]))
        for scores in (NextLogits(logits * np.nan), *(NextLogits(logits, ids) for ids in wrong)):
            drafter = EarlyExitDrafter(model.engine, 2, lambda session, hidden, scores=scores: scores)  # type: ignore[misc]
            reply = model.generate(prompt_of(model), drafter=drafter, **options, **CONSTANT)
            assert reply.token_ids == plain.token_ids
