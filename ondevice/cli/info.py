"""`ondevice info`: facts about this machine or a bundle, as aligned text or JSON.

In order: the command, the facts of a machine, the facts of a bundle, facts as text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ondevice import __version__, machine
from ondevice.bundle import Bundle
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import is_plain
from ondevice.cli.options import add_bundle_argument
from ondevice.cli.terminal.progress import byte_bar
from ondevice.cli.terminal.style import aligned, columns, kept, size
from ondevice.engines.layer_path import PathMemory
from ondevice.errors import OndeviceError, UsageError
from ondevice.files import write_obstacle

if TYPE_CHECKING:
    from ondevice.engines.simd.pack_file import PackState

PACKAGES = ("numpy", "numba", "onnxruntime", "tokenizers")

ENGINES = {"simd": "ondevice.engines.simd.engine", "ort": "ondevice.engines.ort"}
"""Modules whose import fails where an engine's packages are missing."""

MEASURED = ("instruction_set", "memory_bytes_per_s", "dot_product_ops_per_s")
"""Facts that need the `simd` engine; None where it cannot run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser, nargs="?")
    parser.add_argument("--verify-hashes", action="store_true", help="compare the sha256 of every file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    if args.bundle is None:
        if args.verify_hashes:
            raise UsageError("--verify-hashes needs a bundle: give its name or directory")
        facts = machine_facts()
    else:
        with byte_bar("verifying") as bar:
            bundle = Bundle.open(args.bundle, verify_hashes=args.verify_hashes, on_hash=bar.show)
        facts = bundle_facts(bundle)
        if args.verify_hashes:
            facts["hashes"] = "every file is as exported"
    if args.json:
        print(json.dumps(facts))
    else:
        print("\n".join(lines(facts, columns())))
    return 0


def machine_facts() -> dict[str, Any]:
    """Versions, processor, available engines, and measured bandwidth and arithmetic.

    Measuring takes some tenths of a second, and some seconds more where its kernels have to be built first.
    """
    from ondevice.engines.simd.pack_cache import pack_sizes
    from ondevice.native import library

    kernels = library.choice()
    threads = machine.default_threads()
    obstacles: dict[str, str] = {}
    measured: dict[str, Any] = dict.fromkeys(MEASURED)
    for name in ENGINES:
        try:
            _check_engine(name)
            if name == "simd":
                measured = _measured(threads)
        except Exception as error:  # of package, cache, compiler or CPU: the other facts are still printed
            obstacles[name] = _failure(error)
    sizes = pack_sizes()
    return {
        "ondevice": __version__,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "processor": machine.processor_name(),
        "system": machine.os_name(),
        "kernels": f"{kernels.set}, {'built on this machine' if kernels.file is None else kernels.file}",
        "physical_cores": machine.physical_cores(),
        "threads": threads,
        "engines": [name for name in ENGINES if name not in obstacles],
        "unavailable": obstacles,
        **measured,
        "cache": {
            "directory": str(machine.cache_directory()),
            "packs": len(sizes),
            "bytes": sum(sizes),
            "obstacle": write_obstacle(machine.cache_directory()),
        },
    }


def version_of(package: str) -> str:
    """The installed version, or `missing`: onnxruntime has no wheels for Intel Macs and the newest Python."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _measured(threads: int) -> dict[str, Any]:
    """The facts of `MEASURED`. Runs kernels, which may be built for it, so it fails where that does not work."""
    from ondevice.engines.simd.kernels.contract.instruction_sets import instruction_set
    from ondevice.engines.simd.roofline import RooflineMeasurement

    with RooflineMeasurement(threads) as measurement:
        measurement.read()
    roofline = measurement.median()
    return dict(zip(MEASURED, (instruction_set().name, roofline.bandwidth, roofline.peak), strict=True))


def _failure(error: Exception) -> str:
    """One line about an exception, also one of another library."""
    if isinstance(error, OndeviceError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is missing: pip install {error.name}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _check_engine(name: str) -> None:
    """Import an engine's module and check its kernels; any exception says why this machine cannot run the engine."""
    for each in ("ondevice.model", ENGINES[name]):
        import_module(each)
    from ondevice.native.sets import parts_of

    _check_kernels(parts_of(name))


def _check_kernels(parts: Iterable[str]) -> None:
    """Check that this machine has the kernels of some parts or can build them; else OndeviceError."""
    from ondevice.native import library

    if library.missing(parts) and find_spec("numba") is None:
        raise OndeviceError("no kernels for this CPU, and numba, which builds them, is missing: pip install numba")


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """The manifest's facts, and how this machine would run the bundle, in the order in which they are printed."""
    manifest = bundle.manifest
    target, drafter = manifest.target, manifest.drafter
    kinds = [own.kind for own in target.attention]
    return {
        "name": manifest.name,
        "family": manifest.family,
        "context": target.context_length,
        "layers": {
            "all": len(target.layers),
            "sliding": kinds.count("sliding"),
            "full": kinds.count("full"),
            "convolutions": len(target.layers) - len(kinds) - len(target.states),
            "with_states": len(target.states),
            "with_cache": len(target.kv_layers()),
        },
        "sliding_window": None if target.convolves else target.window,
        "vocabulary": target.vocab_size,
        "quantization": dataclasses.asdict(manifest.quantization),
        "bits_per_weight": _bits(manifest),
        "drafter": drafter
        and {
            "kind": "mtp",
            "candidates": drafter.candidates,
            "head": "target's" if drafter.target_head else "own",
        },
        "heads": [dataclasses.asdict(heads) for heads in manifest.heads] or None,
        "vision": manifest.vision and _fields(manifest.vision, "layers", "hidden_size", "tokens"),
        "audio": manifest.audio and _fields(manifest.audio, "layers", "hidden_size"),
        "drafts_without": _tuned_blocks(bundle),
        **_engine_facts(bundle),
        "sources": {
            role: source.id if source.revision is None else f"{source.id}@{source.revision}"
            for role, source in manifest.sources.items()
        },
        "tools": manifest.tools,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": sum(entry.size for entry in manifest.files.values()),
    }


def _bits(manifest: Manifest) -> dict[str, Any] | None:
    """Bits per weight of the target in memory, with fp16 scales and minimums: the average, and those of each matrix."""
    table = manifest.tensors.get(manifest.target.graph)
    if table is None:
        return None
    matrices = {name: tensor for name, tensor in table.tensors.items() if not is_plain(name, tensor.shape)}
    bits = {name: tensor.weight_format.stored_bits for name, tensor in matrices.items()}
    counts = {name: math.prod(tensor.shape) for name, tensor in matrices.items()}
    total = sum(bits[name] * counts[name] for name in matrices)
    return {"average": round(total / sum(counts.values()), 3), "tensors": bits}


def _bits_text(found: Mapping[str, Any]) -> str:
    """The average, then the matrices by the last word of their names: how many have how many bits."""
    kinds: dict[str, Counter[float]] = {}
    for name, bits in found["tensors"].items():
        kinds.setdefault(name.removesuffix(".weight").rpartition(".")[2], Counter())[bits] += 1
    parts = []
    for kind, counts in kinds.items():
        each = [f"{bits:g}" + (f" ({count})" if len(counts) > 1 else "") for bits, count in sorted(counts.items())]
        parts.append(kept(f"{kind} {' and '.join(each)}"))
    return f"{found['average']:g}: {', '.join(parts)}"


def _fields(entry: object, *names: str) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in names}


def _tuned_blocks(bundle: Bundle) -> dict[str, Any]:
    """The blocks that `ondevice tune` chose to skip in drafts; `blocks` is None where it was not run."""
    memory = PathMemory(bundle)
    record = memory.read(memory.tuned_files)
    if record is None:
        return {"blocks": None}
    blocks = {f"{kind} {layer}" for kind, layer in record.skips} if record.pays else set()
    return {
        "blocks": sorted(blocks, key=lambda word: int(word.split()[1])),
        "predicted_speed_up": round(record.speed_up, 3),
        "processor": record.processor,
    }


def _engine_facts(bundle: Bundle) -> dict[str, Any]:
    """The engine that `--engine auto` would take on this machine, and the state of its pack."""
    try:
        from ondevice.engines.choice import preview

        found = preview(bundle)
        _check_kernels(found.parts)
    except Exception as error:  # also of a package that is broken
        prepared = {"done": False, "obstacle": None}
        return {
            "weights": None,
            "engine": {"name": None, "reason": _failure(error)},
            "pack": None,
            "prepared": prepared,
        }
    pack = found.pack
    path = pack and pack.path and str(pack.path)
    return {
        "weights": found.weights,
        "engine": {"name": found.engine, "reason": found.reason},
        "pack": pack and {"status": pack.status, "bytes": pack.size, "path": path, "obstacle": pack.obstacle},
        "prepared": _prepared(found.parts, pack),
    }


def _prepared(parts: Iterable[str], pack: PackState | None) -> dict[str, Any]:
    """Whether this machine keeps all that a start needs, and else, if nothing more can be kept, the reason."""
    from ondevice.native import library

    has_kernels = library.choice().file is not None or all(library.kept(part) for part in parts)
    if has_kernels and (pack is None or pack.status in ("packed", "small")):
        return {"done": True, "obstacle": None}
    obstacle = None if has_kernels else write_obstacle(machine.cache_directory())
    return {"done": False, "obstacle": obstacle or (pack and pack.obstacle)}


def not_kept(bundle: Bundle, engine: str) -> str | None:
    """Why the next start of a bundle has to compile or pack again what was prepared just now; None if it has not to."""
    from ondevice.engines.choice import preview
    from ondevice.native.sets import parts_of

    found = None if engine == "ort" else preview(bundle)
    prepared = _prepared(*((parts_of(engine), None) if found is None else (found.parts, found.pack)))
    return None if prepared["done"] else prepared["obstacle"] or f"{machine.cache_directory()} could not be written to"


def lines(facts: Mapping[str, Any], width: int) -> list[str]:
    """Facts as text: labels on the left, values aligned and wrapped to `width` columns on the right.

    A fact of `LISTS` has a line per entry, so an empty one, such as `unavailable`, has none.
    """
    return aligned(
        {LABELS.get(name, _words(name)): _paragraphs(name, value) for name, value in facts.items()},
        width,
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _paragraphs(name: str, value: Any) -> list[str]:
    if value is None:
        return ["none"]
    if name in LISTS:
        return [f"{_words(key) if name == 'weights' else key} {LISTS[name](item)}" for key, item in value.items()]
    return [TEXTS.get(name, _text)(value)]


def _path(path: object) -> str:
    """A path on one line, for copying, with the home directory as `~`."""
    home = str(machine.home())
    text = str(path)
    return kept(f"~{text.removeprefix(home)}" if home != "/" and text.startswith(f"{home}/") else text)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{_words(key)} {item}" for key, item in value.items()]
    if isinstance(value, list):
        return ", ".join(kept(str(item)) for item in value) or "none"
    return str(value)


def _cache(cache: Mapping[str, Any]) -> str:
    count = cache["packs"]
    packs = "no packs" if not count else f"{count} pack{'s' if count > 1 else ''}, {size(cache['bytes'])}"
    unused = f", not used: {kept(cache['obstacle'])}" if cache["obstacle"] else ""
    return f"{packs} in {_path(cache['directory'])}{unused}"


def _pack(pack: Mapping[str, Any]) -> str:
    bytes_, path = size(pack["bytes"]), _path(pack["path"])
    return {
        "packed": f"packed: {bytes_} at {path}",
        "missing": f"not packed yet: {bytes_} will be written to {path} at the first load",
        "damaged": f"damaged: {bytes_} will be written again to {path} at the next load",
        "small": f"in memory: {bytes_}, packed at every start",
        "unwritable": f"in memory: {bytes_}, packed at every start, because {pack['obstacle']}",
    }[pack["status"]]


def _prepared_text(prepared: Mapping[str, Any]) -> str:
    if prepared["done"]:
        return "yes"
    if prepared["obstacle"]:
        return f"no, at every start, because {prepared['obstacle']}: set ONDEVICE_CACHE"
    return "no: `ondevice prepare` compiles kernels and packs weights"


def _blocks_text(found: Mapping[str, Any]) -> str:
    if found["blocks"] is None:
        return "not measured: run `ondevice tune`"
    if not found["blocks"]:
        return f"no block: at best {found['predicted_speed_up']:.2f} times plain decoding on {found['processor']}"
    return f"{', '.join(map(kept, found['blocks']))}: predicted {found['predicted_speed_up']:.2f} times plain decoding"


def _head(head: Mapping[str, Any]) -> str:
    where = f"for {head['offsets']} tokens" if head["layer"] is None else f"after layer {head['layer']}"
    return f"{head['kind']} {where}"


LABELS = {
    "bits_per_weight": "weight bits",
    "memory_bytes_per_s": "memory bandwidth",
    "dot_product_ops_per_s": "dot products",
}

LISTS: dict[str, Callable[[Any], str]] = {
    "files": size,
    "unavailable": str,
    "weights": lambda counts: ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in counts.items()),
}
"""Facts with a line for each entry, and how an entry's value is shown."""

TEXTS: dict[str, Callable[[Any], str]] = {
    "memory_bytes_per_s": lambda rate: f"{rate / 1e9:.1f} GB/s",
    "dot_product_ops_per_s": lambda rate: f"{rate / 1e9:.0f} GOPS",
    "audio": "{layers} layers of {hidden_size}".format_map,
    "bits_per_weight": _bits_text,
    "bytes": size,
    "cache": _cache,
    "drafts_without": _blocks_text,
    "engine": lambda engine: (engine["name"] or "none") + (f": {engine['reason']}" if engine["reason"] else ""),
    "heads": lambda heads: _text([*map(_head, heads)]),
    "pack": _pack,
    "threads": "at most {}".format,
    "vision": "{layers} layers of {hidden_size}, {tokens} tokens for a picture".format_map,
    "prepared": _prepared_text,
}
"""How the value of a fact is shown; the others as `_text` does."""
