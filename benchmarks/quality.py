"""The loss of every format on a published model, and of llama.cpp's formats of the same weights.

    python -m benchmarks.quality FILE.gguf --json found.json [--formats int4 ...]
    python -m benchmarks.quality FILE.gguf --json found.json --llama DIRECTORY [--types Q8_0 Q4_0 ...]
    python -m benchmarks.quality --publish found.json ...

The truth are the weights of the file, dequantised: for llama.cpp to F16, by its own `llama-quantize`. `DIRECTORY` holds
`llama-quantize`, `llama-perplexity` and `llama-imatrix` (the source package of `llama-cpp-python` has their sources);
importance matrices are taken of the text with which `--calibrate` runs. Each file that llama.cpp quantised is then also
run by ondevice, whose figures have to be llama.cpp's within their errors. All are measured on the text of `ondevice
check`, in chunks of 512 tokens. A result is written as soon as it is there, and one that the file has already is not
measured again, so that a run can be interrupted.

`--publish` writes the table of docs/quality.md and benchmarks/RESULTS.md, and draws the page's picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ondevice
from benchmarks.picture import STYLE, Panel, text
from benchmarks.published import filled
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import is_plain, target_shapes
from ondevice.cli.bench.tables import table
from ondevice.cli.info import bundle_facts
from ondevice.quality import CHUNK, TEXT, measure, text_ids
from ondevice_export import export
from ondevice_export.calibration.source import TEXT as CALIBRATION_TEXT

RESULTS = Path(__file__).with_name("RESULTS.md")
PAGE = RESULTS.parents[1] / "docs" / "quality.md"
PICTURE = PAGE.with_suffix(".svg")

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
    _run(programs / "llama-quantize", "--allow-requantize", source, plain, "F16")
    _run(*perplexity, "-m", plain, "--kl-divergence-base", base)
    matrix = directory / "imatrix.gguf"
    for name in types:
        options: list[Any] = ["--token-embedding-type", "q8_0"]
        if TYPES[name]:
            if not matrix.exists():
                _run(programs / "llama-imatrix", "-m", plain, "-f", CALIBRATION_TEXT, "-o", matrix, "-c", CHUNK)
            options += ["--imatrix", matrix]
        rounded = directory / "rounded.gguf"
        _run(programs / "llama-quantize", *options, plain, rounded, name.split(",")[0])
        printed = _run(*perplexity, "-m", rounded, "--kl-divergence-base", base, "--kl-divergence")
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


def _run(*command: Any) -> str:
    """The output of a program; SystemExit if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"{words[0]}: {error.strerror}: give the directory of llama.cpp's programs") from error
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["it gives no reason"])[-1]
        raise SystemExit(f"{' '.join(words)} failed with exit code {done.returncode}: {last}")
    return done.stdout


def page_table(results: Sequence[Result]) -> str:
    """The tables of docs/quality.md, one per model."""
    parts = []
    for model in dict.fromkeys(each.model for each in results):
        own = [each for each in results if each.model == model]
        rows = [
            [
                each.format,
                f"{each.bytes / 1e6:.0f}",
                "" if math.isnan(each.bits) else f"{each.bits:.2f}",
                f"{each.kl:.4f} ± {each.kl_error:.4f}",
                f"{each.same_top:.1%}",
                f"{each.perplexity:.2f}",
            ]
            for each in sorted(own, key=lambda each: (each.by != "ondevice", each.kl))
        ]
        titles = [model, "MB", "bits per weight", "KL divergence", "same top token", "perplexity"]
        first = own[0]
        parts += [table(titles, rows, left={model}), ""]
        parts += [f"{first.tokens} tokens; perplexity of the file's own weights {first.reference_perplexity:.2f}.", ""]
    return "\n".join(parts)


def draw(results: Sequence[Result]) -> str:
    """KL divergence over bytes, on a logarithmic axis, a panel per model."""
    marks: list[str] = []
    models = list(dict.fromkeys(each.model for each in results))
    for number, model in enumerate(models):
        own = [each for each in results if each.model == model]
        panel = Panel(60 + 440 * number, 330, max(each.bytes for each in own) / 1e6 * 1.15, 3.0)
        marks += panel.frame(model, "megabytes of weights", ())
        for power, label in enumerate(("0.001", "0.01", "0.1", "1")):
            marks.append(f'<path class="grid" d="M{panel.left} {panel.y(power)}h{panel.width}"/>')
            marks.append(text(panel.left - 8, panel.y(power) + 4, label, "quiet", "end"))
        marks += [panel.mark(size, f"{size}") for size in range(0, int(panel.most_x) + 1, 50)]
        for each in own:
            kind = "simd" if each.by == "ondevice" else "llamacpp"
            x, y = panel.x(each.bytes / 1e6), panel.y(max(0.0, math.log10(each.kl) + 3))
            marks.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>')
            marks.append(text(x + 7, y + 4, each.format, "quiet"))
    width = 60 + 440 * len(models)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 340" width="{width}" height="340">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *marks, "</svg>\n"])


def publish(files: Sequence[Path]) -> None:
    """Write the table and the picture of docs/quality.md, and the table of the results."""
    results = [Result(**each) for file in files for each in json.loads(file.read_text("utf-8"))]
    picture = f"![KL divergence of every format over its bytes]({PICTURE.name})"
    measured = page_table(results)
    PAGE.write_text(filled(PAGE.read_text("utf-8"), f"\n## Measured\n\n{picture}\n\n{measured}"), "utf-8")
    RESULTS.write_text(filled(RESULTS.read_text("utf-8"), measured, "## What rounding costs"), "utf-8")
    PICTURE.write_text(draw(results), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, metavar="FILE.gguf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--llama", type=Path, metavar="DIRECTORY", help="measure llama.cpp instead, with its programs")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--tokens", type=int, metavar="N", help="use only the beginning of the text")
    parser.add_argument("--publish", nargs="+", type=Path, metavar="FILE", help="write the page and its picture")
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.publish)
        return
    if arguments.source is None or arguments.json is None:
        parser.error("name a GGUF file and --json FILE, or --publish")
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
