"""Forwards of bundles and session files that hold hostile numbers, with all memory between guard bytes.

`python -m tests.simd.hostile_forwards [--each-once] DIRECTORY...` runs what `write_all` wrote to directories, on this
instruction set, and prints what came of it. It fails where a guard byte was written, or a token outside the vocabulary
proposed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import cycle, islice, product
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.protocol import KVCacheType, Rows, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.errors import BundleCorruptError
from ondevice.native import library
from tests.fixtures.guards import Guards
from tests.fixtures.hostile import MIXTURES, Change, hostile_bundle, hostile_session, numbers, patterns

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
    "sinks of 3e38": {"sinks": numbers("3e38", 0.5)},
    "sinks of -3e38": {"sinks": numbers("-3e38")},
    "biases of 3e38": {"bias": numbers("3e38", 0.1)},
    "biases of experts of -3e38": {"up_proj_bias": numbers("-3e38"), "down_proj_bias": numbers("3e38", 0.1)},
    "biases of a router of 3e38": {"router.proj.bias": numbers("3e38", 0.5)},
    "biases of a choice of NaN": {"router.selection_bias": numbers("nan", 0.5)},
    "taps of infinity": {"delta.taps.weight": numbers("inf", 0.1), "conv.conv.weight": numbers("inf", 0.1)},
    "states that grow": {"delta.decay": numbers("3e38", 0.5), "dt_bias": numbers("-3e38", 0.3)},
    "gates of states of NaN": {"delta.b.weight": numbers("nan", 0.1), "delta.a.weight": numbers("3e38", 0.1)},
    "gates of shared experts of NaN": {"mlp.shared_gate": numbers("nan", 0.1)},
    "gates of shared experts of 3e38": {"mlp.shared_gate": numbers("3e38", 0.5)},
    "centroids of 3e38": {"centroids.weight": numbers("3e38", 0.5)},
    "equal centroids": {"centroids.weight": numbers("equal")},
    "a drafter's projections of NaN": {"pre_projection.weight": numbers("nan", 0.1)},
    "a drafter's head of infinities": {"model.embed_tokens.weight": numbers("inf", 0.5)},
    "heads of NaN": {"blocks.weight": numbers("nan", 0.1), "outer.weight": numbers("inf", 0.1)},
}
"""Names of hostile bundles -> their changed tensors. A bundle without such a tensor is left as it is."""

SESSIONS = ("nan", "inf", "-inf", "3e38", "denormal", "equal", *MIXTURES, "random")
"""The contents of rows in hostile session files."""

NO_NUMBERS = ("k_norm of 3e38", "norms of 3e38", "layer scalars of 3e38", "scales of infinity in a table", "nan", "inf")
"""Names of BUNDLES and kinds of SESSIONS with which no logit can be a number, if activations have scales of their own:
those with a static scale are clamped, NaN too."""

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


Run = tuple[KVCacheType, str, str]
"""Type of the cache, kind of attention, and a name of BUNDLES or a kind of SESSIONS."""

EVERY_RUN: list[Run] = list(product(get_args(KVCacheType), LOOKUPS, (*BUNDLES, *SESSIONS)))


def each_once(first: int = 0) -> list[Run]:
    """Every bundle and session once, with all caches and kinds of attention in turn from number `first` on."""
    turns = cycle(product(get_args(KVCacheType), LOOKUPS))
    return [(*turn, name) for turn, name in zip(islice(turns, first, None), (*BUNDLES, *SESSIONS), strict=False)]


def write_all(bundle: Path, directory: Path) -> None:
    """Write to a directory what `run` runs: a link to the bundle, every one of BUNDLES, and session files of the bundle
    with rows of every kind in SESSIONS.
    """
    (directory / "bundle").symlink_to(bundle)
    for name, changes in BUNDLES.items():
        hostile_bundle(bundle, directory / name, changes)
    for cache in get_args(KVCacheType):
        for attention, lookup in LOOKUPS.items():
            engine = SimdEngine(Bundle.open(bundle), 1, kv_cache=cache, lookup=lookup)
            session = engine.open_session()
            _extend(engine, session, PROMPT)
            for kind in SESSIONS:
                path = directory / f"{cache} {attention} {kind}"
                session.save(path)
                hostile_session(path, patterns(kind, "float16" if cache == "fp16" else "float32"))
            engine.close()


def run(directory: Path, cache: KVCacheType, attention: str, name: str) -> str:
    """Load a bundle and run a prefill, or load a session; then run a tree, draft steps and heads.

    Returns:
        "refused" if the bundle is not loaded, else the share of its logits that are numbers, in percent.
    """
    guards, is_session = Guards(), name in SESSIONS
    with guards.around_all(), np.errstate(all="ignore"):
        bundle = Bundle.open(directory / ("bundle" if is_session else name))
        try:
            engine = SimdEngine(bundle, 2, kv_cache=cache, lookup=LOOKUPS[attention])
        except BundleCorruptError:
            return "refused"
        if is_session:
            session = engine.load_session(directory / f"{cache} {attention} {name}")
        else:
            session = engine.open_session()
            _extend(engine, session, PROMPT)
        share = _continued(engine, session)
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
    if engine.drafter is not None:
        step = session.draft_step(7, hidden)
        found.append(step.candidates)
        found.append(session.draft_step(int(step.candidates[step.logits.argmax()]), step.hidden).candidates)
    found += [session.propose(kind, hidden).candidates for kind in engine.heads]
    for candidates in found:
        assert ((candidates >= 0) & (candidates < vocabulary)).all(), "a token outside the vocabulary is proposed"
    _extend(engine, session, [1, 2, 3])
    return f"{100 * np.isfinite(logits).mean():.0f} %"


if __name__ == "__main__":
    once, *directories = sys.argv[1:] if sys.argv[1] == "--each-once" else ["", *sys.argv[1:]]
    found = {
        f"{directory} {' '.join(each)}": run(Path(directory), *each)
        for number, directory in enumerate(directories)
        for each in (each_once(number) if once else EVERY_RUN)
    }
    sys.stdout.write(json.dumps({"set": library.choice().set, "found": found}))
