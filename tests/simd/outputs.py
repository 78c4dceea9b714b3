"""Prints hashes of bundles' outputs on this instruction set: `python -m tests.simd.outputs BUNDLE...`."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import get_args

import numpy as np

from ondevice.bundle import Bundle
from ondevice.engines.layer_path import LayerPath
from ondevice.engines.protocol import KVCacheType, Rows, TokenTree
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.native import library

LOOKUPS = (
    LookupSettings(keys=32, window=64, learn=64),
    LookupSettings(least=32, most=96, left=0.3, width=2, window=64, learn=64),
    LookupSettings("nomad", width=1, window=64, learn=64),
)


def digest(bundle: Bundle) -> str:
    """A hash of all outputs of a prefill, a tree, a draft step and heads, with every kind of cache and attention."""
    answers = [_answers(bundle, kind, lookup) for kind in get_args(KVCacheType) for lookup in (None, *LOOKUPS)]
    return hashlib.sha256(b"".join(answers)).hexdigest()


def _answers(bundle: Bundle, cache: KVCacheType, lookup: LookupSettings | None) -> bytes:
    engine = SimdEngine(bundle, threads=2, kv_cache=cache, lookup=lookup)
    session = engine.open_session()
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(1 if lookup is None else 4):
        prompt = rng.integers(0, bundle.manifest.target.vocab_size, 60).tolist()
        first = engine.forward([Rows(session, TokenTree.chain(prompt), [59])])[0]
        parts += [first.logits.tobytes(), first.hidden.tobytes()]
        session.commit(range(60))
    tree = TokenTree(np.arange(12), np.array([-1, 0, 1, 2, 0, 4, 5, 1, -1, 8, 9, 10]))
    second = engine.forward([Rows(session, tree, range(12))])[0]
    parts += [second.logits.tobytes(), second.hidden.tobytes()]
    session.commit([0, 4])
    third = engine.forward([Rows(session, TokenTree.chain([2]), [0])])[0]
    parts += [third.logits.tobytes(), third.hidden.tobytes()]
    if engine.drafter is not None:
        step = session.draft_step(7, second.hidden[3])
        parts += [step.candidates.tobytes(), step.logits.tobytes(), step.hidden.tobytes()]
    if not engine.target.states:
        parts += [_in_pieces(engine, session)]
    for kind in engine.heads:
        proposals = session.propose(kind, second.hidden[3])
        parts += [proposals.candidates.tobytes(), proposals.logits.tobytes()]
    engine.close()
    return b"".join(parts)


def _in_pieces(engine: SimdEngine, session: SimdSession) -> bytes:
    """Outputs of a draft that skips the last layer's blocks.

    A complete forward after the draft must have the same bits as one without it.
    """
    last, tree = len(engine.target.layers) - 1, TokenTree.chain([3, 7, 5])
    (whole,) = engine.forward([Rows(session, tree, range(3))])
    expected = whole.logits.tobytes(), whole.hidden.tobytes()
    (draft,) = engine.forward([Rows(session, tree, range(3), LayerPath(frozenset({last}), frozenset({last})))])
    drafted = draft.logits.tobytes()
    (pieces,) = engine.forward([Rows(session, tree, range(3))])
    if (pieces.logits.tobytes(), pieces.hidden.tobytes()) != expected:
        raise AssertionError("a forward in two pieces differs from one in one piece")
    return drafted


if __name__ == "__main__":
    digests = [digest(Bundle.open(path)) for path in sys.argv[1:]]
    answer = {"set": library.choice().set, "digests": digests}
    sys.stdout.write(json.dumps(answer))
