"""`ondevice info`: this machine, or a bundle."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ondevice import __version__, machine
from ondevice.bundle import Bundle
from ondevice.errors import UsageError
from ondevice.manifest import Manifest

PACKAGES = ("numpy", "numba", "onnxruntime", "tokenizers")
ENGINES = {"simd": "numba", "ort": "onnxruntime"}
"""Engines by the package that each cannot do without."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help="a bundle's directory, or its name")
    parser.add_argument("--verify-hashes", action="store_true", help="read every file and compare its sha256")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.bundle is None:
        if args.verify_hashes:
            raise UsageError("--verify-hashes checks a bundle: name one")
        facts = this_machine()
    else:
        bundle = Bundle.open(args.bundle, verify_hashes=args.verify_hashes)
        facts = about(bundle.manifest)
        if args.verify_hashes:
            facts["hashes"] = "every file is as exported"
    if args.json:
        print(json.dumps(facts))
    else:
        print("\n".join(_lines(facts)))
    return 0


def this_machine() -> dict[str, Any]:
    """Versions, processor and what can run here."""
    packages = {name: _version(name) for name in PACKAGES}
    from ondevice.engines.simd.kernels import instruction_set

    return {
        "ondevice": __version__,
        "python": platform.python_version(),
        "packages": {name: found or "missing" for name, found in packages.items()},
        "processor": machine.processor_name(),
        "system": machine.os_name(),
        "physical_cores": machine.physical_cores(),
        "threads": machine.default_threads(),
        "engines": [name for name, package in ENGINES.items() if packages[package]],
        "instruction_set": instruction_set.current().name,
    }


def about(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says, in a reader's order."""
    target, drafter, quantization = manifest.target, manifest.drafter, manifest.quantization
    kinds = [layer.kind for layer in target.layers]
    return {
        "name": manifest.name,
        "family": manifest.family,
        "context": target.context_length,
        "layers": {
            "all": len(kinds),
            "sliding": kinds.count("sliding"),
            "full": kinds.count("full"),
            "with_cache": len(target.kv_layers()),
        },
        "sliding_window": target.sliding_window,
        "vocabulary": target.vocab_size,
        "quantization": {
            "weights": quantization.weights,
            "block_size": quantization.block_size,
            "head_bits": quantization.head_bits,
        },
        "drafter": None if drafter is None else {"kind": "mtp", "candidates": drafter.candidates},
        "sources": {
            role: source.id if source.revision is None else f"{source.id}@{source.revision}"
            for role, source in manifest.sources.items()
        },
        "tools": manifest.tools,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": sum(entry.size for entry in manifest.files.values()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(facts: dict[str, Any]) -> list[str]:
    width = max(map(len, facts)) + 2
    return [f"{name.replace('_', ' '):{width}}{_text(name, value)}" for name, value in facts.items()]


def _text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        if name == "files":
            value = {file: _size(size) for file, size in value.items()}
        else:
            value = {key.replace("_", " "): item for key, item in value.items()}
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return _size(value) if name == "bytes" else str(value)


def _size(count: int) -> str:
    """A count of bytes for a reader: 1000-based, as file managers and hubs count."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
