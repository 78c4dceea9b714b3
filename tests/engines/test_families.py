"""Families other than Gemma 4 on both engines, with int8 weights: rows beside others, drafts, caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import Bundle
from ondevice.engines.protocol import ROOT, Engine, Rows, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from ondevice_export import export
from tests.conftest import ENGINES, MakePair, Once
from tests.fixtures.tiny_families import FAMILIES, VOCAB, WINDOW

RANDOM = np.random.default_rng(7).integers(0, VOCAB, 60).tolist()
PROMPT = [*RANDOM, *RANDOM[:30]]
"""Past the window, and with a repetition that n-grams find."""


@pytest.fixture(scope="session")
def bundles(make_pair: MakePair, once: Once, kernels: None) -> Path:
    """The directory of a bundle of each family."""

    def export_all(directory: Path) -> None:
        for name in FAMILIES:
            export(make_pair(name) / "target", directory / name, quantize="int8")

    return once("families", export_all)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, bundles: Path, family: str) -> Iterator[Model]:
    with ondevice.load(bundles / family, engine=request.param, threads=1) as loaded:
        yield loaded


def run(session: Any, tokens: list[int], wanted: list[int]) -> np.ndarray:
    [outputs] = session.engine.forward([Rows(session, TokenTree.chain(tokens), wanted)])
    return outputs.logits.copy()


def read(engine: Engine, tokens: list[int]) -> Any:
    """A session with these tokens committed."""
    return read_on(engine.open_session(), tokens)


def read_on(session: Any, tokens: list[int]) -> Any:
    """A session with the rest of these tokens committed."""
    while session.length < len(tokens):
        chunk = tokens[session.length :][: session.max_rows()]
        run(session, chunk, [])
        session.commit(range(len(chunk)))
    return session


@pytest.mark.parametrize("length", [1, WINDOW + 3, len(PROMPT)])
def test_a_row_has_the_same_bits_alone_and_among_others(model: Model, length: int) -> None:
    session = read(model.engine, PROMPT[:length])
    alone = run(session, [5], [0])
    among = run(session, [5, 7, 9, 11], [0, 1, 2, 3])
    np.testing.assert_array_equal(alone[0], among[0])


def branch(session: Any) -> np.ndarray:
    """The logits after 5 and 9, where 7 is a pending row beside the latter."""
    tree = TokenTree(np.array([5, 7, 9]), np.array([ROOT, 0, 0]))
    [outputs] = session.engine.forward([Rows(session, tree, [2])])
    return outputs.logits.copy()


def test_sequences_of_one_forward_change_no_bit_of_each_other(model: Model) -> None:
    engine = model.engine
    sessions = [read(engine, PROMPT[:length]) for length in (3, 25, 60)]
    apart = [run(session, [5, 7], [1]) for session in sessions]
    together = engine.forward([Rows(session, TokenTree.chain([5, 7]), [1]) for session in sessions])
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_array_equal(one, other.logits)


@pytest.mark.parametrize("drafter", ["ngram", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(model: Model, drafter: str, temperature: float) -> None:
    """With two tokens to choose from, some drafts are right, which those of random models otherwise never are."""
    few = dict.fromkeys(PROMPT[:2], 90.0)
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 3, "logit_bias": few}
    plain = model.generate(PROMPT, drafter="none", **options)
    drafted = model.generate(
        PROMPT, drafter=drafter, num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **options
    )
    assert drafted.token_ids == plain.token_ids
    assert drafter == "auto" or drafted.stats.num_accepted_tokens > 0


def test_a_rewound_session_goes_on_as_a_new_one(model: Model) -> None:
    """States have no rows to drop: they go back to a snapshot alone."""
    session = read(model.engine, PROMPT[:70])
    if model.engine.target.states:
        session.snapshot()
    read_on(session, PROMPT)
    expected = run(read(model.engine, PROMPT[:70]), PROMPT[70:75], [4])
    assert session.rewind(70) == 70
    np.testing.assert_array_equal(run(session, PROMPT[70:75], [4]), expected)
    fork = session.fork(70)
    np.testing.assert_array_equal(run(fork, PROMPT[70:75], [4]), expected)


@pytest.mark.needs("onnxruntime")
def test_the_engines_agree_up_to_rounding(bundles: Path, family: str) -> None:
    """Both quantise activations, each in its own way: 3 to 7 % of the logits' size here."""
    found = []
    for name in ("simd", "ort"):
        with ondevice.load(bundles / family, engine=name, threads=1) as loaded:
            found.append(run(loaded.engine.open_session(), PROMPT, list(range(len(PROMPT)))))
    error = np.sqrt(((found[0] - found[1]) ** 2).mean()) / np.sqrt((found[1] ** 2).mean())
    assert error < 0.12


@pytest.mark.parametrize("setting", ["int8", "lookup"])
def test_other_caches_and_attention_keep_the_promise(bundles: Path, family: str, setting: str) -> None:
    bundle = Bundle.open(bundles / family)
    lookup = LookupSettings(keys=32, window=32, learn=32) if setting == "lookup" else None
    engine = SimdEngine(bundle, threads=2, kv_cache="int8" if setting == "int8" else "fp16", lookup=lookup)
    session = read(engine, PROMPT)
    alone = run(session, [5], [0])
    np.testing.assert_array_equal(alone[0], run(session, [5, 7, 9], [0, 1, 2])[0])
    np.testing.assert_array_equal(branch(session), run(session, [5, 9], [1]))
    exact = SimdEngine(bundle, threads=1)
    expected = run(read(exact, PROMPT), [5], [0])
    assert np.sqrt(((alone - expected) ** 2).mean()) < 0.3 * np.sqrt((expected**2).mean())
    engine.close()
    exact.close()
