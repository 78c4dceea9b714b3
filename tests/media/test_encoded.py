"""Encoded media are kept, and encoding can end early. Threads meet at events; nothing here waits for a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import Bundle
from ondevice.media.encoded import EncodedMedia
from ondevice.media.images import Pixels
from ondevice.media.tower import Tower
from tests.fixtures.tiny_models import PATCH, POOL
from tests.media.pictures_made import noise
from tests.media.towers import vision_tower

ROW_BYTES = 4 * 8


def never() -> bool:
    return False


class Encoder:
    """Makes two rows of eight numbers, and lists what it made them of."""

    def __init__(self) -> None:
        self.made: list[bytes] = []

    def of(self, digest: bytes) -> Callable[[Callable[[], bool]], Any]:
        def encode(cancelled: Callable[[], bool]) -> Any:
            self.made.append(digest)
            return np.full((2, 8), digest[0], np.float32)

        return encode


def test_rows_that_were_not_used_for_longest_are_dropped() -> None:
    kept, encoder = EncodedMedia(4 * ROW_BYTES), Encoder()
    for digest in (b"a", b"b", b"a", b"c", b"a", b"b"):
        rows = kept.rows(digest, encoder.of(digest), never)
        assert rows is not None
        np.testing.assert_array_equal(rows, np.full((2, 8), digest[0]))
    assert encoder.made == [b"a", b"b", b"c", b"b"]
    kept.forget()
    kept.rows(b"a", encoder.of(b"a"), never)
    assert encoder.made[4:] == [b"a"]


@pytest.mark.parametrize("most", [0, 2 * ROW_BYTES - 1])
def test_rows_that_do_not_fit_are_encoded_again(most: int) -> None:
    kept, encoder = EncodedMedia(most), Encoder()
    for _ in range(2):
        assert kept.rows(b"a", encoder.of(b"a"), never) is not None
    assert encoder.made == [b"a", b"a"]


def test_two_generations_that_need_the_same_encode_it_once() -> None:
    kept, encoder = EncodedMedia(1 << 20), Encoder()
    begun, waiting = Event(), Event()

    def slow(cancelled: Callable[[], bool]) -> Any:
        begun.set()
        waiting.wait()
        return encoder.of(b"a")(cancelled)

    def asked() -> bool:
        waiting.set()  # only a generation that waits for its turn asks here
        return False

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.rows, b"a", slow, never)
        begun.wait()
        second = pool.submit(kept.rows, b"a", encoder.of(b"a"), asked)
        assert second.result() is first.result()
    assert encoder.made == [b"a"]


def test_a_cancelled_generation_does_not_wait_for_its_turn() -> None:
    kept, encoder = EncodedMedia(1 << 20), Encoder()
    begun, release = Event(), Event()

    def slow(cancelled: Callable[[], bool]) -> Any:
        begun.set()
        release.wait()
        return None  # cancelled too

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(kept.rows, b"a", slow, never)
        begun.wait()
        assert kept.rows(b"b", encoder.of(b"b"), lambda: True) is None
        release.set()
        assert running.result() is None
    assert encoder.made == []
    assert kept.rows(b"a", encoder.of(b"a"), never) is not None


class Endless:
    """A graph that runs until it is told to end, as one of ONNX Runtime then does."""

    def __init__(self) -> None:
        self.begun, self.ended = Event(), Event()

    def run(self, outputs: Sequence[str], feeds: dict[str, Any], options: Any) -> Any:
        self.begun.set()
        while not options.terminate:
            self.ended.wait(0.001)
        self.ended.set()
        raise RuntimeError("Exiting due to terminate flag being set to true.")


@pytest.fixture
def tower(seeing: dict[tuple[str, str], Bundle]) -> Tower:
    return vision_tower(seeing["seeing", "int8"])


PICTURE = Pixels(noise(2 * PATCH * POOL, 3 * PATCH * POOL), PATCH, POOL)


@pytest.mark.needs("onnxruntime")
def test_a_cancellation_ends_the_graph_that_runs(tower: Tower) -> None:
    graph = tower._graph = Endless()
    assert tower.encode(PICTURE, graph.begun.is_set) is None
    assert graph.ended.is_set()


@pytest.mark.needs("onnxruntime")
def test_an_interrupt_ends_the_graph_that_runs(tower: Tower) -> None:
    """Python handles signals between two questions whether the generation was cancelled."""
    graph = tower._graph = Endless()

    def interrupted() -> bool:
        if graph.begun.is_set():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        tower.encode(PICTURE, interrupted)
    assert graph.ended.is_set()


@pytest.mark.needs("onnxruntime")
def test_a_tower_can_be_used_after_a_cancellation(tower: Tower) -> None:
    assert tower.encode(PICTURE, lambda: True) is None
    rows = tower.encode(PICTURE)
    assert rows is not None
    assert rows.shape == (PICTURE.tokens, 64)
