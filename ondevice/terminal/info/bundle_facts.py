"""What `ondevice info BUNDLE` tells."""

from __future__ import annotations

import dataclasses
from typing import Any

from ondevice.bundle import Bundle
from ondevice.engines.path_memory import PathMemory
from ondevice.errors import OndeviceError
from ondevice.terminal.info.machine_facts import reason_of


def about(bundle: Bundle) -> dict[str, Any]:
    """What the manifest says and what would become of it here, in a reader's order."""
    manifest = bundle.manifest
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
        "heads": [dataclasses.asdict(heads) for heads in manifest.heads] or None,
        "drafts_without": _skipped(bundle),
        **_here(bundle),
        "sources": {
            role: source.id if source.revision is None else f"{source.id}@{source.revision}"
            for role, source in manifest.sources.items()
        },
        "tools": manifest.tools,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "bytes": sum(entry.size for entry in manifest.files.values()),
    }


def _skipped(bundle: Bundle) -> dict[str, Any]:
    """What `ondevice tune` found; `blocks` is None where it was not run."""
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


def _here(bundle: Bundle) -> dict[str, Any]:
    """Which engine `--engine auto` would take, and its pack."""
    try:
        from ondevice.engines.choice import preview
        from ondevice.preparation import compiled_for

        found = preview(bundle)
    except OndeviceError as error:
        return {"weights": None, "engine": {"name": None, "reason": str(error)}, "pack": None, "prepared": False}
    except Exception as error:  # numba missing or broken, as without a bundle
        reason = reason_of(error)
        return {"weights": None, "engine": {"name": None, "reason": reason}, "pack": None, "prepared": False}
    pack = found.pack
    told = pack and {
        "status": pack.status,
        "bytes": pack.size,
        "path": None if pack.path is None else str(pack.path),
        "obstacle": pack.obstacle,
    }
    return {
        "weights": found.weights,
        "engine": {"name": found.engine, "reason": found.reason},
        "pack": told,
        "prepared": compiled_for(found.engine) and (pack is None or pack.status in ("packed", "small")),
    }
