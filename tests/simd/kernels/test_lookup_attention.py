"""The steps of lookup attention, over a cache of random numbers, against numpy."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.engines.protocol import KVCacheType, TokenTree
from ondevice.engines.simd.buffers import AttentionScratch, LookupScratch, float_bits
from ondevice.engines.simd.caches import BITS
from ondevice.engines.simd.forward_state import ForwardState, SequenceRecord
from ondevice.engines.simd.kernels.activations import ROW_BYTES
from ondevice.engines.simd.kernels.attention import key_codes
from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.lookup import look_up_share
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.attention_memory import SPAN, UNIT
from ondevice.engines.simd.kernels.contract.steps import Attend, KernelStep, LookUp, to_row
from ondevice.engines.simd.plan.builder import Plan
from tests.simd.kernels import lookup_twins, twins
from tests.simd.kernels.memory import cache_of, numbers_of, read_records
from tests.simd.kernels.test_lookup import codebook_of

HEAD_DIM, CODE_WIDTH, LENGTH, WINDOW, MOST = 64, 2, 1200, 64, 4

CAP = 1.0  # of the scores, below many of them


class Case:
    """One row after LENGTH - 1 tokens, with `heads` query heads that share a KV head."""

    def __init__(self, kind: KVCacheType, heads: int) -> None:
        rng = np.random.default_rng(heads)
        self.sinks = rng.standard_normal(heads).astype(np.float32) * np.float32(3)
        self.query = rng.standard_normal((heads, HEAD_DIM)).astype(np.float32) * np.float32(0.4)
        self.cache = cache_of(rng.standard_normal((2, LENGTH, HEAD_DIM)).astype(np.float32), kind)
        self.keys, self.values = numbers_of(self.cache, LENGTH)
        self.centroids = rng.standard_normal((HEAD_DIM // CODE_WIDTH, 16, CODE_WIDTH)).astype(np.float32)
        self.book = codebook_of(self.centroids)[None].copy()
        self.codes = np.zeros((-(-LENGTH // SPAN), 1, SPAN, HEAD_DIM // CODE_WIDTH // 2), np.uint8)
        self.keys = np.ascontiguousarray(self.keys)
        key_codes.encode(self.keys[:, None], self.book, 0, self.codes.ctypes.data, self.codes.strides[0])
        self.chosen = np.zeros(1 + MOST, np.int64)
        self._state, self._record = ForwardState(1, [], BITS[kind]), SequenceRecord({0: 0})
        self._record.set_rows(TokenTree.chain([0]), LENGTH - 1)
        self._record.set_place(slots.ALL, 0, 1)
        self._record.most_keys = LENGTH
        for offset, array in enumerate((*self.cache, self.codes, self.book)):
            self._record.point(slots.CACHES + offset, array)
        position = np.array([LENGTH - 1])
        self._state.set_rows(np.zeros(1, np.int64), position, position + 1, np.zeros(1, np.int64))
        self._scratch = AttentionScratch(HEAD_DIM, heads, 1, LookupScratch(heads, HEAD_DIM // CODE_WIDTH, 1))
        self._state.set_sequences([self._record], self._scratch)
        self._out = np.zeros(heads * HEAD_DIM // 32 * ROW_BYTES, np.uint8)
        x = (slots.ALL, self.query.ctypes.data, self.query.nbytes, heads, 1, HEAD_DIM)
        attend = Attend(*x, kind=0, cache=0, activations=self._out.ctypes.data, form=8)
        self.looks = LookUp(*x, 2, CODE_WIDTH, WINDOW, 0, MOST, MOST, 0, self.chosen.ctypes.data)
        self.attends = attend._replace(window=WINDOW, chosen=self.chosen.ctypes.data, most=MOST)
        self.by_tables = attend._replace(window=WINDOW, codes=2, width=CODE_WIDTH)

    def beside_sinks(self, step: Attend) -> Attend:
        return step._replace(sinks=self.sinks.ctypes.data)

    def run(self, kernel: Any, step: KernelStep, *threads: int) -> twins.Quantized:
        words, claims = np.array(to_row(step)), np.zeros(1, np.int64)
        kernel(words, self._state.slots, 0, *threads, claims.ctypes.data)
        return read_records(self._out, 1)

    @property
    def newest(self) -> int:
        """The first of the newest positions, which are always attended to."""
        return (LENGTH - WINDOW) // UNIT * UNIT

    def looked_up(self) -> twins.Wide:
        """Scores of all keys, [heads, LENGTH]."""
        tables = lookup_twins.tables(self.query, self.centroids)
        return tables.scores(lookup_twins.nearest(self.keys, self.centroids)) + tables.constants[:, None]


def assert_near(found: twins.Quantized, expected: npt.NDArray[Any], values: twins.Floats) -> None:
    """Assert equality up to the rounding of the output, of int8 queries, and of weights to 1/127."""
    step = found.scales.repeat(32, axis=1)
    error = np.abs(found.values() - expected.reshape(1, -1))
    assert (error <= 0.5001 * step + 0.03 * np.abs(values).max()).all()
    assert error.mean() < 0.01


@pytest.mark.parametrize("kind", get_args(KVCacheType))
@pytest.mark.parametrize("heads", [1, 3, 8, 11])
def test_a_row_attends_to_what_is_chosen(kind: KVCacheType, heads: int) -> None:
    case = Case(kind, heads)
    case.run(look_up_share, case.looks, 1)
    between = case.looked_up()[:, UNIT : case.newest]
    expected = lookup_twins.choose(lookup_twins.shares(between, UNIT), MOST, MOST, 1.0)
    assert case.chosen.tolist() == [MOST, *(1 + unit for unit in expected)]
    units = [0, *case.chosen[1:], *range(case.newest // UNIT, LENGTH // UNIT + 1)]
    seen = np.concatenate([np.arange(UNIT * unit, min(UNIT * unit + UNIT, LENGTH)) for unit in units])
    found = case.run(attend_chosen_share, case.attends)
    assert_near(found, twins.attend(case.query, case.keys[seen], case.values[seen]), case.values)
    found = case.run(attend_chosen_share, case.beside_sinks(case.attends))
    assert_near(found, twins.attend(case.query, case.keys[seen], case.values[seen], case.sinks), case.values)
    found = case.run(attend_chosen_share, case.attends._replace(softcap=float_bits(CAP)))
    assert_near(found, twins.attend(case.query, case.keys[seen], case.values[seen], softcap=CAP), case.values)


@pytest.mark.parametrize("kind", get_args(KVCacheType))
@pytest.mark.parametrize("heads", [1, 3, 8, 11])
def test_scores_of_nomad_are_those_of_the_tables(kind: KVCacheType, heads: int) -> None:
    case = Case(kind, heads)
    scores = case.query.astype(np.float64) @ case.keys.astype(np.float64).T
    scores[:, UNIT : case.newest] = case.looked_up()[:, UNIT : case.newest]
    found = case.run(attend_looked_up_share, case.by_tables)
    assert_near(found, twins.softmax(scores) @ case.values, case.values)
    found = case.run(attend_looked_up_share, case.beside_sinks(case.by_tables))
    assert_near(found, twins.softmax(scores, case.sinks) @ case.values, case.values)
    found = case.run(attend_looked_up_share, case.by_tables._replace(softcap=float_bits(CAP)))
    assert_near(found, twins.softmax(CAP * np.tanh(scores / CAP)) @ case.values, case.values)


def test_an_exact_plan_looks_nothing_up() -> None:
    attend = Attend(*range(10))
    chosen, looked_up = (attend._replace(window=10, chosen=11, most=12), attend._replace(window=10, codes=13, width=14))
    plan = Plan.of([LookUp(*range(14)), chosen, looked_up])
    np.testing.assert_array_equal(plan.exact, Plan.of([attend, attend]).steps)


def test_an_exact_plan_keeps_the_sinks_and_the_cap() -> None:
    attend = Attend(*range(10))._replace(sinks=15, softcap=16)
    plan = Plan.of([attend._replace(window=10, chosen=11, most=12)])
    np.testing.assert_array_equal(plan.exact, Plan.of([attend]).steps)
