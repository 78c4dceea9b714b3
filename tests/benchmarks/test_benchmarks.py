"""Every benchmark runs on something small and prints its table; what numbers it finds is no test's business."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bundles.gemma4 import TARGETS
from benchmarks.bundles.shape import target_model
from benchmarks.command import INTERRUPTED, run_command
from benchmarks.drafts import controller
from benchmarks.memory import footprint
from benchmarks.memory.start import start
from benchmarks.memory.watch import Memory
from benchmarks.peers.llama_programs import LlamaBench, speeds_of
from benchmarks.quality import attention as quality
from benchmarks.speed import arm_model, batch, busy, experts, long_context, rows, streaming
from benchmarks.speed.projections import by_shape
from benchmarks.speed.tile_code import TileCode
from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.engines.protocol import Outputs
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.program import BundleModels
from ondevice.engines.simd.roofline import Roofline
from ondevice.errors import OndeviceError, UsageError
from tests.conftest import ROOT
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine

FACTS = {
    "bundle": "toy", "weights": "int4", "engine": "simd", "threads": 2, "processor": "a CPU", "system": "an OS",
    "versions": {"numpy": "2"}, "tokens": 40, "repeats": 3, "seconds": 3.0,
}  # fmt: skip


def test_attention_quality(reference_bundle: Path) -> None:
    session = quality.Variant("", "int8", quality.LOOKUP).session(Bundle.open(reference_bundle), 1)
    tokens = np.random.default_rng(0).integers(5, 4000, 3300).tolist()
    found = quality.missed(session, tokens)
    assert len(found) == 2
    assert all(0 <= best <= left < 1 for left, best in found)
    drafts, taken = quality.first_drafts(session, tokens)
    assert len(drafts) == len(taken) > 30


def test_streamed_weights(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["streaming", str(reference_bundle), "--rows", "1", "5", "--rounds", "1"])
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    streaming.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("| ") and line.split()[1].isdigit()] == ["1", "5"]
    slow, fast = streaming.Round(4.0, 3.0, 30e9), streaming.Round(3.0, 1.5, 60e9)
    assert streaming.lines(2, [slow, fast, slow]) == [
        ["2", "30.0", "2", "4000.00", "3000.00", "0.75"],
        ["2", "60.0", "1", "3000.00", "1500.00", "0.50"],
    ]
    assert [line[2] for line in streaming.lines(2, [slow, slow._replace(bandwidth=31e9)])] == ["2"]


def test_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "COUNTS", (1, 3))
    engine = ToyEngine(before=lambda _: time.sleep(0.002))
    with model_over(engine, write_bundle(tmp_path), max_sequences=4, cache_bytes=0) as model:
        found = batch.measure(model, tokens=10, repeats=2)
        request = batch.first_token(model, tokens=5)
    assert [each.sequences for each in found] == [1, 3]
    assert any(len(each) == 4 for each in engine.batches)
    output = 'log\n{"pl": 1, "speed_tg": 17.1, "speed_pp": 9}\n{"pl": 3, "speed_tg": 32.1}\n'
    assert speeds_of(output) == {1: 17.1, 3: 32.1}
    assert "first token after" in batch.report(found, request, speeds_of(output), FACTS)


def test_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "WARM_UP_S", 0.01)
    contender, loads = busy.Contender("simd", 1), [busy.Load.parse("0"), busy.Load.parse("1 nice")]
    assert list(map(str, loads)) == ["0", "1 nice"]
    with model_over(ToyEngine(), write_bundle(tmp_path)) as model:
        speeds = busy.measure({contender: model}, [], loads=loads, seconds=0.02, repeats=1)
    assert {(speed.contender, speed.load) for speed in speeds} == {("simd, 1", load) for load in loads}
    assert [one.name for one in busy.contenders(["simd"], 1)] == ["simd, 1"]


@pytest.mark.parametrize("drafter", controller.MAKERS)
def test_the_controller(drafter: str) -> None:
    assert controller.microseconds_per_round(controller.MAKERS[drafter](), 0.9, 120) > 0


def test_shapes_and_footprints(tmp_path: Path) -> None:
    model = target_model("E2B", tmp_path)
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in model.shapes.values()) == 4_628_569_379
    assert footprint.footprint("E2B").bundle_bytes == pytest.approx(3.04e9, rel=0.06)
    assert [line.split()[1] for line in footprint.report().splitlines()[2:]] == list(TARGETS)


def test_long_contexts(reference_bundle: Path) -> None:
    bundle = Bundle.open(reference_bundle)
    lines = long_context.report(bundle, 1, [64, 300], 1, ["fp16", "int8 lookup"]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fp16", "fp16", "int8 lookup", "int8 lookup"]


def test_projections(reference_bundle: Path) -> None:
    """Every matrix of the lower layers is counted once."""
    bundle = Bundle.open(reference_bundle)
    engine = SimdEngine(bundle, threads=1)
    steps = by_shape(engine._program.plan().steps)
    engine.close()
    counted = sum(inputs * outputs * len(plan) for (inputs, outputs, _, _), plan in steps.items())
    assert counted == rows.work_of(BundleModels(bundle).target).all_rows


class Recorder:
    """An engine that computes nothing and takes at most 48 rows, and its one session."""

    name = "simd"

    def __init__(self) -> None:
        self.length = 0
        self.forwards: list[tuple[int, int, list[int]]] = []
        self.target = type("Target", (), {"vocab_size": 100})()

    def open_session(self) -> Recorder:
        return self

    def max_rows(self, block: int = 1) -> int:
        return 48

    def snapshot(self) -> None:
        """Nothing to keep."""

    def forward(self, batch: Any) -> list[Outputs]:
        [given] = batch
        self.forwards.append((self.length, len(given.tree), list(given.wanted)))
        numbers = np.zeros((len(given.wanted), 1), np.float32)
        return [Outputs(numbers, numbers, experts=8.0 * len(given.tree))]

    def commit(self, path: Any) -> None:
        self.length += len(path)

    def rewind(self, length: int) -> int:
        self.length = length
        return length


def test_rows() -> None:
    engine, roofline = Recorder(), Roofline(bandwidth=1e9, peak=1e9)
    measurement: Any = type("Readings", (), {"read": lambda self: None})()
    found = rows.compare([engine], None, 1, measurement)  # type: ignore[list-item]
    assert set(found["simd"]) == {*rows.VERIFY, *rows.PREFILL}
    assert {tuple(wanted) for _, count, wanted in engine.forwards if count == 8} == {tuple(range(8))}
    work = rows.Work(all_rows=1_000_000, wanted_rows=250_000, all_bytes=8_000_000, wanted_bytes=2_000_000)
    assert work.least_seconds(roofline, 8, 8) == pytest.approx(0.02)
    table = rows.report({"simd": {1: [0.02], 8: [0.04, 0.01, 0.07]}, "ort": {1: [0.03], 8: [0.06]}}, work, roofline)
    assert table.splitlines()[2:] == [
        "|    1 |    20.0 |   30.0 |                 1.50 |             1.00 |        0.50 |",
        "|    8 |    40.0 |   60.0 |                 1.50 |             2.00 |        0.50 |",
    ]


def test_experts() -> None:
    found = experts.measure(Recorder(), rounds=2)  # type: ignore[arg-type]
    assert [count for count, each in found.items() if each.seconds] == [*experts.VERIFY, experts.PREFILL]
    assert "experts per layer" in experts.report(found, None)
    with pytest.raises(SystemExit, match=r"16\.1 GB of memory: 15\.0 GB of weights.* 16\.0 GB are available here"):
        experts.check_memory("26B-A4B", 15_000_000_000 + experts.ROOM, 16_000_000_000)


def test_the_model_of_arm_boards() -> None:
    board, blocks = arm_model.BOARDS[0], 1_000_000
    by_memory = blocks * arm_model.BLOCK_BYTES / board.bandwidth
    assert arm_model.seconds(board, blocks * arm_model.BLOCK_WEIGHTS, 0.0) == by_memory
    assert TileCode("neon-dotprod", [["sdot v0", "sdot v1", "fmla v2"]], 4).count("sdot") == 8


CHILD = """
import json, os
stats = dict(engine=os.environ["ONDEVICE_CACHE"], load_s=1.0, prefill_s=0.1, peak_rss_bytes=5, drafter="none")
print(json.dumps({"stats": stats}), flush=True)
"""


def test_a_start_has_caches_of_its_own(tmp_path: Path) -> None:
    one = start([sys.executable, "-c", CHILD], tmp_path)
    assert one.engine == str(tmp_path)
    assert 0 < one.first_token_s < 60
    status = "Name:\tpython\nVmHWM:\t  900 kB\nRssAnon:\t     500 kB\nRssFile:\t     300 kB\nRssShmem:\t      20 kB\n"
    assert Memory.parse(status) == Memory(500 * 1024, 320 * 1024)


def test_llama_cpp_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No such file or directory: give the path of llama-bench"):
        LlamaBench(tmp_path / "absent" / "llama-bench", Path("model.gguf"), threads=2)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UsageError("no such\nbundle"), "no such bundle", ""),
        (FileNotFoundError(2, "No such file or directory", "found.json"), "found.json: no such file or directory", ""),
        (ModuleNotFoundError("no openvino", name="openvino"), "needs the package openvino: pip install openvino", ""),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
    ],
)
def test_a_command_ends_with_one_line(
    raised: BaseException, code: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == (f"this {code}" if isinstance(raised, ModuleNotFoundError) else code)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("speed.rows BUNDLE --rounds 0", "argument --rounds: a whole number of at least 1, not '0'"),
        ("speed.rows BUNDLE --threads x", "argument --threads: a whole number of at least 1, not 'x'"),
        ("speed.batch BUNDLE --tokens -5", "argument --tokens: a whole number of at least 1, not '-5'"),
        ("speed.busy BUNDLE --seconds 0", "argument --seconds: a number of seconds above 0, not '0'"),
        ("speed.busy BUNDLE --seconds nan", "argument --seconds: a number of seconds above 0, not 'nan'"),
        ("speed.projections BUNDLE --rows 513", "argument --rows: a whole number from 1 to 512, not '513'"),
        ("drafts.own_layers BUNDLE --simulate 2", "argument --simulate: a number from 0 to 1, not '2'"),
        ("drafts.speculate BUNDLE --acceptance x", "argument --acceptance: a number from 0 to 1, not 'x'"),
        ("quality.sensitivity FILE --kinds nope", "argument --kinds: invalid choice: 'nope'"),
    ],
)
def test_an_option_out_of_range_is_one_line(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *options = command.split()
    monkeypatch.setattr("sys.argv", [module, *options])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("memory.frozen nowhere", "no bundle at nowhere"),
        ("publish.beside nowhere", "nowhere is no program: give the path of llama-bench"),
        ("publish.quality found.json", "found.json was not written by `benchmarks.quality.formats --json`"),
        ("quality.formats FILE.gguf --json found.json", "was not written by `benchmarks.quality.formats --json`"),
    ],
)
@pytest.mark.parametrize("found", ["{}", "[]", "[5]", '[{"model": "x"}]', "none"])
def test_a_wrong_file_is_noticed_before_the_work(
    command: str, said: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, *options = command.split()
    (tmp_path / "found.json").write_text(found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [module, *options])
    with pytest.raises((SystemExit, OndeviceError), match=said):
        import_module(f"benchmarks.{module}").main()


def test_every_command_ends_so() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        source = path.read_text("utf-8")
        if '__name__ == "__main__"' in source and path.parent.name != "peers":
            assert source.endswith('if __name__ == "__main__":\n    run_command(main)\n'), path
