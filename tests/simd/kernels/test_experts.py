"""Expert routing: the chosen experts and their order, and that only their weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ondevice.bundle import Bundle
from ondevice.bundle_format.weight_format import IN_GROUPS, INT4, WeightFormat
from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.matrices import SCRATCH_BYTES
from ondevice.engines.simd.kernels.contract.steps import Choose, to_row
from ondevice.engines.simd.kernels.experts import choose
from ondevice.engines.simd.model import Experts
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.layer import ExpertsPlanner, pack_experts
from ondevice.engines.simd.program import BundleModels
from ondevice.engines.simd.tensor_files import Matrix
from ondevice.engines.simd.threads import ThreadPool
from tests.fixtures.tiny_models import VOCAB
from tests.simd.forwards import run
from tests.simd.kernels import twins
from tests.simd.kernels.test_projection import pack_of, random_matrix
from tests.simd.machines import generations

EXPERTS, TOP, WIDTH_OF_ROWS, INNER = 11, 3, 96, 64
EPS = 1e-6


def random_experts(
    rng: np.random.Generator,
    form: WeightFormat = INT4,
    *,
    alone: bool = False,
    biased: bool = False,
    shared: bool = False,
    gated: bool = True,
) -> Experts:
    def norm() -> twins.Floats:
        return rng.uniform(0.5, 1.5, WIDTH_OF_ROWS).astype(np.float32)

    def bias(*shape: int) -> twins.Floats | None:
        return rng.standard_normal(shape).astype(np.float32) if biased else None

    return Experts(
        router=rng.standard_normal((EXPERTS, WIDTH_OF_ROWS), np.float32),
        scale=rng.uniform(0.5, 1.5, EXPERTS).astype(np.float32),
        top=TOP,
        pre_norm=norm(),
        gate_up=tuple(random_matrix(rng, 2 * INNER, WIDTH_OF_ROWS, form) for _ in range(EXPERTS)),
        down=tuple(random_matrix(rng, WIDTH_OF_ROWS, INNER, form) for _ in range(EXPERTS)),
        norm=None if alone or shared else norm(),
        dense_norm=None if alone or shared else norm(),
        router_bias=bias(EXPERTS),
        gate_up_bias=bias(EXPERTS, 2 * INNER),
        down_bias=bias(EXPERTS, WIDTH_OF_ROWS),
        shared=shared,
        shared_gate=rng.normal(0, 0.2, WIDTH_OF_ROWS).astype(np.float32) if shared and gated else None,
    )


def mixed(
    experts: Experts, hidden: twins.Floats, dense: twins.Floats, threads: int = 1
) -> tuple[npt.NDArray[np.float32], int]:
    """Run the experts' steps on the residual stream and the dense block's output.

    Returns:
        The new residual stream, and the number of experts whose weights were read.
    """
    layout = PackLayout()
    pack_experts(layout, experts)
    buffers = Buffers()
    builder = PlanBuilder(layout.places, pack_of(layout), buffers, len(hidden), EPS)
    stream, out = hidden.copy(), dense.copy()
    ExpertsPlanner(builder, [experts]).add(experts, "gelu_tanh", slots.ALL, buffers.hold(stream), buffers.hold(out))
    state = np.zeros(slots.SLOTS, np.int64)
    state[slots.ALL] = len(hidden)
    pool = ThreadPool(threads, SCRATCH_BYTES)
    pool.run(builder.plan().steps, state, 0)
    pool.close()
    np.testing.assert_array_equal(stream, hidden)
    return out, int(state[slots.EXPERTS_READ])


def choices(experts: Experts, hidden: twins.Floats) -> tuple[npt.NDArray[np.int64], twins.Wide]:
    """The indices of each row's experts, best first, and their weights."""
    scores = twins.rms_norm(hidden, np.ones(WIDTH_OF_ROWS, np.float32), EPS) @ experts.router.T.astype(np.float64)
    if experts.router_bias is not None:
        scores += experts.router_bias
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
    shares = np.exp(np.take_along_axis(scores, chosen, 1))
    return chosen, shares / shares.sum(axis=1, keepdims=True) * experts.scale[chosen]


def signed(matrix: Matrix) -> npt.NDArray[np.int64]:
    """Weights without their scales, [rows, blocks, 32]."""
    return twins.unpack(matrix.codes, matrix.format).reshape(matrix.rows, -1, 32)


def expected(experts: Experts, hidden: twins.Floats, dense: twins.Floats) -> twins.Wide:
    chosen, weights = choices(experts, hidden)
    x = twins.rms_norm(hidden, experts.pre_norm, EPS).astype(np.float32)
    total = np.zeros(hidden.shape)
    for row in range(len(hidden)):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            both, down = experts.gate_up[expert], experts.down[expert]
            own = twins.quantize(x[row : row + 1])
            product = twins.project(own, signed(both), both.scales, both.minimums).astype(np.float64)
            if experts.gate_up_bias is not None:
                product += experts.gate_up_bias[expert]
            gate, up = np.split(product, 2, axis=1)
            inner = twins.quantize((twins.gelu(gate) * up).astype(np.float32))
            out = twins.project(inner, signed(down), down.scales, down.minimums)[0]
            total[row] += weight * (out if experts.down_bias is None else out + experts.down_bias[expert])
    if experts.shared_gate is not None:
        gate = twins.rms_norm(hidden, np.ones(WIDTH_OF_ROWS, np.float32), EPS) @ experts.shared_gate
        return total + dense / (1 + np.exp(-gate))[:, None]
    if experts.norm is None or experts.dense_norm is None:
        return total + dense if experts.shared else total
    return twins.rms_norm(dense, experts.dense_norm, EPS) + twins.rms_norm(total.astype(np.float32), experts.norm, EPS)


@pytest.mark.parametrize(("alone", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("form", IN_GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_experts_are_those_of_the_twin(rows: int, form: WeightFormat, alone: bool, biased: bool) -> None:
    rng = np.random.default_rng(rows)
    experts = random_experts(rng, form, alone=alone, biased=biased)
    hidden, dense = rng.standard_normal((2, rows, WIDTH_OF_ROWS), np.float32)
    found, read = mixed(experts, hidden, dense)
    # activations that differ in the last bit may round to another code
    wanted = expected(experts, hidden, dense)
    np.testing.assert_allclose(found, wanted, atol=0.02 * max(1.0, np.abs(wanted).max() if alone else 1.0))
    assert read == len(np.unique(choices(experts, hidden)[0]))


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("gated", [True, False])
def test_the_output_of_a_shared_expert_is_added(rows: int, gated: bool) -> None:
    rng = np.random.default_rng(rows)
    experts = random_experts(rng, shared=True, gated=gated)
    hidden, dense = rng.standard_normal((2, rows, WIDTH_OF_ROWS), np.float32)
    found, wanted = mixed(experts, hidden, dense)[0], expected(experts, hidden, dense)
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    np.testing.assert_allclose(
        found - mixed(experts, hidden, 0 * dense)[0], wanted - expected(experts, hidden, 0 * dense), atol=1e-4
    )


@pytest.mark.parametrize(("threads", "shared"), [(2, False), (3, False), (2, True), (3, True)])
def test_a_row_has_the_same_bits_among_others_and_with_any_number_of_threads(threads: int, shared: bool) -> None:
    rng = np.random.default_rng(0)
    experts = random_experts(rng, shared=shared)
    hidden, dense = rng.standard_normal((2, 30, WIDTH_OF_ROWS), np.float32)
    together, _ = mixed(experts, hidden, dense, threads)
    for row in range(0, 30, 7):
        alone, read = mixed(experts, hidden[row : row + 1], dense[row : row + 1])
        np.testing.assert_array_equal(together[row], alone[0])
        assert read == TOP


def test_what_nobody_chose_is_not_read() -> None:
    rng = np.random.default_rng(1)
    experts = random_experts(rng)
    hidden, dense = rng.standard_normal((2, 2, WIDTH_OF_ROWS), np.float32)
    chosen = set(choices(experts, hidden)[0].reshape(-1).tolist())
    poison = [np.float32(1 if number in chosen else np.nan) for number in range(EXPERTS)]
    poisoned = replace(
        experts,
        gate_up=tuple(replace(each, scales=each.scales * by) for each, by in zip(experts.gate_up, poison, strict=True)),
        down=tuple(replace(each, scales=each.scales * by) for each, by in zip(experts.down, poison, strict=True)),
    )
    np.testing.assert_array_equal(mixed(poisoned, hidden, dense)[0], mixed(experts, hidden, dense)[0])


def chosen_by(
    scores: npt.NDArray[np.float32],
    top: int,
    of_all: int = 0,
    bias: npt.NDArray[np.float32] | None = None,
    sigmoid: int = 0,
) -> dict[str, npt.NDArray[Any]]:
    """The arrays that the kernel `choose` writes, by name."""
    rows, count = scores.shape
    out = {
        "weights": np.zeros(rows * top + 16, np.float32),
        "chosen": np.zeros((rows, top), np.int64),
        "groups": np.zeros(3 + 2 * count, np.int64),
        "pairs": np.zeros(rows * top, np.int64),
        "counts": np.zeros(count, np.int64),
    }
    scale = np.ones(count, np.float32)
    addresses = {name: array.ctypes.data for name, array in out.items()}
    working = np.zeros(count, np.float32)
    if bias is not None:
        addresses |= {"selection": working.ctypes.data, "selection_bias": bias.ctypes.data}
    kind = {"sigmoid": sigmoid, "of_all": of_all}
    step = Choose(slots.ALL, scores.ctypes.data, count, top, scale.ctypes.data, **addresses, **kind)
    state = np.zeros(slots.SLOTS, np.int64)
    state[slots.ALL] = rows
    choose(np.array(to_row(step)), state)
    return out


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    scores = np.array([[1, 2, 2, 0, 2], [0, 0, 0, 0, 0], [3, 1, 3, 1, 1]], np.float32)
    out = chosen_by(scores, 2)
    number = out["groups"][0]
    experts, firsts = out["groups"][1 : 1 + 2 * number].reshape(-1, 2).T
    assert experts.tolist() == [0, 1, 2]
    assert [*firsts.tolist(), out["groups"][2 + 2 * number]] == [0, 2, 4, 6]
    assert out["pairs"].tolist() == [1, 2, 0, 1, 0, 2]
    assert out["chosen"].tolist() == [[2, 4], [0, 3], [1, 5]], "places among the pairs, the best expert's first"
    np.testing.assert_allclose(out["weights"][:6], 0.5)


@pytest.mark.parametrize("of_all", [0, 1])
@pytest.mark.parametrize("top", [1, 8, 17])
def test_weights_are_shares_of_the_chosen_scores_or_of_all(top: int, of_all: int) -> None:
    scores = 40 * np.random.default_rng(top).standard_normal((5, 20), np.float32)
    found = chosen_by(scores, top, of_all)["weights"][: 5 * top].reshape(5, top)
    every = np.sort(scores.astype(np.float64), axis=1)[:, ::-1]
    likely = np.exp(every - every[:, :1])
    total = likely if of_all else likely[:, :top]
    np.testing.assert_allclose(found, likely[:, :top] / total.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("sigmoid", [0, 1])
def test_a_bias_changes_the_choice_alone(sigmoid: int) -> None:
    """The weights are those of the scores without it; also where it chooses experts far below the best."""
    rng = np.random.default_rng(5)
    scores = 30 * rng.standard_normal((6, 12), np.float32)
    likely = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares = likely / likely.sum(axis=1, keepdims=True)
    if sigmoid:
        shares = 1 / (1 + np.exp(-scores.astype(np.float64)))
        scores = shares.astype(np.float32)
    bias = rng.uniform(0, 2, 12).astype(np.float32)
    out = chosen_by(scores, 3, bias=bias, sigmoid=sigmoid)
    expected = np.argsort(-(shares + bias), axis=1, kind="stable")[:, :3]
    number = out["groups"][0]
    experts, firsts = out["groups"][1 : 1 + 2 * number].reshape(-1, 2).T
    of_pair = experts[np.searchsorted(firsts, np.arange(18), side="right") - 1]
    np.testing.assert_array_equal(of_pair[out["chosen"]], expected)
    assert (expected != np.argsort(-shares, axis=1)[:, :3]).any()
    own = np.take_along_axis(shares, expected, 1)
    weights = own / (own.sum(axis=1, keepdims=True) + (1e-6 if sigmoid else 0))
    np.testing.assert_allclose(out["weights"][:18].reshape(6, 3), weights, rtol=1e-4, atol=1e-12)


def test_a_forward_tells_how_many_experts_it_read(bundles: dict[str, Bundle]) -> None:
    engine = SimdEngine(bundles["26b"], threads=2)
    session = engine.open_session()
    found = []
    for tokens in ([7], [7, 300, 21, 90]):
        found.append(run(session, tokens, range(len(tokens))).experts)
        session.commit([])
    assert found[0] == 3
    assert 3 < found[1] <= 12
    engine.close()
    engine = SimdEngine(bundles["31b"], threads=1)
    assert run(engine.open_session(), [7], [0]).experts == 0
    engine.close()


def test_experts_are_a_class_of_weights(bundles: dict[str, Bundle]) -> None:
    layers, count, hidden, inner = 3, 12, 64, 32
    classes = BundleModels(bundles["26b"]).weight_classes()
    assert classes["experts"] == {"int4": layers * count * 3 * hidden * inner}
    assert "experts" not in BundleModels(bundles["31b"]).weight_classes()


def test_drafts_change_no_reply(bundles: dict[str, Bundle]) -> None:
    replies = generations.replies(bundles["26b"].path)
    assert max(map(max, replies.values())) < VOCAB
    for name, tokens in replies.items():
        assert tokens == replies[f"{name.rpartition(' ')[0]} none"], name
