"""How much does each format lose on a published model, and how much do those of llama.cpp?

    python -m benchmarks.quality.formats FILE.gguf --json found.json [--formats int4 ...]
    python -m benchmarks.quality.formats FILE.gguf --json found.json --llama DIRECTORY [--types Q8_0 Q4_0 ...]

The truth are the weights of the file, dequantised: for llama.cpp to F16, by its own `llama-quantize`. `DIRECTORY` holds
`llama-quantize`, `llama-perplexity` and `llama-imatrix` (the source package of `llama-cpp-python` has their sources);
importance matrices are taken of the text with which `--calibrate` runs. Each file that llama.cpp quantised is then also
run by ondevice, whose figures have to be llama.cpp's within their errors. All are measured on the text of `ondevice
check`, in chunks of 512 tokens. A result is written as soon as it is there, and one that the file has already is not
measured again, so that a run can be interrupted.

`benchmarks.publish.quality` writes the tables and the picture of such files into the pages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ondevice
from benchmarks.command import command_line
from benchmarks.peers.llama_programs import run_program
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import is_plain, target_shapes
from ondevice.cli.info import bundle_facts
from ondevice.quality import CHUNK, TEXT, measure, text_ids
from ondevice_export import export
from ondevice_export.calibration.source import TEXT as CALIBRATION_TEXT

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4, calibrated": {"quantize": "int4", "calibrate": ""},
    "int4-table": {"quantize": "int4-table"},
    "int4-table, calibrated": {"quantize": "int4-table", "calibrate": ""},
    "int4-affine": {"quantize": "int4-affine"},
    "int4-affine, calibrated": {"quantize": "int4-affine", "calibrate": ""},
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


@dataclass(frozen=True)
class Result:
    """A line of the table.

    by : ondevice or llama.cpp
    bytes : of the weights: in memory, or of the GGUF file
    bits : bits per weight of the matrices, token table included
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


class Truth:
    """The weights of a file in float32, and the text on which others are compared with them.

    source : the file
    tokens : number of tokens of the text; None for all
    """

    def __init__(self, source: Path, directory: Path, tokens: int | None) -> None:
        self._source = source
        self._reference = Bundle.open(export(source, directory / "float", quantize="none", drafter="none"))
        self._ids = text_ids(TEXT.read_text("utf-8"), self._reference, self._reference)[:tokens]

    def compare(self, place: Path, name: str) -> Result:
        """Compare a bundle with it."""
        bundle = Bundle.open(place)
        with ondevice.load(self._reference.path, engine="ort") as original, ondevice.load(place) as model:
            found = measure(model.engine, original.engine, self._ids, model.manifest.first_token_id)
        bits = bundle_facts(bundle)["bits_per_weight"]["average"]
        return Result(
            self._source.stem, "ondevice", name, round(bits * _weights(bundle) / 8), bits, found.tokens, found.kl.value,
            found.kl.error, found.same_top.value, found.same_top.error, found.perplexity.value,
            found.reference_perplexity.value,
        )  # fmt: skip


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
    plain, base = directory / "f16.gguf", directory / "f16.dat"
    chunks = [] if tokens is None else ["--chunks", str(tokens // CHUNK)]
    perplexity: list[Any] = [programs / "llama-perplexity", "-f", TEXT, "-c", CHUNK, "-b", CHUNK, *chunks]
    run_program(programs / "llama-quantize", "--allow-requantize", source, plain, "F16")
    run_program(*perplexity, "-m", plain, "--kl-divergence-base", base)
    matrix = directory / "imatrix.gguf"
    for name in types:
        options: list[Any] = ["--token-embedding-type", "q8_0"]
        if TYPES[name]:
            if not matrix.exists():
                run_program(programs / "llama-imatrix", "-m", plain, "-f", CALIBRATION_TEXT, "-o", matrix, "-c", CHUNK)
            options += ["--imatrix", matrix]
        rounded = directory / "rounded.gguf"
        run_program(programs / "llama-quantize", *options, plain, rounded, name.split(",")[0])
        printed = run_program(*perplexity, "-m", rounded, "--kl-divergence-base", base, "--kl-divergence").stdout
        yield _llama_result(source, name, rounded.stat().st_size, printed)
        yield truth.compare(export(rounded, directory / "rounded", drafter="none"), f"{name}: the same file")


def _llama_result(source: Path, name: str, size: int, printed: str) -> Result:
    """The figures that `llama-perplexity --kl-divergence` prints."""

    def figure(label: str) -> tuple[float, float]:
        found = re.search(rf"^{re.escape(label)}\s*:\s*([-\d.]+)\s*±\s*([-\d.]+)", printed, re.MULTILINE)
        if found is None:
            raise SystemExit(f"llama-perplexity printed no {label!r}")
        return float(found[1]), float(found[2])

    kl, same = figure("Mean    KLD"), figure("Same top p")
    chunks = len(re.findall(r"^\s*\d+\s+[\d.]+ ±", printed, re.MULTILINE))
    return Result(
        source.stem, "llama.cpp", name, size, math.nan, chunks * (CHUNK - 1 - CHUNK // 2), *kl, same[0] / 100,
        same[1] / 100, figure("Mean PPL(Q)")[0], figure("Mean PPL(base)")[0],
    )  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="the results")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--llama", type=Path, metavar="DIRECTORY", help="measure llama.cpp instead, with its programs")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--tokens", type=int, metavar="N", help="use only the beginning of the text")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text("utf-8")) if arguments.json.exists() else []
    by = "llama.cpp" if arguments.llama else "ondevice"
    known = {each["format"] for each in results if each["by"] == by}
    wanted = [name for name in (arguments.types if arguments.llama else arguments.formats) if name not in known]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if arguments.llama:
            found = measure_llama(arguments.source, wanted, arguments.llama, directory, arguments.tokens)
        else:
            found = measure_formats(arguments.source, wanted, directory, arguments.tokens)
        for each in found:
            results.append(dataclasses.asdict(each))
            arguments.json.write_text(json.dumps(results, indent=1), "utf-8")
            print(each, flush=True)


if __name__ == "__main__":
    main()
