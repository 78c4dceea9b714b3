"""How long does an export of a real shape take, and does it stay within 1.5 GB of memory?

    python -m benchmarks.memory.export [SIZE] [--out BUNDLE] [--zeros]
    python -m benchmarks.memory.export [SIZE] --calibrate

Writes a bf16 checkpoint of random weights, 10.2 GB for E2B, and exports it in a process of its own. The bound is 1.5 GB
resident, and 3 GB with `--calibrate`, which runs the built-in text with the published tokenizer of Gemma 3. Where the
disk has no room for a checkpoint, its weights can be zeros in a file that takes none.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from benchmarks.bundles.gemma4 import TARGETS, target_fields
from benchmarks.command import command_line, run_command
from models.published import fetch
from ondevice import machine
from ondevice.bundle_format.tensor_table import Shapes
from ondevice.cli.bench.tables import table
from ondevice_export.checkpoint.models import checkpoint_shapes
from ondevice_export.checkpoint.named_tensors import TensorNames
from ondevice_export.export_options import WEIGHT_FORMATS
from ondevice_export.families import read_target

BOUND_GB, CALIBRATED_BOUND_GB = 1.5, 3.0
PREFIX = "model."
BLOCK = 1 << 24
"""Random weights made; they repeat, which no part of an export notices."""
TITLES = (
    "model",
    "weights",
    "quantize",
    "seconds",
    "CPU seconds",
    "M weights per CPU second",
    "peak RSS, GB",
    "bundle, GB",
)


def write_checkpoint(directory: Path, size: str, *, zeros: bool) -> int:
    """Write config.json and model.safetensors; returns the number of weights."""
    fields = target_fields(size)
    (directory / "config.json").write_text(json.dumps(fields))
    shapes = checkpoint_shapes(read_target(fields, size).target, TensorNames(PREFIX))
    header = json.dumps(_header(shapes)).encode()
    total = sum(map(math.prod, shapes.values()))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        if zeros:
            file.truncate(file.tell() + 2 * total)
        else:
            _write_weights(file, total)
    return total


def _write_weights(file: BinaryIO, total: int) -> None:
    weights = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    block = (weights.view(np.uint32) >> 16).astype(np.uint16)
    with tqdm(total=total, unit="weight", unit_scale=True, desc="write", disable=None) as bar:
        for start in range(0, total, BLOCK):
            part = block[: total - start]
            file.write(part.data)
            bar.update(len(part))


def _header(shapes: Shapes) -> dict[str, Any]:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def add_tokenizer(directory: Path) -> None:
    """Copy Gemma 3's tokenizer into a checkpoint.

    Raises:
        NotFetchedError: it cannot be had.
    """
    found = fetch("gemma3-tokenizer", lambda message: print(message, file=sys.stderr))
    for file in found.iterdir():
        shutil.copy(file, directory)


@dataclass(frozen=True)
class Measurement:
    seconds: float
    cpu_seconds: float
    peak_gb: float
    bundle_gb: float


def measure(target: Path, out: Path, options: list[str]) -> Measurement:
    """Export in a child process."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "ondevice", "export", str(target), "--out", str(out), "--drafter", "none"]
    command += ["--no-prepare", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    size = sum(file.stat().st_size for file in out.iterdir())
    return Measurement(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e9, size / 1e9)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("size", nargs="?", choices=TARGETS, default="E2B")
    parser.add_argument("--quantize", default="int4", choices=tuple(WEIGHT_FORMATS))
    parser.add_argument("--calibrate", action="store_true", help="round by what a text says of the inputs")
    parser.add_argument("--dir", type=Path, help="where the checkpoint goes (default: the temporary directory)")
    parser.add_argument("--out", type=Path, help="where to leave the bundle (default: nowhere)")
    parser.add_argument("--zeros", action="store_true", help="weights of zero, which take no room")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        target = Path(name, f"gemma-4-{args.size}-shape")
        target.mkdir()
        weights = write_checkpoint(target, args.size, zeros=args.zeros)
        options = ["--quantize", args.quantize]
        if args.calibrate:
            add_tokenizer(target)
            options.append("--calibrate")
        found = measure(target, args.out or Path(name, "bundle"), options)
    rate = weights / found.cpu_seconds / 1e6
    row = [
        args.size,
        f"{weights / 1e9:.2f} G",
        args.quantize + ", calibrated" * args.calibrate,
        f"{found.seconds:.0f}",
        f"{found.cpu_seconds:.0f}",
        f"{rate:.0f}",
        f"{found.peak_gb:.2f}",
        f"{found.bundle_gb:.2f}",
    ]
    print(table(TITLES, [row], left={"model", "quantize"}))
    system = f"{machine.processor_name()}, {os.cpu_count()} threads, {machine.os_name()}"
    print(f"\n{system}, Python {platform.python_version()}")
    return 0 if found.peak_gb < (CALIBRATED_BOUND_GB if args.calibrate else BOUND_GB) else 1


if __name__ == "__main__":
    run_command(main)
