"""`Model` as an application meets it."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import MANIFEST
from ondevice.engines.choice import EngineName
from ondevice.engines.simd.unsupported import UnsupportedGraphError
from ondevice.errors import BundleCorruptError, ContextOverflowError, PromptError, UsageError

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
    assert stats.drafted_at[0] + stats.rounds_without_draft == stats.target_forwards
    assert sum(stats.accepted_at) == stats.accepted <= stats.drafted == sum(stats.drafted_at)


def test_a_stop_string_ends_the_text_inside_a_draft(reference_model: Model) -> None:
    options = {
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


def test_a_known_beginning_is_not_computed_again(reference_model: Model) -> None:
    first = reference_model.generate(PROMPT, max_new_tokens=20, temperature=0.0)
    continued = [*reference_model.encode(PROMPT), *first.token_ids, 300, 301]
    cold_start = reference_model.engine.length
    reference_model.engine.rewind(0)
    cold = reference_model.generate(continued, max_new_tokens=20, temperature=0.0)
    reference_model.generate(PROMPT, max_new_tokens=20, temperature=0.0)
    assert reference_model.engine.length == cold_start
    warm = reference_model.generate(continued, max_new_tokens=20, temperature=0.0)
    assert warm.token_ids == cold.token_ids


def test_a_prefill_tells_how_far_it_is(reference_model: Model) -> None:
    told: list[tuple[int, int]] = []
    reference_model.forget()
    list(reference_model.stream([5] * 600, max_new_tokens=1, on_prefill=lambda *progress: told.append(progress)))
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == (600, 600)


def test_cancel_from_another_thread(reference_model: Model) -> None:
    stream = reference_model.stream(PROMPT, max_new_tokens=1500)
    next(stream)
    threading.Thread(target=reference_model.cancel).start()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert reference_model.generate(PROMPT, max_new_tokens=3).finish_reason == "length"


def test_one_generation_at_a_time(reference_model: Model) -> None:
    stream = reference_model.stream(PROMPT)
    with pytest.raises(UsageError, match="already"):
        reference_model.stream(PROMPT)
    del stream  # never started, and still the model is free again
    next(reference_model.stream(PROMPT))
    assert reference_model.generate(PROMPT, max_new_tokens=2).text is not None


def test_two_models_generate_side_by_side(reference_bundle: Path, reference_model: Model) -> None:
    """One per thread, as in a desktop application: neither disturbs the other."""
    wanted = reference_model.generate(PROMPT, max_new_tokens=30, temperature=0.0).token_ids
    found: list[tuple[int, ...]] = []

    def work() -> None:
        with ondevice.load(reference_bundle, threads=1) as model:
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
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": 1, "top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"drafter": "eagle"}, "drafter must be one of"),
        ({"num_assistant_tokens_schedule": "often"}, "num_assistant_tokens_schedule"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"drafter": "none", "num_assistant_tokens": 3}, "leave one of them out"),
        ({"stop": ("",)}, "stop string"),
    ],
)
def test_options_that_make_no_sense(reference_model: Model, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reference_model.stream(PROMPT, **options)
    assert reference_model.generate(PROMPT, max_new_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}], [2, 999_999], [-1], [2, "x"], 7, b"text"])
def test_prompts_that_cannot_be_run(reference_model: Model, prompt: object) -> None:
    with pytest.raises(PromptError):
        reference_model.stream(prompt)


def test_a_prompt_longer_than_the_context_names_both_numbers(reference_model: Model) -> None:
    with pytest.raises(ContextOverflowError, match=r"2500 tokens.* 2048"):
        reference_model.stream([5] * 2500)


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
    ],
)
def test_a_cache_that_does_not_exist(reference_bundle: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ondevice.load(reference_bundle, **options)


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
        for prompt, options in (("text", {}), ([2], {"stop": "x"})):
            with pytest.raises((UsageError, PromptError), match="tokenizer"):
                model.stream(prompt, **options)


def test_a_bundle_without_a_drafter_falls_back_to_ngrams(reference_bundle: Path, tmp_path: Path) -> None:
    lone = without(reference_bundle, tmp_path / "lone", "drafter.onnx", "drafter.onnx.data")
    data = json.loads((lone / MANIFEST).read_text())
    (lone / MANIFEST).write_text(json.dumps({**data, "drafter": None}))
    with ondevice.load(lone) as model:
        assert model.generate(PROMPT, max_new_tokens=5).stats.drafter == "ngram"
        with pytest.raises(UsageError, match="no MTP drafter"):
            model.stream(PROMPT, drafter="mtp")


@pytest.mark.parametrize("damage", [b"", b"not a graph"])
def test_a_graph_that_is_none(reference_bundle: Path, tmp_path: Path, damage: bytes) -> None:
    broken = without(reference_bundle, tmp_path / "broken")
    graph = broken / "target.onnx"
    size = graph.stat().st_size
    graph.write_bytes(damage.ljust(size, b"\0"))
    for engine in ("auto", "ort"):
        with pytest.raises(BundleCorruptError, match="export the bundle again") as caught:
            ondevice.load(broken, engine=engine)
        assert "\n" not in str(caught.value)


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


def test_a_model_that_nobody_closed_leaves_no_threads(reference_bundle: Path) -> None:
    before = set(threading.enumerate())
    model = ondevice.load(reference_bundle, threads=2)
    model.generate(PROMPT, max_new_tokens=2)
    own = set(threading.enumerate()) - before
    assert len(own) == 1
    del model
    gc.collect()
    for thread in own:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.parametrize("engine", ["simd", "ort"])
def test_a_model_closed_while_it_generates_ends_that_first(reference_bundle: Path, engine: EngineName) -> None:
    model = ondevice.load(reference_bundle, engine=engine)
    steps = model.stream(PROMPT, max_new_tokens=50)
    next(steps)
    model.close()
    assert [step.finish_reason for step in steps] == ["cancelled"]
    with pytest.raises(UsageError, match="this model is closed"):
        model.forget()
    model.close()
    assert not vars(model.engine)


@pytest.mark.parametrize(("options", "words"), [({"engine": "gpu"}, "engine"), ({"threads": 0}, "threads")])
def test_load_refuses_what_does_not_exist(reference_bundle: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ondevice.load(reference_bundle, **options)
