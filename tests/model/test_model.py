"""`Model` as an application meets it."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import MANIFEST
from ondevice.engines.choice import EngineName
from ondevice.engines.protocol import Outputs, Rows
from ondevice.engines.simd.tensor_files import UnsupportedGraphError
from ondevice.errors import BundleCorruptError, ContextOverflowError, PromptError, UsageError
from ondevice.options import GenerationDefaults, GenerationKeywords
from tests.conftest import ENGINES

PROMPT = "def add(a, b):"


def without(bundle: Path, out: Path, *names: str) -> Path:
    """A copy of a bundle that lacks some files and knows it."""
    shutil.copytree(bundle, out)
    data = json.loads((out / MANIFEST).read_text())
    for name in names:
        (out / name).unlink()
        del data["files"][name]
    (out / MANIFEST).write_text(json.dumps(data))
    return out


def test_steps_add_up_to_the_reply(reference_model: Model) -> None:
    steps = list(reference_model.stream(PROMPT, max_new_tokens=40, temperature=0.0))
    reply = reference_model.generate(PROMPT, max_new_tokens=40, temperature=0.0)
    assert "".join(step.text for step in steps) == reply.text
    assert tuple(token for step in steps for token in step.token_ids) == reply.token_ids
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == reply.finish_reason
    stats = reply.stats
    assert stats.new_tokens == len(reply.token_ids)
    assert stats.prompt_tokens == len(reference_model.encode(PROMPT))
    assert sum(stats.num_drafts_per_pos[:1]) + stats.rounds_without_draft == stats.target_forwards
    assert sum(stats.num_accepted_tokens_per_pos) == stats.accepted
    assert stats.accepted <= sum(stats.num_drafts_per_pos) <= stats.drafted  # less than that where there were siblings
    assert sum(stats.fallbacks.values()) == stats.rounds_without_draft
    sources = stats.by_source.values()
    assert sum(counts.num_drafts for counts in sources) == stats.num_drafts == sum(stats.num_drafts_per_pos[:1])
    assert sum(counts.num_accepted_tokens for counts in sources) == stats.accepted
    assert stats.mean_acceptance_length == 1 + stats.accepted / max(1, stats.num_drafts)
    assert stats.timings()["draft_n_accepted"] == stats.accepted
    assert stats.costs_age_s is not None
    assert stats.costs_age_s >= 0


def test_a_stop_string_ends_the_text_inside_a_draft(reference_model: Model) -> None:
    """Drafted tokens after it belong to no reply, and are not counted either."""
    options: dict[str, Any] = {
        "temperature": 0.0,
        "drafter": "mtp",
        "num_assistant_tokens": 7,
        "num_assistant_tokens_schedule": "constant",
    }
    whole = reference_model.generate(PROMPT, max_new_tokens=60, **options).text
    for stop in {whole[9:11], whole[20:24], whole[-3:]}:
        reply = reference_model.generate(PROMPT, max_new_tokens=60, stop=(stop,), **options)
        assert reply.text == whole[: whole.index(stop)]
        assert reply.finish_reason == "stop"
        plain = reference_model.generate(PROMPT, max_new_tokens=60, stop=(stop,), temperature=0.0, drafter="none")
        assert reply.stats.new_tokens == plain.stats.new_tokens


def test_a_known_beginning_is_not_computed_again(reference_model: Model) -> None:
    reference_model.forget()
    prompt = reference_model.encode(PROMPT)
    first = reference_model.generate(PROMPT, max_new_tokens=20, temperature=0.0)
    continued = [*prompt, *first.token_ids, 300, 301]
    warm = reference_model.generate(continued, max_new_tokens=20, temperature=0.0)
    assert warm.stats.cached_tokens == len(prompt) + len(first.token_ids) - 1
    reference_model.forget()
    cold = reference_model.generate(continued, max_new_tokens=20, temperature=0.0)
    assert cold.stats.cached_tokens == 0
    assert warm.token_ids == cold.token_ids


def test_a_long_chat_without_its_thoughts_computes_new_tokens_only(
    reference_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six turns with replies of 600 tokens, of which the next prompt has the last 40: a template drops thoughts."""
    rng, rows, forward = np.random.default_rng(0), [], reference_model.engine.forward

    def counting(batch: Sequence[Rows]) -> list[Outputs]:
        found = forward(batch)
        rows.append(sum(len(each.tree) for each in batch) + sum(len(each.chosen) for each in found))
        return found

    monkeypatch.setattr(reference_model.engine, "forward", counting)
    reference_model.forget()
    prompt = rng.integers(300, 1000, 50).tolist()
    endless: GenerationKeywords = {
        "max_new_tokens": 600,
        "temperature": 1.0,
        "drafter": "none",
        "ignore_eos": True,
    }
    for turn in range(6):
        new = 40 + 30 if turn else len(prompt)
        rows.clear()
        options: GenerationKeywords = {**endless, "seed": turn}
        reply = reference_model.generate(prompt, **options)
        assert len(reply.token_ids) == 600
        cached = reply.stats.cached_tokens
        assert cached >= len(prompt) - new  # more where a reply happens to begin like its last 40 tokens
        assert sum(rows) == len(prompt) - cached + 599
        prompt = [*prompt, *reply.token_ids[-40:], *rng.integers(300, 1000, 30).tolist()]
    warm = reference_model.generate(prompt, max_new_tokens=20, temperature=0.0)
    reference_model.forget()
    assert reference_model.generate(prompt, max_new_tokens=20, temperature=0.0).token_ids == warm.token_ids


def test_a_reply_that_ignores_its_end_has_all_its_tokens(reference_model: Model) -> None:
    """Also where the end is the likeliest token, and with drafts."""
    ends = reference_model.manifest.eos_token_ids
    options: GenerationKeywords = {"max_new_tokens": 40, "temperature": 0.0, "logit_bias": dict.fromkeys(ends, 1e4)}
    ended = reference_model.generate(PROMPT, **options)
    assert (len(ended.token_ids), ended.finish_reason) == (1, "stop")
    options["ignore_eos"] = True
    for drafter in ("none", "auto"):
        options["drafter"] = drafter
        reply = reference_model.generate(PROMPT, **options)
        assert (len(reply.token_ids), reply.finish_reason) == (40, "length")
        assert not set(ends).intersection(reply.token_ids)


@pytest.mark.parametrize("scored", [False, True])
def test_a_prefill_tells_how_far_it_is(reference_model: Model, scored: bool) -> None:
    told: list[tuple[int, int]] = []
    reference_model.forget()
    options: GenerationKeywords = {"max_new_tokens": 1, "prompt_logprobs": scored}
    options["on_prefill"] = lambda *progress: told.append(progress)
    list(reference_model.stream([5] * 600, **options))
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == (600, 600)


def test_cancel_from_another_thread(reference_model: Model) -> None:
    stream = reference_model.stream(PROMPT, max_new_tokens=1500, temperature=0)
    next(stream)
    other = threading.Thread(target=reference_model.cancel)
    other.start()
    other.join()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert reference_model.generate(PROMPT, max_new_tokens=3, temperature=0).finish_reason == "length"


def test_generations_at_the_same_time(reference_model: Model) -> None:
    """From several threads, drafted and plain, greedy and seeded: each says what it says alone."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "drafter": "mtp"},
        {"temperature": 0.0, "drafter": "none"},
        {"temperature": 0.8, "seed": 7},
    ]
    prompts = [PROMPT, "class Stack:", "import os\nimport sys", "def is_prime(n):"]
    jobs = list(zip(prompts, options, strict=True))
    alone = [reference_model.generate(prompt, max_new_tokens=60, **each).token_ids for prompt, each in jobs]
    together: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        prompt, each = jobs[number]
        together[number] = reference_model.generate(prompt, max_new_tokens=60, **each).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(4)] == alone


def test_two_models_generate_side_by_side(reference_bundle: Path, reference_model: Model) -> None:
    """One per thread, as in a desktop application: neither disturbs the other."""
    wanted = reference_model.generate(PROMPT, max_new_tokens=30, temperature=0.0).token_ids
    options: dict[str, Any] = {"engine": reference_model.engine.name, "threads": 1}  # engines part at near-ties
    found: list[tuple[int, ...]] = []

    def work() -> None:
        with ondevice.load(reference_bundle, **options) as model:
            found.append(model.generate(PROMPT, max_new_tokens=30, temperature=0.0).token_ids)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted, wanted]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 5}, "unknown option 'max_tokens'"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": np.zeros(3)}, "temperature must be a number, not array"),
        ({"temperature": 1, "top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"drafter": "eagle"}, "drafter must be one of"),
        ({"num_assistant_tokens_schedule": "often"}, "num_assistant_tokens_schedule"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"drafter": "none", "num_assistant_tokens": 3}, "leave one of them out"),
        ({"stop": ("",)}, "stop string"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_options_that_make_no_sense(reference_model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reference_model.stream(PROMPT, **options)
    assert reference_model.generate(PROMPT, max_new_tokens=1, temperature=0).finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}], [2, 999_999], [-1], [2, "x"], 7, b"text"])
def test_prompts_that_cannot_be_run(reference_model: Model, prompt: Any) -> None:
    with pytest.raises(PromptError):
        reference_model.stream(prompt)


@pytest.mark.parametrize("seed", [1, 2])
def test_top_p_0_is_greedy(reference_model: Model, seed: int) -> None:
    greedy = reference_model.generate([5, 6, 7], max_new_tokens=12, temperature=0.0)
    sampled = reference_model.generate([5, 6, 7], max_new_tokens=12, temperature=0.7, top_p=0, top_k=0, seed=seed)
    assert sampled.token_ids == greedy.token_ids


def test_a_prompt_longer_than_the_context_names_both_numbers(reference_model: Model) -> None:
    context = reference_model.context_length
    with pytest.raises(
        ContextOverflowError, match=rf"^prompt is too long: {context + 1} tokens > {context - 1} maximum"
    ):
        reference_model.stream([5] * (context + 1))


def test_a_smaller_context_can_be_asked_for(reference_bundle: Path) -> None:
    with ondevice.load(reference_bundle, context_length=24) as model:
        reply = model.generate([2] + [300] * 19, max_new_tokens=100, temperature=0.0)
        assert reply.finish_reason in ("context", "stop")
        assert len(reply.token_ids) <= 5
    with pytest.raises(UsageError, match="context"):
        ondevice.load(reference_bundle, context_length=10**6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache": "int4"}, "one of fp16, int8, not 'int4'"),
        ({"kv_cache": "int8", "engine": "ort"}, "the ort engine has no int8 KV cache: use --engine simd or"),
        ({"attention": "all"}, "one of exact, lookup, lookup-drafts, nomad, not 'all'"),
        ({"attention": "lookup", "engine": "ort"}, "the ort engine has no lookup attention: use --engine simd or"),
        ({"attention_keys": 33}, "a multiple of 32, or None, not 33"),
        ({"attention_width": 3}, "one of 1, 2, 4, not 3"),
    ],
)
def test_a_cache_or_attention_that_does_not_exist(reference_bundle: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ondevice.load(reference_bundle, **options)


@pytest.mark.needs("onnxruntime")
def test_an_int8_cache_is_not_given_up_in_silence(reference_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedGraphError("a gate of silver")

    monkeypatch.setattr("ondevice.engines.simd.engine.SimdEngine.__init__", refuse)
    with pytest.raises(UsageError, match=r"\(a gate of silver\): use --kv-cache fp16"):
        ondevice.load(reference_bundle, kv_cache="int8")
    with ondevice.load(reference_bundle) as model:
        assert model.engine.name == "ort"


def test_a_bundle_without_a_tokenizer_takes_token_ids(reference_bundle: Path, tmp_path: Path) -> None:
    bare = without(
        reference_bundle, tmp_path / "bare", "tokenizer.json", "chat_template.jinja", "generation_config.json"
    )
    with ondevice.load(bare) as model:
        reply = model.generate([2, 300, 301], max_new_tokens=5)
        assert len(reply.token_ids) == 5
        assert reply.text == ""
        asked: list[tuple[Any, GenerationKeywords]] = [("text", {}), ([2], {"stop": "x"})]
        for prompt, options in asked:
            with pytest.raises((UsageError, PromptError), match="tokenizer"):
                model.stream(prompt, **options)


def test_a_bundle_without_a_drafter_falls_back_to_ngrams(reference_bundle: Path, tmp_path: Path) -> None:
    lone = without(reference_bundle, tmp_path / "lone", "drafter.onnx", "drafter.onnx.data")
    data = json.loads((lone / MANIFEST).read_text())
    tensors = {graph: table for graph, table in data["tensors"].items() if graph != "drafter.onnx"}
    (lone / MANIFEST).write_text(json.dumps({**data, "drafter": None, "tensors": tensors}))
    with ondevice.load(lone) as model:
        assert model.generate(PROMPT, max_new_tokens=5).stats.drafter.startswith("ngram")
        with pytest.raises(UsageError, match="no MTP drafter"):
            model.stream(PROMPT, drafter="mtp")


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize("damage", [b"", b"not a graph"])
def test_a_graph_that_is_none(reference_bundle: Path, tmp_path: Path, damage: bytes) -> None:
    broken = without(reference_bundle, tmp_path / "broken")
    graph = broken / "target.onnx"
    size = graph.stat().st_size
    graph.write_bytes(damage.ljust(size, b"\0"))
    with pytest.raises(BundleCorruptError, match="export the bundle again") as caught:
        ondevice.load(broken, engine="ort")
    assert "\n" not in str(caught.value)
    with ondevice.load(broken) as model:  # reads no ONNX
        assert model.engine.name == "simd"


@pytest.mark.needs("onnxruntime")
def test_more_threads_than_processors(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ondevice.machine.processors", lambda: 1)
    ondevice.load(reference_bundle, threads=1, engine="ort").close()
    assert not caplog.records
    ondevice.load(reference_bundle, threads=2, engine="ort").close()
    assert "more threads (2) than processors (1)" in caplog.records[-1].getMessage()


def test_a_closed_model_says_so(reference_bundle: Path) -> None:
    with ondevice.load(reference_bundle) as model:
        pass
    with pytest.raises(UsageError, match="closed"):
        model.stream(PROMPT)


def test_weights_that_are_larger_than_the_memory_are_said_and_run(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ondevice.machine.total_bytes", lambda root: 1_000_000)
    with ondevice.load(reference_bundle, threads=1) as model:
        assert model.generate("x", max_new_tokens=2).token_ids
    assert [record for record in caplog.records if "GB of memory" in record.getMessage()]


def test_a_model_that_nobody_closed_leaves_no_threads(reference_bundle: Path) -> None:
    before = set(threading.enumerate())
    model = ondevice.load(reference_bundle, threads=2)
    model.generate(PROMPT, max_new_tokens=2)
    own = set(threading.enumerate()) - before
    assert len(own) == 1
    del model
    gc.collect()
    for thread in own:
        thread.join(timeout=300)
        assert not thread.is_alive()


def test_a_load_that_fails_leaves_no_threads(reference_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the error is kept, and with it the frames of the call."""

    def fail(path: Path | None, vocab_size: int) -> GenerationDefaults:
        raise BundleCorruptError("generation_config.json makes no sense")

    monkeypatch.setattr(GenerationDefaults, "read", fail)
    before = set(threading.enumerate())
    with pytest.raises(BundleCorruptError, match="makes no sense") as caught:
        ondevice.load(reference_bundle, threads=2, engine="simd")
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert caught.tb


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_closed_while_it_generates_ends_that_first(reference_bundle: Path, engine: EngineName) -> None:
    model = ondevice.load(reference_bundle, engine=engine)
    steps = model.stream(PROMPT, max_new_tokens=50, temperature=0)
    next(steps)
    model.close()
    assert [step.finish_reason for step in steps] == ["cancelled"]
    with pytest.raises(UsageError, match="this model is closed"):
        model.forget()
    model.close()
    with pytest.raises(UsageError, match="this engine is closed"):
        model.engine.open_session()


def test_more_positions_than_the_context_has_take_no_memory(reference_bundle: Path) -> None:
    options: Any = {"attention": "lookup", "threads": 1, "context_length": 4096}
    with (
        ondevice.load(reference_bundle, attention_keys=32 * 10**30, **options) as all_of_them,
        ondevice.load(reference_bundle, attention_keys=4096, **options) as as_many,
    ):
        wanted = as_many.generate("def f(", max_new_tokens=4, temperature=0.0).token_ids
        assert all_of_them.generate("def f(", max_new_tokens=4, temperature=0.0).token_ids == wanted


@pytest.mark.parametrize(("options", "words"), [({"engine": "gpu"}, "engine"), ({"threads": 0}, "threads")])
def test_load_refuses_what_does_not_exist(reference_bundle: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ondevice.load(reference_bundle, **options)


def test_a_model_says_what_it_is(reference_bundle):
    with ondevice.load(reference_bundle, threads=1, context_length=256) as model:
        assert repr(model) == "<ondevice.Model reference: int4 weights, simd engine, context of 256>"
    assert repr(model).endswith(", closed>")


def test_pickling_a_model_says_what_to_do(reference_model):
    with pytest.raises(UsageError, match="give the bundle's path to the other process"):
        pickle.dumps(reference_model)


def test_token_ids_may_be_an_array(reference_model):
    options = {"max_new_tokens": 4, "temperature": 0.0}
    ids = [2, 5, 7]
    for kind in (np.int32, np.int64, np.uint16):
        assert (
            reference_model.generate(np.array(ids, kind), **options).text
            == reference_model.generate(ids, **options).text
        )
    with pytest.raises(PromptError, match="one dimension, and integers in it"):
        reference_model.encode(np.array([ids]))
    with pytest.raises(PromptError, match="the prompt is empty"):
        reference_model.encode(np.array([], int))
