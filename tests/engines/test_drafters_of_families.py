"""MTP drafters for targets other than Gemma 4 on both engines: no token changes, whatever the caches hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import Model
from ondevice.bundle import MANIFEST, Bundle
from ondevice.cli.main import main
from ondevice.engines.protocol import Rows, Session, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine
from ondevice.errors import BundleCorruptError
from ondevice_export import export
from tests.conftest import ENGINES, MakePair, Once
from tests.fixtures.hostile import KINDS, hostile_bundle, numbers, token_ids
from tests.fixtures.tiny_drafters import DRAFTERS
from tests.fixtures.tiny_families import CONTEXT, VOCAB

TARGETS = (*DRAFTERS, "qwen3.5-mtp", "qwen3.5-moe-mtp")
"""The last two have an MTP layer in their own checkpoint."""
PROMPT = np.random.default_rng(7).integers(0, VOCAB, 70).tolist()
LISTED = ("smollm2", "llama3", "gemma3", "lfm2", "qwen3.5-mtp", "qwen3.5-moe-mtp")
"""Targets whose drafters score rows of the target's head, of the last three with all tokens."""


@pytest.fixture(scope="session")
def bundles(make_pair: MakePair, once: Once, kernels: None) -> Path:
    """The directory of a bundle of each target with its drafter."""

    def export_all(directory: Path) -> None:
        for name in TARGETS:
            pair = make_pair(name)
            drafter = str(pair / "mtp") if name in DRAFTERS else "auto"
            export(pair / "target", directory / name, quantize="int8", drafter=drafter)

    return once("drafters-of-families", export_all)


@pytest.fixture(scope="module", params=TARGETS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, bundles: Path, family: str) -> Iterator[Model]:
    with ondevice.load(bundles / family, engine=request.param, threads=1, max_sequences=3) as loaded:
        yield loaded


def options(model: Model, temperature: float, seed: int = 3) -> dict[str, Any]:
    """With two tokens to choose from, which the drafter can score, some drafts are right, which those of random models
    otherwise never are.
    """
    session = read(model.engine.open_session(), PROMPT[:3])
    scored = session.draft_step(5, np.ones(model.engine.target.hidden_size, np.float32)).candidates
    bias = dict.fromkeys(scored[:2].tolist(), 90.0)
    session.close()
    return {"max_new_tokens": 30, "temperature": temperature, "seed": seed, "logit_bias": bias}


def read(session: Session, tokens: list[int]) -> Session:
    """The session with these tokens committed."""
    while session.length < len(tokens):
        chunk = tokens[session.length :][: session.max_rows()]
        session.engine.forward([Rows(session, TokenTree.chain(chunk), [])])  # type: ignore[attr-defined]
        session.commit(range(len(chunk)))
    return session


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(model: Model, temperature: float) -> None:
    own = options(model, temperature)
    plain = model.generate(PROMPT, drafter="none", **own)
    drafted = model.generate(
        PROMPT, drafter="mtp", num_assistant_tokens=5, num_assistant_tokens_schedule="constant", **own
    )
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.num_accepted_tokens < drafted.stats.num_draft_tokens
    automatic = model.generate(PROMPT, drafter="auto", **own)
    assert automatic.token_ids == plain.token_ids


def test_drafts_of_sequences_in_one_batch_change_no_token(model: Model) -> None:
    prompts = [PROMPT[:length] for length in (9, 40, 70)]
    own = [options(model, temperature, seed=seed) for seed, temperature in enumerate((0.0, 1.0, 1.0))]
    plain = [
        model.generate(prompt, drafter="none", **each).token_ids for prompt, each in zip(prompts, own, strict=True)
    ]

    def drafted(number: int) -> list[int]:
        way: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
        return list(model.generate(prompts[number], drafter="mtp", **way, **own[number]).token_ids)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(drafted, range(3))) == [list(each) for each in plain]


def test_drafts_behind_a_kept_and_a_saved_prompt_change_no_token(model: Model, tmp_path: Path) -> None:
    """Up to the end of the context, after a prompt that the model has read before, here and in a file."""
    long = np.random.default_rng(1).integers(0, VOCAB, CONTEXT - 60).tolist()
    own = options(model, 1.0) | {"max_new_tokens": 100}
    plain = model.generate(long, drafter="none", **own)
    assert (plain.finish_reason, len(plain.token_ids)) == ("context", 61)
    model.forget()
    model.save_prefix(long[:150], tmp_path / "prefix")
    for _ in range(2):  # the second time after the reply that the first one left
        drafted = model.generate(long, drafter="mtp", num_assistant_tokens_schedule="constant", **own)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_accepted_tokens > 0
    model.forget()
    assert model.load_prefix(tmp_path / "prefix") == 150
    assert model.generate(long, drafter="mtp", **own).token_ids == plain.token_ids


def test_a_step_depends_on_the_committed_tokens_alone(model: Model) -> None:
    """After a rewind, in a fork and after rows that were not committed, it has the same bits as in a new session."""
    engine, hidden = model.engine, np.linspace(-1, 1, model.engine.target.hidden_size, dtype=np.float32)

    def step(session: Session) -> list[np.ndarray]:
        found = session.draft_step(11, hidden)
        return [found.candidates.copy(), found.logits.copy(), found.hidden.copy()]

    expected = step(read(engine.open_session(), PROMPT[:50]))
    session = read(engine.open_session(), PROMPT)
    session.rewind(50)
    read(session, PROMPT[:50])  # states go back to snapshots alone
    engine.forward([Rows(session, TokenTree.chain(PROMPT[:6]), [0])])
    for found in (step(session), step(session.fork(50))):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", LISTED)
def test_an_int8_cache_changes_no_token(bundles: Path, name: str) -> None:
    with ondevice.load(bundles / name, engine="simd", threads=2, kv_cache="int8") as model:
        own = options(model, 1.0)
        plain = model.generate(PROMPT, drafter="none", **own)
        drafted = model.generate(PROMPT, drafter="mtp", num_assistant_tokens_schedule="constant", **own)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("setting", ["int8", "lookup"])
def test_a_step_over_other_caches_is_nearly_the_same(bundles: Path, name: str, setting: str) -> None:
    bundle, found = Bundle.open(bundles / name), []
    lookup = LookupSettings(keys=32, window=32, learn=32) if setting == "lookup" else None
    for engine in (
        SimdEngine(bundle, threads=2, kv_cache="int8" if setting == "int8" else "fp16", lookup=lookup),
        SimdEngine(bundle, threads=1),
    ):
        session = read(engine.open_session(), PROMPT)
        found.append(session.draft_step(11, np.ones(engine.target.hidden_size, np.float32)).hidden.copy())
        engine.close()
    assert np.sqrt(((found[0] - found[1]) ** 2).mean()) < 0.1 * np.sqrt((found[1] ** 2).mean())


def _in_mtp(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["target"]["mtp"].update(changes)


def _in_drafter(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["drafter"].update(changes)


def _in_attention(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["drafter"]["layers"][0]["blocks"][0]["body"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_in_mtp(window=4), "no full attention of its own"),
        (_in_mtp(kv_source=3), "norms keys and values that it does not have"),
        (_in_mtp(k_eq_v=True), "values of the MTP layer are not a projection without a bias"),
        (_in_mtp(bias=True), "values of the MTP layer are not a projection without a bias"),
        (_in_mtp(kv_heads=3), "cannot share 3 KV heads"),
        (_in_mtp(kv_heads=2), "layer 0 of the drafter cannot read layer 5's cache"),
        (_in_mtp(rotary=1), "rotary of the MTP layer"),
        (_in_drafter(target_head=False), "a drafter with an MTP layer has another form"),
        (_in_drafter(norm_eps=1e-5), "the hidden size and epsilon"),
        (_in_attention(kv_source=3), "layer 0 of the drafter reads the cache 3"),
        (_in_attention(kv_source=4), "layer 0 of the drafter reads the cache 4"),
        (lambda data: data["target"].update(mtp=None), "layer 0 of the drafter reads the cache 5"),
    ],
)
def test_a_malformed_mtp_layer_is_refused(
    change: Callable[[dict[str, Any]], None], words: str, bundles: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundles / "qwen3.5-mtp", tmp_path / "bundle")
    manifest = tmp_path / "bundle" / MANIFEST
    data = json.loads(manifest.read_text("utf-8")) | {"sha256": None}
    change(data)
    manifest.write_text(json.dumps(data), "utf-8")
    with pytest.raises(BundleCorruptError, match=words):
        Bundle.open(tmp_path / "bundle")


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_numbers_of_an_mtp_layer_change_no_token(kind: str, bundles: Path, tmp_path: Path) -> None:
    names = ("mtp.hidden_norm.weight", "mtp.embedding_norm.weight", "mtp.self_attn.k_norm.weight")
    hostile = hostile_bundle(bundles / "qwen3.5-mtp", tmp_path / "bundle", dict.fromkeys(names, numbers(kind)))
    replies = []
    for path, drafter in ((bundles / "qwen3.5-mtp", "none"), (hostile, "mtp")):
        try:
            with ondevice.load(path, engine="simd", threads=1) as model:
                replies.append(
                    model.generate(PROMPT, max_new_tokens=12, temperature=0.7, seed=2, drafter=drafter).token_ids
                )
        except BundleCorruptError:  # numbers that are not finite
            assert path == hostile
            return
    assert replies[0] == replies[1]


def test_a_depth_that_no_draft_has_is_refused(bundles: Path) -> None:
    with ondevice.load(bundles / "qwen3.5-mtp", engine="simd", threads=1) as model:
        session = read(model.engine.open_session(), PROMPT)
        for depth in (-1, session.max_rows(), 10**30):
            with pytest.raises(ValueError, match="drafted tokens cannot precede another"):
                session.draft_step(5, np.ones(model.engine.target.hidden_size, np.float32), depth)


def test_a_list_that_names_no_tokens_is_refused_by_simd(bundles: Path, tmp_path: Path) -> None:
    bundle = hostile_bundle(bundles / "smollm2", tmp_path / "bundle", {"head_tokens": token_ids(0.05)})
    with pytest.raises(BundleCorruptError, match=r"head_tokens holds numbers outside 0\.\.383"):
        ondevice.load(bundle, engine="simd", threads=1)


@pytest.mark.needs("onnxruntime")
def test_a_list_that_names_no_tokens_changes_no_reply_of_ort(bundles: Path, tmp_path: Path) -> None:
    """Its graph reads the ids: either ONNX Runtime refuses them, or such tokens are left out of drafts."""
    hostile, replies = hostile_bundle(bundles / "smollm2", tmp_path / "bundle", {"head_tokens": token_ids(0.5)}), set()
    for path, drafter in ((bundles / "smollm2", "none"), (hostile, "mtp")):
        try:
            with ondevice.load(path, engine="ort", threads=1) as model:
                replies.add(model.generate(PROMPT, max_new_tokens=12, temperature=0.0, drafter=drafter).token_ids)
        except BundleCorruptError:
            assert path == hostile
    assert len(replies) == 1


def test_info_says_whose_head_it_is(bundles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in (("smollm2", "candidates 100, head target's"), ("qwen2", "candidates 64, head own")):
        assert main(["info", str(bundles / name)]) == 0
        assert f"drafter         kind mtp, {expected}" in capsys.readouterr().out


@pytest.mark.needs("onnxruntime")
def test_the_engines_agree_up_to_rounding(bundles: Path, family: str) -> None:
    found = []
    for name in ("simd", "ort"):
        with ondevice.load(bundles / family, engine=name, threads=1) as loaded:
            session = read(loaded.engine.open_session(), PROMPT)
            hidden = np.linspace(-1, 1, loaded.engine.target.hidden_size, dtype=np.float32)
            step = session.draft_step(11, hidden)
            every = np.zeros(VOCAB, np.float32)
            every[step.candidates] = step.logits
            found.append((every, step.hidden.copy()))
    for one, other in zip(*found, strict=True):
        assert np.sqrt(((one - other) ** 2).mean()) < 0.12 * np.sqrt((other**2).mean())
