"""The whole engine, compared with ONNX Runtime and run in the drafting loop."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest

from ondevice import Model
from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import AS_TRAINED
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import AttentionType, KVCacheType, Outputs, Rows, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.kernels.contract.steps import Gated, Project, from_row
from ondevice.engines.simd.plan import builder as plan_builder
from ondevice.errors import UsageError
from tests.fixtures.tiny_models import CONTEXT, VOCAB

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()


@pytest.fixture
def oracle(bundle: Bundle, tmp_path: Path) -> Iterator[OrtEngine]:
    """The same weights with float32 activations, which both engines approximate with int8 activations."""
    copy = Path(shutil.copytree(bundle.path, tmp_path / "bundle"))
    for name in ("target.onnx", "drafter.onnx"):
        graph = onnx.load(copy / name, load_external_data=False)
        for node in graph.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 1
        onnx.save(graph, copy / name)
    manifest = json.loads((copy / "bundle.json").read_text("utf-8"))
    for name in ("target.onnx", "drafter.onnx"):
        manifest["files"][name]["size"] = (copy / name).stat().st_size
    (copy / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    engine = OrtEngine(Bundle.open(copy), threads=1)
    yield engine
    engine.close()


def forward(session: Any, tokens: list[int], wanted: Sequence[int]) -> Outputs:
    return session.engine.forward([Rows(session, TokenTree.chain(tokens), wanted)])[0]


def logits_of(session: Any) -> np.ndarray:
    """Logits of the prompt's second half, with the first half in the cache."""
    forward(session, PROMPT[:50], [49])
    session.commit(range(50))
    return forward(session, PROMPT[50:], range(50)).logits.copy()


def test_logits_are_as_close_to_the_oracle_as_int8_activations_allow(
    bundle: Bundle, engine: SimdEngine, oracle: OrtEngine
) -> None:
    found, expected = logits_of(engine.open_session()), logits_of(oracle.open_session())
    error = np.sqrt(((found - expected) ** 2).mean()) / np.sqrt((expected**2).mean())
    # fp16 keys round some static activations to another step, which changes their value
    most = 0.25 if bundle.manifest.quantization.weights == AS_TRAINED else 0.08
    assert error < most, "ONNX Runtime's own int8 activations are at 0.04"
    if bundle.manifest.quantization.weights == AS_TRAINED:
        return  # `tests/export/checkpoint/test_trained.py` compares these up to float rounding
    margin = np.sort(expected, axis=1)[:, -1] - np.sort(expected, axis=1)[:, -2]
    clear = margin > 0.4
    assert clear.any()
    np.testing.assert_array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


def test_an_int8_cache_changes_little(bundle: Bundle) -> None:
    found = []
    for kind in get_args(KVCacheType):
        engine = SimdEngine(bundle, threads=1, kv_cache=kind)
        found.append(logits_of(engine.open_session()))
        engine.close()
    error = np.sqrt(((found[1] - found[0]) ** 2).mean()) / np.sqrt((found[0] ** 2).mean())
    most = 0.25 if bundle.manifest.quantization.weights == AS_TRAINED else 0.1
    assert 0 < error < most, "what int8 activations add differs by 0.06 after any change of their input"


def test_a_draft_step_is_close_too(engine: SimdEngine, oracle: OrtEngine) -> None:
    hidden = np.random.default_rng(1).standard_normal(engine.target.hidden_size).astype(np.float32)
    steps = []
    for each in (engine.open_session(), oracle.open_session()):
        forward(each, PROMPT, [0])
        each.commit(range(len(PROMPT)))
        steps.append(each.draft_step(5, hidden))
    ours, theirs = steps
    size = np.sqrt((theirs.hidden**2).mean())
    assert np.sqrt(((ours.hidden - theirs.hidden) ** 2).mean()) < 0.15 * size
    scored = dict(zip(theirs.candidates.tolist(), theirs.logits.tolist(), strict=True))
    both = [(logit, scored[token]) for token, logit in zip(ours.candidates.tolist(), ours.logits.tolist(), strict=True)
            if token in scored]  # fmt: skip
    assert len(both) > 0.8 * len(scored)
    differences = np.array([a - b for a, b in both])
    assert np.sqrt((differences**2).mean()) < 0.15 * np.std(theirs.logits) + 0.02


def test_speculation_changes_nothing(bundle: Bundle) -> None:
    """All drafters but Medusa and blockwise, which `test_heads_drafting.py` tests."""
    with Model(bundle, SimdEngine(bundle, threads=1), threads=1) as model:
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
        prompt = PROMPT[:30] * 3
        plain = model.generate(prompt, drafter="none", **options)
        options["num_assistant_tokens_schedule"] = "constant"
        for drafter, k in (("mtp", 5), ("ngram", 1), ("auto", 5), ("mtp", 1)):
            model.forget()
            drafted = model.generate(prompt, drafter=drafter, num_assistant_tokens=k, **options)
            assert drafted.token_ids == plain.token_ids


def test_a_rewind_past_the_window_starts_over(session: SimdSession) -> None:
    for start in range(0, 200, 50):
        forward(session, PROMPT[:50], [0])
        session.commit(range(50))
        assert session.length == start + 50
    assert session.rewind(120) == 120
    assert session.rewind(0) == 0


def test_a_chunk_of_a_prompt_may_want_nothing(session: SimdSession) -> None:
    expected = logits_of(session)
    session.rewind(0)
    outputs = forward(session, PROMPT[:50], [])
    assert (outputs.logits.shape, outputs.hidden.shape) == ((0, VOCAB), (0, session.engine.target.hidden_size))
    session.commit(range(50))
    found = forward(session, PROMPT[50:], range(50)).logits
    np.testing.assert_array_equal(found, expected)


def test_the_context_fills_up(bundle: Bundle) -> None:
    engine = SimdEngine(bundle, threads=1, context_length=20)
    session = engine.open_session()
    assert session.max_rows() == 20
    forward(session, PROMPT[:18], [17])
    session.commit(range(18))
    assert session.max_rows() == 2
    with pytest.raises(ValueError, match="do not fit"):
        forward(session, [1, 2, 3], [0])
    engine.close()


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [([VOCAB], [0]), ([-1], [0]), ([1], [1]), ([1], [-1]), ([1], [0] * 600)],
)
def test_nothing_out_of_range_reaches_a_kernel(session: SimdSession, tokens: list[int], wanted: list[int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        forward(session, tokens, wanted)


def test_a_draft_of_an_unknown_token(session: SimdSession) -> None:
    with pytest.raises(ValueError, match="token ids"):
        session.draft_step(VOCAB, np.zeros(session.engine.target.hidden_size, np.float32))


def test_a_closed_session_keeps_no_memory(session: SimdSession) -> None:
    """Whoever still has it: an idle drafter has the session of its last generation."""
    logits_of(session)
    held = [weakref.ref(buffer) for cache in session._caches.values() for buffer in cache._buffers.values()]
    assert held
    session.close()
    gc.collect()
    assert not any(buffer() is not None for buffer in held)


@pytest.mark.parametrize("context", [0, 1, CONTEXT + 1])
def test_an_impossible_context(bundle: Bundle, context: int) -> None:
    with pytest.raises(UsageError, match="context"):
        SimdEngine(bundle, threads=1, context_length=context)


@pytest.mark.parametrize("mode", ["lookup", "nomad"])
def test_lookups_by_more_heads_of_a_kv_head_than_are_computed_together(
    tiny: Path, mode: AttentionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 72 query heads and one KV head, kernels wrote beyond their working memory."""
    monkeypatch.setattr("ondevice.engines.simd.plan.layer.MAX_PAIRS", 1)
    with pytest.raises(UsageError, match=r"takes 1 heads of a KV head, not \d+: use --attention exact"):
        SimdEngine(Bundle.open(tiny), 1, lookup=LookupSettings(mode))


def is_streamed(engine: SimdEngine) -> set[bool]:
    """Whether the matrices of a forward and of a draft step are streamed."""
    assert engine._program.drafter is not None
    plans = engine._program.plan(), engine._program.drafter.plan
    steps = (from_row(row) for plan in plans for form in (plan.steps, plan.exact) for row in form)
    return {bool(step.matrix.streamed) for step in steps if isinstance(step, Project | Gated)}


@pytest.mark.parametrize(
    ("cached", "features", "expected"),
    [(1, {"sse4a", "avx2"}, True), (1, {"avx2"}, False), (1 << 26, {"sse4a", "avx2"}, False)],
)
def test_weights_beyond_the_caches_are_streamed_on_amd(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, cached: int, features: set[str], expected: bool
) -> None:
    logits = logits_of(SimdEngine(bundle, 1).open_session())
    monkeypatch.setattr(plan_builder, "CACHED", cached)
    monkeypatch.setattr(plan_builder, "native_features", lambda: frozenset(features))
    engine = SimdEngine(bundle, 1)
    assert is_streamed(engine) == {expected}
    np.testing.assert_array_equal(logits_of(engine.open_session()), logits)


def test_the_weights_of_a_plan_are_counted(bundle: Bundle) -> None:
    engine = SimdEngine(bundle, 1)
    program = engine._program
    steps = [from_row(row) for row in program.plan().steps]
    packed = {id(place): place for place in program.models.layout.places.values()}.values()
    most = sum(place.tiles * place.tile_bytes for place in packed)
    assert 0 < plan_builder.weight_bytes(steps) <= most
