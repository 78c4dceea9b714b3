import json
import threading

import pytest

from ondevice.bundle import Bundle
from ondevice.generate import costs as costs_file
from ondevice.generate.controller import Controller
from ondevice.generate.costs import Costs, CostsFile, KnownCosts
from ondevice.model import _costs_file
from ondevice.native import library
from tests.fixtures.model_made import BOS, load_toy, model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.generate.rounds import decoded
from tests.generate.simulation import DiceDrafter, World, simulate, speed

KEY = ["0.1.0", "a processor", "weights", "simd", "fp16", "2"]
KNOWN = KnownCosts(1e9, 1.0, {1: 1.0, 3: 1.04, 5: 1.08, 9: 1.16}, {"dice": {1: 0.02, 2: 0.04}}, {2: 1.02})
CHEAP_ROWS = World.linear(0.02, 0.9, draft=0.02)


@pytest.fixture
def file(tmp_path):
    return CostsFile(tmp_path / "costs", KEY)


def recalled(known: KnownCosts) -> Costs:
    costs = Costs()
    costs.recall(known)
    return costs


def test_what_was_written_is_read_by_the_same_key_alone(file, tmp_path):
    assert file.read() is None
    assert file.write(KNOWN)
    assert CostsFile(tmp_path / "costs", KEY).read() == KNOWN
    for changed in range(len(KEY)):
        key = [word + "x" * (index == changed) for index, word in enumerate(KEY)]
        assert CostsFile(tmp_path / "costs", key).read() is None
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_each_instruction_set_has_costs_of_its_own(tmp_path, monkeypatch):
    """Two rows cost 1.8 of one with `generic`, where no draft of one token pays, and 1.1 with `avx2`."""
    bundle, engine, paths = Bundle.open(write_bundle(tmp_path / "bundle")), ToyEngine(400), set()
    for name in ("generic", "avx2"):
        choice = library.choice()._replace(set=name)
        monkeypatch.setattr(library, "choice", lambda choice=choice: choice)
        paths.add(_costs_file(bundle, engine, "exact", 2).path)
    assert len(paths) == 2


def test_a_file_of_another_key_in_this_ones_place_is_ignored(file, tmp_path):
    other = CostsFile(tmp_path / "costs", [*KEY, "more"])
    other.write(KNOWN)
    other.path.rename(file.path)
    assert file.read() is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"row_s": 0.0},
        {"row_s": "fast"},
        {"row_s": 5e-324},
        {"key": None},
        {"forwards": {}},
        {"forwards": {"0": 1.0}},
        {"forwards": {"1": -1.0}},
        {"forwards": {"1": 0.0}},
        {"forwards": {"1": float("nan")}},
        {"forwards": {"1": float("inf")}},
        {"forwards": {"1": 1e9}},
        {"forwards": {"1": "1.0"}},
        {"forwards": {"1": True}},
        {"forwards": {"one": 1.0}},
        {"forwards": {"999999": 1.0}},
        {"forwards": [1.0]},
        {"shared": {"1": -1.0}},
        {"shared": []},
        {"shared": None},
        {"drafts": {"mtp": {"1": -1.0}}},
        {"drafts": {"mtp": {}}},
        {"drafts": {"mtp": 1.0}},
        {"drafts": None},
        {"measured_at": "yesterday"},
        {"measured_at": float("inf")},
        {"measured_at": 10**400},
        {"padding": "x" * 70_000},
    ],
)
def test_a_file_that_makes_no_sense_is_ignored(file, change):
    file.write(KNOWN)
    file.path.write_text(json.dumps({**json.loads(file.path.read_text()), **change}))
    assert file.read() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000, b"\0" * 100])
def test_a_damaged_file_is_ignored(file, content):
    file.write(KNOWN)
    file.path.write_bytes(content)
    assert file.read() is None
    file.path.unlink()
    file.path.mkdir()
    assert file.read() is None


def test_where_nothing_can_be_written_nothing_is(tmp_path):
    (tmp_path / "costs").write_text("not a directory")
    file = CostsFile(tmp_path / "costs", KEY)
    assert file.read() is None
    assert not file.write(KNOWN)
    assert not file.write(KNOWN)


def test_it_is_written_once_a_minute_at_most(file, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(costs_file, "monotonic", lambda: now[0])
    assert file.write(KNOWN)
    now[0] += costs_file.MIN_WRITE_INTERVAL_S / 2
    assert not file.write(KNOWN)
    now[0] += costs_file.MIN_WRITE_INTERVAL_S
    assert file.write(KNOWN)


def test_several_processes_may_write_it(tmp_path):
    """One CostsFile each, as processes have; whoever reads finds a whole file."""
    failures = []

    def work(number):
        for _ in range(40):
            own = CostsFile(tmp_path / "costs", KEY)
            known = KNOWN._replace(drafts={f"drafter {number}": {1: 0.5}})
            if not own.write(known) or own.read() is None:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(list((tmp_path / "costs").iterdir())) == 1


def test_a_second_process_drafts_the_right_length_from_its_first_rounds(file):
    costs = Costs()
    simulate(Controller(costs), DiceDrafter(), CHEAP_ROWS, 200)
    known = costs.known()
    assert known is not None
    file.write(known)
    again = file.read()
    assert again is not None
    first = simulate(Controller(recalled(again)), DiceDrafter(), CHEAP_ROWS, 10)
    assert first[0].drafted >= 4
    assert [this.drafted >= 4 for this in first].count(False) == 1  # a plain round, which is measured again
    cold = simulate(Controller(Costs()), DiceDrafter(), CHEAP_ROWS, 10)
    assert cold[0].drafted == 0


@pytest.mark.parametrize(
    "forwards",
    [
        {1: 1.0, 16: 1.0},  # drafts look free
        {1: 1.0, 2: 3000.0},  # and ruinous
        {1: 3000.0, 5: 0.01},
        {1000: 1.0},
    ],
)
@pytest.mark.parametrize("row_s", [1e-6, 1.0, 3000.0])
@pytest.mark.parametrize("chance", [0.0, 0.8])
def test_a_forged_file_does_little_harm(forwards, row_s, chance):
    """A dozen own measurements overrule it."""
    world = World.linear(0.2, chance)
    forged = KnownCosts(0.0, row_s, forwards, {"dice": {1: 1e-9}}, forwards)
    speeds = [speed(simulate(Controller(recalled(forged)), DiceDrafter(), world, 400, seed=s), world) for s in (1, 2)]
    cold = [speed(simulate(Controller(Costs()), DiceDrafter(), world, 400, seed=s), world) for s in (1, 2)]
    assert sum(speeds) > 0.7 * sum(cold)


def test_costs_recalled_are_passed_on_with_what_was_measured_since():
    costs = recalled(KNOWN)
    assert costs.known() == KNOWN
    for _ in range(20):
        costs.observe(decoded(1, 1.0))
        costs.observe(decoded(4, 1.16, draft_seconds=0.06))
    known = costs.known()
    assert known is not None
    assert known.forwards[4] == pytest.approx(1.1, rel=0.02)
    assert known.forwards[9] == pytest.approx(KNOWN.forwards[9], rel=0.02)
    assert Costs().known() is None


def test_a_model_starts_from_the_costs_of_another(file, tmp_path):
    bundle = write_bundle(tmp_path / "toy")
    prompt = [BOS, *[4, 5, 6] * 8]
    with load_toy(bundle) as without:
        assert without.generate(prompt, max_new_tokens=8).stats.costs_age_s is None
    with model_over(ToyEngine(400), bundle, costs_file=file) as model:
        model.generate(prompt, max_new_tokens=200, temperature=0.0)
    assert file.read() is not None
    with model_over(ToyEngine(400), bundle, costs_file=CostsFile(file.path.parent, KEY)) as model:
        stats = model.generate(prompt, max_new_tokens=8).stats
    assert stats.costs_age_s is not None
    assert 0 <= stats.costs_age_s < 600


def test_a_recalled_cost_that_keeps_drafts_from_being_made_is_corrected():
    """Three rows that another program's burst made as dear as three forwards, the others being right."""
    bad = KNOWN._replace(forwards={1: 1.0, 2: 1.02, 3: 20.0, 17: 25.0})
    rounds = simulate(Controller(recalled(bad)), DiceDrafter(), CHEAP_ROWS, 500)
    assert sum(this.drafted >= 4 for this in rounds[400:]) > 90


def test_costs_are_measured_within_the_context_of_the_engine():
    engine = ToyEngine(400)
    engine.context_length = 24
    assert set(costs_file.measure(engine).forwards) == {1, 3, 5, 6, 8, 12}


def test_preparing_a_model_measures_its_costs_once(file, tmp_path):
    bundle = write_bundle(tmp_path / "toy")
    with model_over(ToyEngine(400), bundle, costs_file=file) as model:
        model._scheduler.measure_costs()
        known = file.read()
        assert known is not None
        assert set(known.forwards) == set(costs_file.MEASURED_ROWS)
        model._scheduler.measure_costs()
    assert file.read() == known
