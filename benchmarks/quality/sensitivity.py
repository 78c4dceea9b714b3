"""How much does the rounding of each kind of matrix cost?

    python -m benchmarks.quality.sensitivity FILE.gguf [--kinds q_proj down_proj] [--tokens 2000]

With int4 for one kind and int8 for all others. Prints, for every kind, the KL divergence from the file's weights in
float32, less that of int8 alone, and its quotient by the squared error of int4 relative to the weights:
`bit_budget.SENSITIVITY`. The text is that of `ondevice check`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np

import ondevice
from benchmarks.command import command_line, run_command, whole
from ondevice.bundle import Bundle
from ondevice.bundle_format.weight_format import INT4, INT8, WeightFormat
from ondevice.cli.bench.tables import table
from ondevice.quality import CHUNK, TEXT, measure, text_ids
from ondevice_export import bit_budget, export
from ondevice_export.bit_budget import kind_of
from ondevice_export.checkpoint.models import TargetCheckpoint, open_target
from ondevice_export.checkpoint.source import locate

KINDS = (*bit_budget.SENSITIVITY,)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("source", metavar="FILE.gguf")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", type=whole(CHUNK), default=6 * CHUNK)
    parser.add_argument("--threads", type=whole(1))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        reference = Bundle.open(export(arguments.source, place / "float", quantize="none", drafter="none"))
        ids = text_ids(TEXT.read_text("utf-8"), reference, reference)
        step = max(1, len(ids) // arguments.tokens)
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids) - CHUNK, CHUNK * step)]
        tokens = [token for chunk in chunks for token in chunk]
        with ondevice.load(reference.path, engine="ort", threads=arguments.threads) as original:
            found = {}
            for kind in ("none", *arguments.kinds):
                bundle = _export(arguments.source, place / "rounded", kind)
                with ondevice.load(bundle, engine="simd", threads=arguments.threads) as model:
                    first = model.manifest.first_token_id
                    found[kind] = measure(model.engine, original.engine, tokens, first).kl
                print(kind, found[kind], flush=True)
    errors = _errors(arguments.source)
    rows = []
    for kind in arguments.kinds:
        kl = found[kind].value - found["none"].value
        rows.append([kind, f"{kl:.4f}", f"{found[kind].error:.4f}", f"{errors[kind]:.5f}", f"{kl / errors[kind]:.2f}"])
    print(table(["kind", "KL", "±", "squared error", "sensitivity"], rows, left={"kind"}))


def _export(source: str, out: Path, kind: str) -> Path:
    """A bundle with int4 for the matrices of a kind and int8 for the others."""

    def choose(target: TargetCheckpoint, bits: float) -> dict[str, WeightFormat]:
        return {name: INT4 if kind_of(name) == kind else INT8 for name in target.matrices}

    with patch("ondevice_export.exporter.choose_formats", choose):
        return export(source, out, drafter="none", bits_per_weight=5.0)


def _errors(source: str) -> dict[str, float]:
    """The mean squared error of int4, relative to the weights' squares, of the matrices of every kind."""
    found: dict[str, list[float]] = {}
    with open_target(locate(source), lambda _: None, text_only=True) as target:
        for name in target.matrices:
            found.setdefault(kind_of(name), []).append(next(iter(bit_budget.errors(target, name))))
    return {kind: float(np.mean(each)) for kind, each in found.items()}


if __name__ == "__main__":
    run_command(main)
