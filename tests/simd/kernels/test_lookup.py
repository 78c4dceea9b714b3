"""Product quantisation of keys, tables, and the choice of blocks, each against its numpy twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.simd.kernels.attention import key_codes, lookup
from ondevice.engines.simd.kernels.attention.key_codes import SUMS
from ondevice.engines.simd.kernels.contract.attention_memory import SPAN, UNIT
from ondevice.engines.simd.kernels.isa.shuffle import byte_shuffle
from ondevice.native import library
from tests.simd.kernels import lookup_twins as twins
from tests.simd.kernels.twins import Floats

SHAPES = [(512, 4, 8), (512, 1, 8), (128, 4, 4), (64, 1, 3), (96, 2, 6), (32, 4, 1)]
"""Cases of head size, numbers per code, and number of query heads."""


def codebook_of(centroids: Floats) -> Floats:
    """Convert centroids [codes, 16, width] to the kernels' layout."""
    lengths = -0.5 * (centroids.astype(np.float64) ** 2).sum(axis=-1)
    book = np.concatenate([centroids.swapaxes(1, 2), lengths[:, None]], axis=1)
    return np.ascontiguousarray(book, np.float32)


class Scan:
    """The kernels' view of keys [n, head_dim] and a query [heads, head_dim]."""

    def __init__(self, keys: Floats, query: Floats, centroids: Floats) -> None:
        book = codebook_of(centroids)
        heads, codes, spans = len(query), len(centroids), -(-len(keys) // SPAN)
        encoded = np.zeros((spans, 1, SPAN, codes // 2), np.uint8)
        key_codes.encode(keys[:, None].copy(), book[None].copy(), 0, encoded.ctypes.data, encoded.strides[0])
        self.tables = np.zeros((heads, codes, 16), np.uint8)
        self.scales, self.constants = scales = np.zeros((2, heads), np.float32)
        tables = lookup.Tables(self.tables.ctypes.data, scales.ctypes.data, heads, codes)
        products = np.zeros((codes, 16), np.float32)
        head_book = key_codes.Codebook(book.ctypes.data, codes, book.shape[1] - 1)
        lookup.make_tables(query.ctypes.data, head_book, products.ctypes.data, tables)
        self.found = np.zeros((heads, spans, 2, 16), np.float32)
        self.scores = lookup.Scores(self.found.ctypes.data, self.found.strides[0])
        sums = np.zeros((UNIT, SUMS, 16), np.float32)
        self.spans = spans
        for start in range(spans):  # in any parts
            lookup.scan(
                tables, lookup.Codes(encoded.ctypes.data, encoded.strides[0]), start, start + 1,
                sums.ctypes.data, self.scores,
            )  # fmt: skip

    def shares(self, start: int, stop: int) -> Floats:
        heads = len(self.found)
        lookup.leave_out(self.scores, heads, 0, start)
        lookup.leave_out(self.scores, heads, stop, 16 * self.spans)
        found = np.zeros(16 * self.spans, np.float32)
        lookup.weigh(self.scores, heads, self.spans, found.ctypes.data)
        return found


def learn(keys: np.ndarray, book: np.ndarray, steps: int) -> None:
    sums, members = np.full((16, book.shape[1] - 1), np.nan), np.full(16, -1)  # whatever was there before
    key_codes.learn(keys, book, steps, sums, members)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_codebooks_equal_their_twin_s(width: int) -> None:
    keys = np.random.default_rng(width).standard_normal((300, 32)).astype(np.float32)
    book = np.zeros((32 // width, width + 1, 16), np.float32)
    learn(keys, book, 4)
    np.testing.assert_allclose(book, codebook_of(twins.learn(keys, width, 4)), rtol=1e-5, atol=1e-6)


def test_equal_keys_leave_their_centroids_where_they_are() -> None:
    book = np.zeros((8, 5, 16), np.float32)
    learn(np.full((64, 32), 2, np.float32), book, 3)
    assert (book[:, :4] == 2).all()


@pytest.mark.parametrize(("head_dim", "width", "heads"), SHAPES)
def test_a_scan_equals_its_twin(head_dim: int, width: int, heads: int) -> None:
    rng = np.random.default_rng(head_dim + width)
    keys = rng.standard_normal((SPAN + 3 * UNIT, head_dim)).astype(np.float32)
    query = rng.standard_normal((heads, head_dim)).astype(np.float32) * np.float32(0.2)
    centroids = rng.standard_normal((head_dim // width, 16, width)).astype(np.float32)
    scan = Scan(keys, query, centroids)
    expected = twins.tables(query, centroids)
    # where a product lies between two bytes, float32 and float64 may round to either
    assert np.abs(scan.tables - expected.entries).max() <= 1
    assert (scan.tables == expected.entries).mean() > 0.999
    np.testing.assert_allclose(scan.scales, expected.scales, rtol=1e-6)
    np.testing.assert_allclose(scan.constants, expected.constants, rtol=1e-4)
    own = twins.Tables(scan.tables.astype(np.int64), scan.scales.astype(np.float64), expected.constants)
    scores = own.scores(twins.nearest(keys, centroids)).reshape(heads, -1, UNIT)
    blocks = scores.shape[1]
    found = scan.found.swapaxes(1, 2).reshape(heads, 2, -1)[:, :, :blocks]
    np.testing.assert_allclose(found[:, 0], scores.max(axis=2), rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], np.exp(scores - scores.max(axis=2)[..., None]).sum(axis=2), rtol=1e-5)
    shares = scan.shares(1, blocks - 1)
    expected_shares = twins.shares(scores[:, 1:-1].reshape(heads, -1), UNIT)
    np.testing.assert_allclose(shares[1 : blocks - 1], expected_shares, rtol=1e-4)
    assert not shares[0]
    assert not shares[blocks - 1 :].any()


def test_sums_are_exact_where_16_bits_would_overflow() -> None:
    head_dim = 512
    query = np.ones((1, head_dim), np.float32)
    centroids = np.repeat(np.array([[0.0], [1.0]], np.float32), 8, axis=0)[None].repeat(head_dim, axis=0)
    keys = np.ones((SPAN, head_dim), np.float32)
    keys[0] = 0
    scan = Scan(keys, query, centroids)
    assert scan.found[0, 0, 0, 0] == pytest.approx(512, rel=1e-6)  # 512 * 255 whole bytes
    assert (scan.found[0, 0, 0] == scan.found[0, 0, 0, 0]).all()


@pytest.mark.parametrize(("least", "most", "part"), [(5, 5, 0.9), (2, 9, 0.5), (1, 400, 0.6), (3, 7, 0.0), (90, 90, 1)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_choice_equals_its_twin_s(least: int, most: int, part: float, ties: bool) -> None:
    rng = np.random.default_rng(least)
    start, stop, heads = 1, 90, 4
    shares = np.zeros(96, np.float32)
    shares[start:stop] = rng.integers(0, 4, stop - start) if ties else rng.exponential(size=stop - start)
    shares *= heads / shares.sum()
    out = np.zeros(96, np.int64)
    budget = lookup.Budget(least, most, part)
    count = lookup.choose(shares.ctypes.data, heads, start, stop, budget, out.ctypes.data)
    expected = twins.choose(shares[start:stop], least, most, part * heads)
    if ties and least < most:  # the rule by shares takes all that are equal
        assert out[:count].tolist()[: len(expected)] or not expected
        assert count >= len(expected)
    else:
        assert [block - start for block in out[:count]] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("avx512vbmi", "vpermb"), ("avx512vnni", "pshufb-512"), ("avx2", "pshufb-256"), ("generic", ""), ("neon", "tbl")],
)
def test_the_widest_shuffle_is_used(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    monkeypatch.setattr(library, "choice", lambda: library.LibraryChoice(name, None))
    assert byte_shuffle() == expected


def test_codes_of_keys_do_not_depend_on_what_is_coded_together() -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((600, 2, 64)).astype(np.float32)
    books = np.stack([codebook_of(rng.standard_normal((16, 16, 4)).astype(np.float32)) for _ in range(2)])
    found: list[npt.NDArray[np.uint8]] = []
    for cuts in ([0, 600], [0, 32, 64, 512, 600]):
        out = np.zeros((2, 2, SPAN, 8), np.uint8)
        for start, stop in pairwise(cuts):
            key_codes.encode(keys[start:stop].copy(), books, start, out.ctypes.data, out.strides[0])
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
