"""Gain of the exporter's search for int4 scales over using each block's peak, of a table, and of minimums.

    python -m benchmarks.scale_search [CHECKPOINT]

Mean squared error relative to the weights' mean square. All matrices are quantised to int4, also those that an export
would store otherwise. Both alternatives have blocks of 32 and fp16 scales too: `absmax` maps the peak to 7, `Q4_0` to
-8, which has one level more on the peak's side. `table` is the format with unevenly spaced levels, whose scales are
searched for too. `affine` has fp16 minimums besides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE
from ondevice.cli.bench.tables import table, versions, versions_line
from ondevice_export.checkpoint.models import TargetCheckpoint, open_target
from ondevice_export.checkpoint.source import locate
from ondevice_export.quantize import BLOCK, dequantize, quantize

FloatArray = npt.NDArray[np.float32]

REFERENCE = Path(__file__).parent.parent / "models" / "reference" / "target"
CHUNK = 1 << 21
"""Weights processed at a time."""
RANDOM_WEIGHTS = 1 << 22


def searched(weights: FloatArray) -> FloatArray:
    """[n, 32], quantised as the exporter does."""
    return dequantize(quantize(weights, INT4), INT4)


def absmax(weights: FloatArray) -> FloatArray:
    """[n, 32] with each block's largest magnitude at code 7."""
    return _round_to_scale(weights, np.abs(weights).max(axis=1) / np.float32(7))


def q4_0(weights: FloatArray) -> FloatArray:
    """[n, 32] with each block's peak, sign and all, at code -8, as llama.cpp's Q4_0 has it."""
    peaks = np.take_along_axis(weights, np.abs(weights).argmax(axis=1)[:, None], axis=1)[:, 0]
    return _round_to_scale(weights, peaks / np.float32(-8))


def _round_to_scale(weights: FloatArray, scales: FloatArray) -> FloatArray:
    scales = scales.astype(np.float16).astype(np.float32)[:, None]
    codes = np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)
    return np.clip(np.rint(codes), -8, 7).astype(np.float32) * scales


def affine(weights: FloatArray) -> FloatArray:
    """[n, 32] with a scale and a minimum, half a bit per weight more, quantised as the exporter does."""
    return dequantize(quantize(weights, INT4_AFFINE), INT4_AFFINE)


def looked_up(weights: FloatArray) -> FloatArray:
    """[n, 32] with levels that are not evenly spaced, quantised as the exporter does."""
    return dequantize(quantize(weights, INT4_TABLE), INT4_TABLE)


METHODS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "absmax": absmax,
    "Q4_0": q4_0,
    "search": searched,
    "table": looked_up,
    "affine": affine,
}


@dataclass
class Errors:
    """Sums over weights: their number and squares, and every method's squared errors."""

    count: int = 0
    square: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METHODS, 0.0))

    def add(self, weights: FloatArray) -> None:
        blocks = np.ascontiguousarray(weights).reshape(-1, BLOCK)
        self.count += blocks.size
        self.square += _square(blocks)
        for name, method in METHODS.items():
            self.lost[name] += _square(blocks - method(blocks))

    def include(self, other: Errors) -> None:
        self.count += other.count
        self.square += other.square
        for name, lost in other.lost.items():
            self.lost[name] += lost

    def share(self, method: str) -> float:
        """Mean squared error over mean square."""
        return self.lost[method] / self.square if self.square else 0.0

    def gain(self, method: str) -> float:
        """The share of a method's error that the search saves."""
        return 1.0 - self.lost["search"] / self.lost[method] if self.lost[method] else 0.0


def _square(values: FloatArray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def measure(target: TargetCheckpoint) -> dict[str, Errors]:
    """Errors by kind of matrix, such as `q_proj`, and under `all` for the whole checkpoint."""
    kinds: dict[str, Errors] = {}
    for name, shape in target.shapes.items():
        if len(shape) == 2 and shape[1] % BLOCK == 0:
            errors = kinds.setdefault(name.split(".")[-2], Errors())
            for weights in _chunks(target, name):
                errors.add(weights)
    overall = Errors()
    for errors in kinds.values():
        overall.include(errors)
    return {**kinds, "all": overall}


def _chunks(target: TargetCheckpoint, name: str) -> Iterator[FloatArray]:
    rows, width = target.shapes[name]
    step = max(1, CHUNK // width)
    for first in range(0, rows, step):
        yield target.checkpoint.rows(name, first, min(rows, first + step))


def normal() -> Errors:
    """The same for normally distributed weights."""
    errors = Errors()
    errors.add(np.random.default_rng(0).standard_normal((RANDOM_WEIGHTS // BLOCK, BLOCK), np.float32))
    return errors


def report(kinds: dict[str, Errors], name: str) -> str:
    """Markdown: a line per kind of matrix, and what it was measured on."""
    cells = [
        [
            kind,
            f"{errors.count / 1e6:.2f}",
            *(f"{1e3 * errors.share(method):.3f}" for method in METHODS),
            f"{errors.gain('absmax'):.1%}",
            f"{errors.gain('Q4_0'):.1%}",
        ]
        for kind, errors in kinds.items()
    ]
    titles = ["matrices", "million weights", *(f"{method} e-3" for method in METHODS), "less than absmax", "than Q4_0"]
    facts = {"versions": versions(["numba", "numpy"])}
    return "\n".join(
        [
            table(titles, cells, left={"matrices"}),
            "",
            f"{name}, all matrices as int4 in blocks of {BLOCK}: mean squared error over mean square, in thousandths",
            versions_line(facts),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(REFERENCE), help="a directory (default: the reference)")
    checkout = locate(parser.parse_args().checkpoint)
    with open_target(checkout, lambda _note: None) as target:
        kinds = measure(target)
    print(report({**kinds, "random normal": normal()}, checkout.id))


if __name__ == "__main__":
    main()
