"""Seconds and peak memory of an export of Gemma 4 E2B's real shapes: `python -m benchmarks.export_memory`.

Writes a random bf16 checkpoint of 10.2 GB and exports it in a process of its own. The bound is 1.5 GB resident.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ondevice import machine
from ondevice_export.config import read_target
from ondevice_export.tensor_names import Shapes, target_shapes

BOUND_GB = 1.5
PREFIX = "model.language_model."
BLOCK = 1 << 24
"""Random weights made; they repeat, which no part of an export notices."""


def e2b_config(vocabulary: int) -> dict[str, Any]:
    """The published configuration of google/gemma-4-E2B-it, as far as its text model goes."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": vocabulary,
            "vocab_size_per_layer_input": vocabulary,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    }


def write_checkpoint(directory: Path, vocabulary: int) -> int:
    """Write config.json and model.safetensors; returns the number of weights."""
    (directory / "config.json").write_text(json.dumps(e2b_config(vocabulary)))
    shapes = target_shapes(read_target(directory)[1], PREFIX)
    header = json.dumps(_header(shapes)).encode()
    total = sum(map(math.prod, shapes.values()))
    weights = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    block = (weights.view(np.uint32) >> 16).astype(np.uint16)
    with (
        (directory / "model.safetensors").open("wb") as file,
        tqdm(total=total, unit="weight", unit_scale=True, desc="write", disable=None) as bar,
    ):
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, total, BLOCK):
            part = block[: total - start]
            file.write(part.data)
            bar.update(len(part))
    return total


def _header(shapes: Shapes) -> dict[str, Any]:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


@dataclass(frozen=True)
class Measurement:
    seconds: float
    cpu_seconds: float
    peak_gb: float
    bundle_gb: float


def measure(directory: Path, options: list[str]) -> Measurement:
    """Export in a child process."""
    out = directory / "bundle"
    started = time.perf_counter()
    command = [sys.executable, "-m", "ondevice", "export", str(directory / "target"), "--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    size = sum(file.stat().st_size for file in out.iterdir())
    return Measurement(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e9, size / 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the vocabulary, for a quick look")
    parser.add_argument("--quantize", default="int4", choices=("int4", "int8", "none"))
    parser.add_argument("--dir", type=Path, help="where to work; 14 GB are needed (default: the temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        (directory / "target").mkdir()
        weights = write_checkpoint(directory / "target", max(1, round(262_144 * args.scale)))
        found = measure(directory, ["--quantize", args.quantize])
    print("| weights | quantize | seconds | CPU seconds | M weights per CPU second | peak RSS, GB | bundle, GB |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    rate = weights / found.cpu_seconds / 1e6
    print(
        f"| {weights / 1e9:.2f} G | {args.quantize} | {found.seconds:.0f} | {found.cpu_seconds:.0f} | {rate:.0f} "
        f"| {found.peak_gb:.2f} | {found.bundle_gb:.2f} |"
    )
    system = f"{machine.processor_name()}, {os.cpu_count()} threads, {machine.os_name()}"
    print(f"\n{system}, Python {platform.python_version()}")
    return 0 if found.peak_gb < BOUND_GB else 1


if __name__ == "__main__":
    sys.exit(main())
