"""How much does each format lose on a published model, and how much do those of llama.cpp?

    python -m benchmarks.quality.formats FILE.gguf --json found.json [--formats int4 ...]
    python -m benchmarks.quality.formats FILE.gguf --json found.json --llama PROGRAMS [--types Q8_0 Q4_0 ...]
    python -m benchmarks.quality.formats FILE.gguf --json found.json --speed [--llama PROGRAMS]

The truth are the weights of the file, dequantised: for llama.cpp to F16, by its own `llama-quantize`. `PROGRAMS` is a
directory with `llama-quantize`, `llama-perplexity`, `llama-imatrix` and `llama-bench` (the source package of
`llama-cpp-python` has their sources); importance matrices are taken of the text with which `--calibrate` runs. Each
file that llama.cpp quantised is then also run by ondevice, whose figures have to be llama.cpp's within their errors.
All are measured on the text of `ondevice check`, in chunks of 512 tokens. A result is written as soon as it is there,
and one that the file has already is not measured again, so that a run can be interrupted.

`--speed` adds the decoding speed to the results that a file has: 64 tokens in every format, all formats in turns, and
the median of the rounds. It needs a machine that does nothing else.

`benchmarks.publish.quality` writes the tables and the picture of such files into the pages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, cast

import numpy as np

import ondevice
from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.peers.llama_programs import decoding_speed, run_program
from ondevice import Model
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import is_plain, target_shapes
from ondevice.cli.bench.measure import PLAIN
from ondevice.cli.bench.speed import SpeedCase, SpeedTest, run_cases
from ondevice.cli.info import bundle_facts
from ondevice.engines.protocol import Engine, Outputs, Rows
from ondevice.quality import CHUNK, TEXT, Quality, measure, text_ids
from ondevice_export import export
from ondevice_export.calibration.source import TEXT as CALIBRATION_TEXT
from ondevice_export.gguf.file import GgufFile

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4, calibrated": {"quantize": "int4", "calibrate": ""},
    "int4-table": {"quantize": "int4-table"},
    "int4-table, calibrated": {"quantize": "int4-table", "calibrate": ""},
    "int4-affine": {"quantize": "int4-affine"},
    "int4-affine, calibrated": {"quantize": "int4-affine", "calibrate": ""},
    "4.5 bits, calibrated": {"bits_per_weight": 4.5, "calibrate": ""},
    "5 bits, calibrated": {"bits_per_weight": 5, "calibrate": ""},
    "5.5 bits": {"bits_per_weight": 5.5},
    "5.5 bits, calibrated": {"bits_per_weight": 5.5, "calibrate": ""},
}
"""Formats of ondevice, and the options of their exports."""

TYPES = {
    "Q8_0": False,
    "Q6_K": False,
    "Q4_0": False,
    "Q4_0, importance matrix": True,
    "IQ4_XS, importance matrix": True,
}
"""Formats of llama.cpp, and whether they have an importance matrix. The token table is Q8_0 in all, as here."""

SAME_FILE = ": the same file"
"""Ends the name of a type of llama.cpp whose file was run by ondevice."""

SPEED_TEST = SpeedTest(0, 64)
SPEED_ROUNDS = 5


@dataclass(frozen=True)
class Result:
    """A line of the table.

    by : ondevice or llama.cpp
    bytes : of the matrices, token table included
    bits : the same per weight
    tokens_per_second : of decoding; NaN where it was not measured
    """

    model: str
    by: str
    format: str
    bytes: int
    bits: float
    tokens: int
    kl: float
    kl_error: float
    same_top: float
    same_top_error: float
    perplexity: float
    reference_perplexity: float
    tokens_per_second: float = math.nan


class Truth:
    """The weights of a file in float32, and the text on which others are compared with them.

    source : the file
    directory : keeps the weights in float32 and what they predict, which is computed once
    tokens : number of tokens of the text; None for all
    """

    def __init__(self, source: Path, directory: Path, tokens: int | None) -> None:
        self._source = source
        place = directory / "float"
        if not place.exists():
            export(source, place, quantize="none", drafter="none")
        self._reference = Bundle.open(place)
        self._ids = text_ids(TEXT.read_text("utf-8"), self._reference, self._reference)[:tokens]
        self._logits = directory / f"float-{len(self._ids)}.dat"

    def compare(self, place: Path, name: str) -> Result:
        """Compare a bundle with it."""
        bundle = Bundle.open(place)
        with ondevice.load(place) as model:
            found = self._measure(model)
        bits = bundle_facts(bundle)["bits_per_weight"]["average"]
        return Result(
            self._source.stem, "ondevice", name, round(bits * _weights(bundle) / 8), bits, found.tokens, found.kl.value,
            found.kl.error, found.same_top.value, found.same_top.error, found.perplexity.value,
            found.reference_perplexity.value,
        )  # fmt: skip

    def _measure(self, model: Model) -> Quality:
        first, recorded = model.manifest.first_token_id, self._logits
        if recorded.exists():
            with recorded.open("rb") as file:
                reader = _Recorded(file, model.manifest.target.vocab_size, model.context_length)
                return measure(model.engine, cast(Engine, reader), self._ids, first)
        unfinished = recorded.with_name(f"unfinished-{recorded.name}")
        with ondevice.load(self._reference.path, engine="ort") as original, unfinished.open("wb") as file:
            found = measure(model.engine, cast(Engine, _Recorder(original.engine, file)), self._ids, first)
        unfinished.rename(recorded)
        return found


class _Recorder:
    """An engine, for `measure`, whose logits are written to a file."""

    def __init__(self, engine: Engine, file: BinaryIO) -> None:
        self._engine, self._file = engine, file
        self.context_length, self.open_session = engine.context_length, engine.open_session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        found = self._engine.forward(batch)
        for each in found:
            self._file.write(each.logits.tobytes())
        return found


class _Recorded:
    """An engine, for `measure`, and its session: gives the logits of a file in the order in which they were written."""

    def __init__(self, file: BinaryIO, vocab_size: int, context_length: int) -> None:
        self._file, self._vocab_size, self.context_length = file, vocab_size, context_length

    def open_session(self) -> _Recorded:
        return self

    def max_rows(self) -> int:
        return self.context_length

    def commit(self, path: Sequence[int]) -> None:
        """Does nothing: every row was computed with all rows before it."""

    def close(self) -> None:
        """Does nothing: the file is read on by the next session."""

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        [rows] = batch
        read = self._file.read(4 * len(rows.wanted) * self._vocab_size)
        logits = np.frombuffer(read, np.float32).reshape(len(rows.wanted), self._vocab_size)
        return [Outputs(logits, np.empty((len(logits), 0), np.float32))]


def measure_formats(source: Path, formats: Sequence[str], directory: Path, tokens: int | None) -> Iterator[Result]:
    """Export a file in each format, and compare the bundles with its weights in float32."""
    truth = Truth(source, directory, tokens)
    for name in formats:
        yield truth.compare(export(source, directory / "rounded", drafter="none", **FORMATS[name]), name)


def _weights(bundle: Bundle) -> int:
    """Number of weights in the target's matrices."""
    shapes = target_shapes(bundle.manifest.target)
    return sum(math.prod(shape) for name, shape in shapes.items() if not is_plain(name, shape))


def measure_llama(
    source: Path, types: Sequence[str], programs: Path, directory: Path, tokens: int | None
) -> Iterator[Result]:
    """Quantise a file with llama.cpp, let it compare each result with the weights in F16, and compare it here too."""
    truth = Truth(source, directory, tokens)
    plain, base = _as_f16(source, programs, directory), directory / f"f16-{tokens}.dat"
    chunks = [] if tokens is None else ["--chunks", str(tokens // CHUNK)]
    perplexity: list[Any] = [programs / "llama-perplexity", "-f", TEXT, "-c", CHUNK, "-b", CHUNK, *chunks]
    _made(base, lambda place: run_program(*perplexity, "-m", plain, "--kl-divergence-base", place))
    for name in types:
        rounded = quantize_llama(plain, name, programs, directory)
        printed = run_program(*perplexity, "-m", rounded, "--kl-divergence-base", base, "--kl-divergence").stdout
        yield _llama_result(source, name, printed, *_size(rounded))
        yield truth.compare(export(rounded, directory / "rounded", drafter="none"), name + SAME_FILE)


def _as_f16(source: Path, programs: Path, directory: Path) -> Path:
    """The path of a file's weights in F16, which llama.cpp has dequantised."""
    program = programs / "llama-quantize"
    return _made(directory / "f16.gguf", lambda place: run_program(program, "--allow-requantize", source, place, "F16"))


def _made(path: Path, make: Callable[[Path], object]) -> Path:
    """A file, made if there is none yet; until it is complete it has another name."""
    if not path.exists():
        unfinished = path.with_name(f"unfinished-{path.name}")
        make(unfinished)
        unfinished.rename(path)
    return path


def quantize_llama(plain: Path, name: str, programs: Path, directory: Path) -> Path:
    """The path of a file that llama.cpp has quantised to one of `TYPES`."""
    options: list[Any] = ["--token-embedding-type", "q8_0"]
    if TYPES[name]:
        text = ["-f", CALIBRATION_TEXT, "-c", CHUNK, "--no-ppl"]
        make = partial(run_program, programs / "llama-imatrix", "-m", plain, *text, "-o")
        options += ["--imatrix", _made(directory / "imatrix.gguf", make)]
    program, kind = programs / "llama-quantize", name.partition(",")[0]
    path = directory / f"{name.replace(',', ' with')}.gguf"  # llama-bench takes a comma for the end of a path
    return _made(path, lambda place: run_program(program, *options, plain, place, kind))


def _size(gguf: Path) -> tuple[int, float]:
    """Bytes of a file's matrices, and bits per weight."""
    file = GgufFile(gguf)
    matrices = [entry for entry in file.entries.values() if len(entry.shape) > 1]
    file.close()
    size = sum(entry.nbytes for entry in matrices)
    return size, 8 * size / sum(math.prod(entry.shape) for entry in matrices)


def _llama_result(source: Path, name: str, printed: str, size: int, bits: float) -> Result:
    """The figures that `llama-perplexity --kl-divergence` prints."""

    def figure(label: str) -> tuple[float, float]:
        found = re.search(rf"^{re.escape(label)}\s*:\s*([-\d.]+)\s*±\s*([-\d.]+)", printed, re.MULTILINE)
        if found is None:
            raise SystemExit(f"llama-perplexity printed no {label!r}")
        return float(found[1]), float(found[2])

    kl, same = figure("Mean    KLD"), figure("Same top p")
    chunks = len(re.findall(r"^\s*\d+\s+[\d.]+ ±", printed, re.MULTILINE))
    return Result(
        source.stem, "llama.cpp", name, size, bits, chunks * (CHUNK - 1 - CHUNK // 2), *kl, same[0] / 100,
        same[1] / 100, figure("Mean PPL(Q)")[0], figure("Mean PPL(base)")[0],
    )  # fmt: skip


def with_speeds(
    source: Path, results: Sequence[Result], programs: Path | None, directory: Path, threads: int
) -> list[Result]:
    """Results with the decoding speed of each format, where they have none; llama.cpp's need its programs.

    Calibration changes neither formats nor kernels: such a format has the speed of the one without it.
    """
    missing = [each for each in results if math.isnan(each.tokens_per_second) and SAME_FILE not in each.format]
    known = {_speed_name(each): each.tokens_per_second for each in results if not math.isnan(each.tokens_per_second)}
    with ExitStack() as stack:
        runs: dict[tuple[str, str], Callable[[], float]] = {}
        for each in missing:
            if (name := _speed_name(each)) in known:
                continue
            if each.by == "ondevice" and name not in runs:
                plain = {option: value for option, value in FORMATS[each.format].items() if option != "calibrate"}
                bundle = export(source, directory / name[1], drafter="none", **plain)
                runs[name] = partial(_speed, stack.enter_context(ondevice.load(bundle, threads=threads)))
            elif each.by != "ondevice" and programs is not None:
                gguf = quantize_llama(_as_f16(source, programs, directory), name[1], programs, directory)
                runs[name] = partial(decoding_speed, programs / "llama-bench", gguf, threads, SPEED_TEST.new)
        rounds = [{name: run() for name, run in runs.items()} for _ in range(SPEED_ROUNDS)]
    speeds = known | {name: median(found[name] for found in rounds) for name in runs}
    return [
        replace(each, tokens_per_second=speeds[_speed_name(each)]) if each in missing and _speed_name(each) in speeds
        else each
        for each in results
    ]  # fmt: skip


def _speed_name(result: Result) -> tuple[str, str]:
    return result.by, result.format.removesuffix(", calibrated")


def _speed(model: Model) -> float:
    rows, _ = run_cases(model, [SpeedCase(SPEED_TEST, PLAIN)], 1)
    return rows[0].speed


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="the results")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--llama", type=Path, metavar="PROGRAMS", help="measure llama.cpp instead, with its programs")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="use only the beginning of the text")
    parser.add_argument("--speed", action="store_true", help="add the decoding speed of the results of the file")
    text = "keep this model's files there, where a further run finds them (default: a temporary directory)"
    parser.add_argument("--files", type=Path, metavar="DIRECTORY", help=text)
    add_threads(parser)
    arguments = parser.parse_args()
    source, place, programs = arguments.source, arguments.json, arguments.llama
    results = read_results(place) if place.exists() else []
    by = "llama.cpp" if programs else "ondevice"
    known = {each.format for each in results if each.by == by}
    wanted = [name for name in (arguments.types if programs else arguments.formats) if name not in known]
    with tempfile.TemporaryDirectory() if arguments.files is None else nullcontext(arguments.files) as name:
        directory = Path(name)
        if arguments.speed:
            write_results(place, with_speeds(source, results, programs, directory, arguments.threads))
            return
        if programs:
            found = measure_llama(source, wanted, programs, directory, arguments.tokens)
        else:
            found = measure_formats(source, wanted, directory, arguments.tokens)
        for each in found:
            results.append(each)
            write_results(place, results)
            print(each, flush=True)


def read_results(path: Path) -> list[Result]:
    """The results in a file.

    Raises:
        SystemExit: there are none.
    """
    try:
        found = [Result(**each) for each in json.loads(path.read_text("utf-8"))]
    except (ValueError, TypeError):
        found = []
    if not found:
        raise SystemExit(f"{path} was not written by `benchmarks.quality.formats --json`")
    return found


def write_results(path: Path, results: Sequence[Result]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(each) for each in results], indent=1), "utf-8")


if __name__ == "__main__":
    run_command(main)
