"""Forwards of bundles and session files that hold hostile numbers, with all memory between guard bytes.

`python -m tests.simd.hostile_forwards DIRECTORY` runs what `write_all` wrote there on this instruction set, and prints
what came of each; it fails where a guard byte was written, or a draft step returned a token outside the vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType, Rows, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.errors import BundleCorruptError
from tests.guards import Guards
from tests.hostile import MIXTURES, Change, hostile_bundle, hostile_session, numbers, patterns

NAN_AMONG, ALL_KINDS = MIXTURES

BUNDLES: dict[str, Mapping[str, Change]] = {
    "k_norm of 3e38": {"k_norm.weight": numbers("3e38")},
    "q_norm of -3e38": {"q_norm.weight": numbers("-3e38")},
    "norms of 3e38": {"norm.weight": numbers("3e38", 0.3)},
    "norms that are denormal": {"norm.weight": numbers("denormal")},
    "norms of zeros": {"layernorm.weight": numbers("zero")},
    "layer scalars of 3e38": {"layer_scalar": numbers("3e38")},
    "scales of NaN in a table": {"embed_tokens.weight": numbers("nan", 0.02)},
    "scales of infinity in a table": {"embed_tokens.weight": numbers("inf")},
    "per-layer scales of NaN": {"embed_tokens_per_layer.weight": numbers("nan", 0.1)},
    "values of infinity": {"v_proj.weight": numbers("inf", 0.1), "down_proj.weight": numbers("-inf", 0.01)},
    "all matrices": {"proj.weight": numbers(ALL_KINDS, 0.1)},
    "equal matrices": {"proj.weight": numbers("equal")},
    "routers of 3e38": {"router.proj.weight": numbers("3e38"), "router.scale": numbers("-3e38", 0.5)},
    "experts of NaN": {"router.proj": numbers("equal"), "experts.gate_up_proj": numbers("nan", 0.1)},
    "expert factors of 3e38": {"per_expert_scale": numbers("3e38")},
    "centroids of 3e38": {"centroids.weight": numbers("3e38", 0.5)},
    "equal centroids": {"centroids.weight": numbers("equal")},
    "a drafter's projections of NaN": {"pre_projection.weight": numbers("nan", 0.1)},
    "a drafter's head of infinities": {"model.embed_tokens.weight": numbers("inf", 0.5)},
    "heads of NaN": {"blocks.weight": numbers("nan", 0.1), "outer.weight": numbers("inf", 0.1)},
}
"""Names of hostile bundles -> their changed tensors. A bundle without such a tensor is left as it is."""

SESSIONS = ("nan", "inf", "-inf", "3e38", "denormal", "equal", *MIXTURES, "random")
"""What the rows of hostile session files hold."""

LOOKUPS = {
    "exact": None,
    "lookup": LookupSettings(keys=32, window=64, learn=64),
    "lookup by share": LookupSettings(least=32, most=96, left=0.3, width=2, window=64, learn=64),
    "nomad": LookupSettings("nomad", width=1, window=64, learn=64),
    "lookup-drafts": LookupSettings("lookup-drafts", keys=32, window=64, learn=64),
}
"""Kinds of attention, which begin to look up after 128 tokens."""

PROMPT = np.random.default_rng(0).integers(0, 384, 200).tolist()
TREE = TokenTree(np.arange(12), np.array([-1, 0, 1, 2, 0, 4, 5, 1, -1, 8, 9, 10]))


def write_all(bundle: Path, directory: Path) -> None:
    """Write every bundle of BUNDLES to `directory/hostile/NAME`, and the bundle's own session files with rows of every
    kind in SESSIONS to `directory/sessions/CACHE ATTENTION KIND`.
    """
    for name, changes in BUNDLES.items():
        hostile_bundle(bundle, directory / "hostile" / name, changes)
    (directory / "sessions").mkdir()
    for cache in get_args(KVCacheType):
        for attention, lookup in LOOKUPS.items():
            engine = SimdEngine(Bundle.open(bundle), 1, kv_cache=cache, lookup=lookup)
            session = engine.open_session()
            _extend(engine, session, PROMPT)
            for kind in SESSIONS:
                path = directory / "sessions" / f"{cache} {attention} {kind}"
                session.save(path)
                hostile_session(path, patterns(kind, "float16" if cache == "fp16" else "float32"))
            engine.close()


def run_bundle(bundle: Path, cache: KVCacheType, attention: str) -> str:
    """Run a prefill, a tree, draft steps and heads of a bundle.

    Returns:
        "refused" if it is not loaded, else the share of its logits that are numbers, in percent.
    """
    guards = Guards()
    with guards.around_all(), np.errstate(all="ignore"):
        try:
            engine = SimdEngine(Bundle.open(bundle), 2, kv_cache=cache, lookup=LOOKUPS[attention])
        except BundleCorruptError:
            return "refused"
        session = engine.open_session()
        _extend(engine, session, PROMPT)
        share = _continued(engine, session)
        engine.close()
    guards.check()
    return share


def run_session(bundle: Path, path: Path, cache: KVCacheType, attention: str) -> str:
    """Continue a session file; the result is that of `run_bundle`."""
    guards = Guards()
    with guards.around_all(), np.errstate(all="ignore"):
        engine = SimdEngine(Bundle.open(bundle), 2, kv_cache=cache, lookup=LOOKUPS[attention])
        share = _continued(engine, engine.load_session(path))
        engine.close()
    guards.check()
    return share


def _extend(engine: SimdEngine, session: SimdSession, ids: list[int]) -> None:
    while ids:
        part = ids[: session.max_rows()]
        engine.forward([Rows(session, TokenTree.chain(part), [len(part) - 1])])
        session.commit(range(len(part)))
        ids = ids[len(part) :]


def _continued(engine: SimdEngine, session: SimdSession) -> str:
    """Run a tree, draft steps and heads after a session's tokens; returns the share of numbers among its logits."""
    (outputs,) = engine.forward([Rows(session, TREE, range(len(TREE)))])
    logits, hidden = outputs.logits.copy(), outputs.hidden[3].copy()
    session.commit([0, 4, 5])  # moves rows of the cache
    vocabulary, found = engine.target.vocab_size, list[np.ndarray]()
    if engine.has_drafter:
        step = session.draft_step(7, hidden)
        found.append(step.candidates)
        found.append(session.draft_step(int(step.candidates[step.logits.argmax()]), step.hidden).candidates)
    found += [session.propose(kind, hidden).candidates for kind in engine.heads]
    for candidates in found:
        assert ((candidates >= 0) & (candidates < vocabulary)).all(), "a token outside the vocabulary is proposed"
    _extend(engine, session, [1, 2, 3])
    return f"{100 * np.isfinite(logits).mean():.0f} %"


def results(bundle: Path, directory: Path) -> Iterator[tuple[str, str]]:
    """Run everything that `write_all` wrote; yields what was run and what came of it."""
    for cache in get_args(KVCacheType):
        for attention in LOOKUPS:
            for name in BUNDLES:
                path = directory / "hostile" / name
                yield f"{cache}, {attention}: {name}", run_bundle(path, cache, attention)
            for kind in SESSIONS:
                path = directory / "sessions" / f"{cache} {attention} {kind}"
                yield f"{cache}, {attention}: a session of {kind}", run_session(bundle, path, cache, attention)


if __name__ == "__main__":
    bundles = [Path(word) for word in sys.argv[1:]]
    sys.stdout.write(json.dumps([dict(results(*bundles[at : at + 2])) for at in range(0, len(bundles), 2)]))
