from types import SimpleNamespace

import pytest

from benchmarks.drafts import speculate
from benchmarks.drafts.speculate import report
from benchmarks.drafts.speculation import AUTO, FIRST_AUTO, PLAIN, Bench, Block, Cell, DraftStepCost, Run
from ondevice.generate.stats import Round, Stats
from tests.fixtures.toy_engine import ToyEngine

FACTS = {
    "bundle": "toy",
    "weights": "int4",
    "engine": "simd",
    "threads": 2,
    "processor": "CPU",
    "system": "OS",
    "versions": {"ondevice": "1"},
    "tokens": 4,
    "prompt_tokens": 3,
    "siblings": None,
    "different_runs": 0,
}
REPORT = """\
Speed-up over plain decoding, **simulated acceptance**:

| acceptance |    2 | auto |
| ---------: | ---: | ---: |
|        0.6 | 2.00 | 0.80 |

`auto, first` is a generation in which `auto` knows nothing yet; `auto` has learnt from that one.

What `auto` did:

| acceptance | draft | drafted/round | tokens/round | speed-up |
| ---------: | ----- | ------------: | -----------: | -------: |
|        0.6 | auto  |          0.00 |         1.00 |     0.80 |

A real MTP draft step takes 1.00 ms, 0.020 of a forward of one row (50.0 ms); every drafted token above pays for one.

toy (int4), engine simd, 2 threads, CPU, OS; plain decoding 10.0 to 10.0 tokens/s, median 10.0
3 runs of 4 tokens after 3, plain decoding in turn with the others; every run emitted the tokens of plain decoding
ondevice 1"""


def cell_of(length, seconds, rounds):
    stats = Stats()
    for this in rounds:
        stats.add(this)
    return Cell(length, runs=[Run((1, 2, 3, 4, 5), seconds, stats)])


@pytest.fixture
def block():
    single, double = Round((1,)), Round((1, 2), drafted=2, accepted=1)
    plain, auto = cell_of(PLAIN, 0.4, [single] * 4), cell_of(AUTO, 0.5, [single] * 4)
    return Block(0.6, plain, (cell_of("2", 0.2, [double] * 2), auto))


def test_a_report_without_auto_says_nothing_of_it(block):
    made = report([Block(block.acceptance, block.plain, block.cells[:1])], DraftStepCost(0.001, 0.05), FACTS)
    before, _, after = REPORT.partition("`auto, first`")
    after = after[after.index("A real MTP draft") :].replace("3 runs", "2 runs")
    assert made == f"{before}{after}".replace(" auto |", "").replace(" ---: | ---: |\n", " ---: |\n").replace(
        " 0.80 |", ""
    )


def test_the_report(block):
    assert report([block], DraftStepCost(0.001, 0.05), FACTS) == REPORT


def test_every_way_of_decoding_takes_its_turn():
    bench = Bench.prepare(ToyEngine(), (2, 3, 5), 12)
    assert len(bench.continuation) == 13
    progress = []
    blocks = list(bench.measure((0.0, 1.0), ("1", "3", AUTO), 2, lambda: progress.append(1)))
    assert len(progress) == 2 * 4 * 2
    for block in blocks:
        cells = (block.plain, *block.cells)
        assert [(cell.length, len(cell.runs)) for cell in cells] == [
            (PLAIN, 2),
            ("1", 2),
            ("3", 2),
            (AUTO, 2),
            (FIRST_AUTO, 1),
        ]
        assert {run.token_ids for cell in cells for run in cell.runs} == {bench.continuation}
    never, always = blocks
    assert never.cells[1].tokens_per_round == 1
    assert always.cells[1].tokens_per_round == 4


@pytest.fixture
def toy(monkeypatch):
    manifest = SimpleNamespace(name="toy", weights="int4")
    monkeypatch.setattr("benchmarks.drafts.speculate.Bundle.open", lambda path: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(speculate, "open_engine", lambda name, bundle, threads: ToyEngine())


def test_the_command(toy, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["speculate", "anything", "--quick", "--tokens", "6"])
    assert speculate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].replace(" ", "") == "|acceptance|1|2|4|auto|auto,first|"
    assert sum(line.startswith("|") for line in lines) == 2 * (2 + 6)


@pytest.mark.parametrize("options", [["--acceptance", "1.5"], ["--lengths", "9"], ["--quick", "--lengths", "1"]])
def test_what_cannot_be_simulated(options, monkeypatch):
    monkeypatch.setattr("sys.argv", ["speculate", "x", *options])
    with pytest.raises(SystemExit, match="2"):
        speculate.main()
