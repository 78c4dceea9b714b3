"""The key index stays in step with a sequence's keys, and lookup attention depends on the tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.engines.protocol import AttentionType, KVCacheType
from ondevice.engines.simd.caches import LookupSettings, read_keys, read_values
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from tests.fixtures.tiny_models import CONTEXT, VOCAB
from tests.simd.forwards import drafted, extend, run
from tests.simd.kernels.memory import cache_of, numbers_of

SETTINGS = LookupSettings(keys=32, window=64, learn=64)
IDS = np.random.default_rng(0).integers(0, VOCAB, CONTEXT - 20).tolist()

pytestmark = pytest.mark.parametrize("kind", get_args(KVCacheType))


@pytest.fixture(params=["e2b", "26b"])
def bundle(bundles: dict[str, Bundle], request: pytest.FixtureRequest) -> Bundle:
    """Bundles with one and with two KV heads in full attention layers, the only property that affects the codes."""
    return bundles[request.param]


def session_of(bundle: Bundle, kind: KVCacheType, settings: LookupSettings | None = SETTINGS) -> SimdSession:
    return SimdEngine(bundle, 1, kv_cache=kind, lookup=settings).open_session()


def continued(session: SimdSession) -> list[bytes]:
    """The bytes of the outputs of the next forward and of drafts."""
    outputs = run(session, [3, 1, 4], range(3))
    found = [outputs.logits.tobytes(), outputs.hidden.tobytes()]
    session.commit(range(3))
    return found + drafted(session)


def codes_of(session: SimdSession) -> list[bytes]:
    """The bytes of the codes of all complete units, and of their codebooks."""
    session.prepare(1)
    index = session._index
    assert index is not None
    assert index.coded == session.length // 32 * 32
    found = []
    for layer in session._caches["full"].layers:
        parts = index.parts(layer)
        assert parts is not None
        found += [part.tobytes() for part in parts]
    return found


def test_keys_are_read_from_either_cache(kind: KVCacheType) -> None:
    keys = np.random.default_rng(0).standard_normal((2, 96, 64)).astype(np.float32)
    cache = cache_of(keys, kind)
    np.testing.assert_allclose(read_keys(cache[0], 32, 90)[:, 0], numbers_of(cache, 96)[0, 32:90], rtol=1e-6)
    if kind == "fp16":
        np.testing.assert_array_equal(read_values(cache[1], 70)[:, 0], numbers_of(cache, 70)[1])


def test_attention_is_exact_until_there_is_enough_to_choose_from(bundle: Bundle, kind: KVCacheType) -> None:
    exact, looking = session_of(bundle, kind, None), session_of(bundle, kind)
    same = []
    for start in range(0, len(IDS), 59):
        chunk = IDS[start : start + 59]
        found = []
        for session in (exact, looking):
            found.append(run(session, chunk, range(len(chunk))).logits)
            session.commit(range(len(chunk)))
        same += [np.array_equal(a, b) for a, b in zip(*found, strict=True)]
    # the row at position p sees p + 1; of more than 128 one unit is between the first one and the newest 64
    first = next(position for position in range(len(IDS)) if (position + 1 - 64) // 32 - 1 > 1 and position >= 128)
    assert all(same[:first])
    assert not any(same[first + 32 :])


@pytest.mark.parametrize("mode", ["lookup", "nomad"])
def test_rows_before_the_first_lookup_are_exact_beside_rows_that_look_up(
    bundle: Bundle, kind: KVCacheType, mode: AttentionType
) -> None:
    """In one forward, when the codebooks are learnt already."""
    settings = LookupSettings(mode, keys=32, window=64, learn=96)
    exact, looking = session_of(bundle, kind, None), session_of(bundle, kind, settings)
    found = []
    for session in (exact, looking):
        extend(session, IDS[:120])
        found.append(run(session, IDS[120:180], range(60)).logits)
    before = settings.begin - 1 - 120  # the row at position p sees p + 1
    same = [np.array_equal(a, b) for a, b in zip(*found, strict=True)]
    assert all(same[:before])
    assert not any(same[before:])


def test_choosing_all_keys_is_exact(bundle: Bundle, kind: KVCacheType) -> None:
    sessions = [
        session_of(bundle, kind, settings) for settings in (None, LookupSettings(keys=512, window=64, learn=64))
    ]
    for session in sessions:
        extend(session, IDS, np.random.default_rng(1))
    assert continued(sessions[0]) == continued(sessions[1])


def test_chunks_change_neither_codes_nor_outputs(bundle: Bundle, kind: KVCacheType) -> None:
    sessions = [session_of(bundle, kind) for _ in range(3)]
    for seed, session in enumerate(sessions):
        extend(session, IDS, np.random.default_rng(seed) if seed else None)
    first, *others = map(codes_of, sessions)
    assert all(other == first for other in others)
    first, *others = map(continued, sessions)
    assert all(other == first for other in others)


@pytest.mark.parametrize("length", [30, 64, 150, 200])
def test_codes_are_those_of_what_is_left_after_a_rewind(bundle: Bundle, kind: KVCacheType, length: int) -> None:
    other = np.random.default_rng(5).integers(0, VOCAB, len(IDS)).tolist()
    rewound, fresh = session_of(bundle, kind), session_of(bundle, kind)
    extend(rewound, IDS)
    kept = rewound.rewind(length)
    for session, start in ((rewound, kept), (fresh, 0)):
        extend(session, [*IDS[:kept], *other[kept:]][start:])
    assert codes_of(rewound) == codes_of(fresh)
    assert continued(rewound) == continued(fresh)


def test_forks_and_files_hold_the_same_codebooks(bundle: Bundle, kind: KVCacheType, tmp_path: Path) -> None:
    session = session_of(bundle, kind)
    extend(session, IDS)
    session.save(tmp_path / "saved")
    fork, loaded = session.fork(), session.engine.load_session(tmp_path / "saved")
    first, *others = map(codes_of, (session, fork, loaded))
    assert all(other == first for other in others)
    first, *others = map(continued, (session, fork, loaded))
    assert all(other == first for other in others)


def test_a_fork_s_codes_are_its_own(bundle: Bundle, kind: KVCacheType) -> None:
    session, fresh = session_of(bundle, kind), session_of(bundle, kind)
    extend(session, IDS)
    extend(fresh, IDS)
    fork = session.fork(session.length - 9)
    extend(fork, [7] * 20)
    assert codes_of(session) == codes_of(fresh)
    assert continued(session) == continued(fresh)


def test_more_rows_than_the_window_has_are_refused(bundle: Bundle, kind: KVCacheType) -> None:
    session = session_of(bundle, kind)
    assert session.max_rows() == 64
    with pytest.raises(ValueError, match="65 rows do not fit"):
        run(session, [0] * 65, [0])


def test_a_drafter_that_looks_up_leaves_the_target_exact(bundle: Bundle, kind: KVCacheType) -> None:
    settings = LookupSettings("lookup-drafts", keys=32, window=64, learn=64)
    exact, drafting = session_of(bundle, kind, None), session_of(bundle, kind, settings)
    assert exact.engine.origin == drafting.engine.origin
    for session in (exact, drafting):
        extend(session, IDS, np.random.default_rng(1))
    found = [run(session, [3, 1, 4], range(3)).logits for session in (exact, drafting)]
    np.testing.assert_array_equal(found[0], found[1])
    assert drafting.nbytes > exact.nbytes
    for session in (exact, drafting):
        session.commit([])
    assert drafted(exact) != drafted(drafting)
