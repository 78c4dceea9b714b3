"""Which finished sequence a prompt continues, which is copied, and which goes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ondevice.engines.kv_cache import SLACK
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.generate import prefix_cache
from ondevice.generate.prefix_cache import MIN_COPIED, PrefixCache, common_length
from tests.fixtures.toy_engine import VOCAB, WINDOW, ToyEngine, ToySession

PLENTY = 1 << 40


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def extend(session: ToySession, tokens: list[int]) -> ToySession:
    for start in range(0, len(tokens), 64):
        part = tokens[start : start + 64]
        session.engine.forward([Rows(session, TokenTree.chain(part), [0])])
        session.commit(range(len(part)))
    return session


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine()


def kept(engine: ToyEngine, cache: PrefixCache, tokens: list[int], snapshot_at: int | None = None) -> ToySession:
    session = extend(engine.open_session(), tokens[:snapshot_at])
    if snapshot_at is not None:
        session.snapshot()
        extend(session, tokens[snapshot_at:])
    cache.keep(session)
    return session


def test_nothing_kept_is_an_empty_session(engine: ToyEngine) -> None:
    assert PrefixCache(engine, PLENTY).take(ids(50)).length == 0


def test_a_prompt_that_goes_on_where_a_sequence_ended_takes_it_over(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, PLENTY)
    session = kept(engine, cache, ids(300))
    taken = cache.take([*ids(300), 1, 2, 3])
    assert taken is session
    assert list(taken.tokens) == ids(300)
    assert len(cache) == 0


def test_the_last_token_of_a_prompt_is_always_computed(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, PLENTY)
    kept(engine, cache, ids(300))
    assert list(cache.take(ids(300)).tokens) == ids(299)


def test_the_longest_common_beginning_wins(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, PLENTY)
    sessions = [kept(engine, cache, [*ids(shared), *ids(40, shared)]) for shared in (100, 200, 150)]
    assert cache.take(ids(400)) is sessions[1]
    assert cache.take(ids(400)) is sessions[2]


def test_of_equal_beginnings_the_shortest_sequence_is_used(engine: ToyEngine) -> None:
    """A copy of a prompt, left for another generation of it, and an older chat that goes on after that prompt."""
    cache = PrefixCache(engine, PLENTY)
    chat, copy = kept(engine, cache, [*ids(200), *ids(100, 1)]), kept(engine, cache, ids(200))
    assert cache.take([*ids(200), 1]) is copy
    assert list(chat.tokens) == [*ids(200), *ids(100, 1)]


def test_what_shares_less_than_half_is_copied(engine: ToyEngine) -> None:
    """A title generator beside a chat, or a second chat with the same instructions: the chat keeps what it has."""
    cache = PrefixCache(engine, PLENTY)
    session = kept(engine, cache, ids(200))
    taken = cache.take([*ids(90), *ids(50, 1)])
    assert taken is not session
    assert list(taken.tokens) == ids(90)
    assert list(session.tokens) == ids(200)
    assert len(cache) == 1


def test_a_few_common_tokens_are_not_worth_a_copy(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, PLENTY)
    kept(engine, cache, ids(200))
    assert cache.take([*ids(MIN_COPIED - 1), *ids(50, 1)]).length == 0
    assert len(cache) == 1
    short = kept(engine, cache, [9, 9, 9])
    assert cache.take([9, 9, 9, 8]) is short


def test_a_turns_boundary_is_found_again_behind_a_long_reply(engine: ToyEngine) -> None:
    """The next prompt drops the thoughts: it parts from the sequence where the reply began."""
    cache = PrefixCache(engine, PLENTY)
    boundary = 2 * (SLACK + WINDOW)
    kept(engine, cache, [*ids(boundary), *ids(boundary // 2, 1)], snapshot_at=boundary)
    assert list(cache.take([*ids(boundary), *ids(100, 2)]).tokens) == ids(boundary)
    kept(engine, cache, [*ids(boundary), *ids(3 * boundary, 1)], snapshot_at=boundary)
    assert list(cache.take([*ids(boundary), *ids(100, 2)]).tokens) == ids(boundary)


def test_the_least_recently_used_go_first(engine: ToyEngine) -> None:
    one = engine.open_session().nbytes
    cache = PrefixCache(engine, 3 * one)
    sessions = [kept(engine, cache, ids(50, seed)) for seed in range(3)]
    cache.keep(cache.take([*ids(50, 0), 1]))
    kept(engine, cache, ids(50, 3))
    assert cache.nbytes == 3 * one
    assert [session.closed for session in sessions] == [False, True, False]


def test_the_newest_stays_and_a_limit_of_nothing_keeps_nothing(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, 1)
    old, new = kept(engine, cache, ids(50)), kept(engine, cache, ids(50, 1))
    assert old.closed
    assert not new.closed
    assert kept(engine, PrefixCache(engine, 0), ids(50)).closed


def test_clear(engine: ToyEngine) -> None:
    cache = PrefixCache(engine, PLENTY)
    session = kept(engine, cache, ids(50))
    cache.clear()
    assert session.closed
    assert cache.nbytes == len(cache) == 0


def test_several_threads_take_and_keep(engine: ToyEngine) -> None:
    """No thread gets a session that another one has, or one that holds other tokens than its prompt's."""
    cache = PrefixCache(engine, 5 * engine.open_session().nbytes)
    wrong: list[object] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(60):
            prompt = ids(int(rng.integers(20, 120)), int(rng.integers(3)))
            session = cache.take(prompt)
            assert isinstance(session, ToySession)
            if list(session.tokens) != prompt[: session.length]:
                wrong.append(prompt)
            extend(session, prompt[session.length :])
            if session.held() != prompt:
                wrong.append(prompt)
            cache.keep(session)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert not wrong


def test_common_length() -> None:
    assert common_length([], [1]) == 0
    assert common_length([1, 2, 3], [1, 2]) == 2
    assert common_length([1, 2, 3], [1, 5, 3]) == 1
    assert common_length([1, 2], [1, 2]) == 2


def test_a_session_that_is_kept_amid_a_call_closes_none_that_the_call_uses(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may end a generation, which keeps its session, at any line of the cache."""
    cache = PrefixCache(engine, 1)
    session = kept(engine, cache, ids(300))
    ended = [extend(engine.open_session(), ids(300, seed=1))]

    def counted(first: Sequence[int], second: Sequence[int]) -> int:
        while ended:
            cache.keep(ended.pop())
        return common_length(first, second)

    monkeypatch.setattr(prefix_cache, "common_length", counted)
    taken = cache.take([*ids(300), 1])
    assert taken is session
    assert list(taken.tokens) == ids(300)
    assert len(cache) == 1
