"""What `ondevice info` tells of this machine."""

from __future__ import annotations

import platform
from importlib import import_module
from typing import Any

from ondevice import __version__, machine
from ondevice.engines.simd.pack.cache import pack_sizes
from ondevice.terminal.versions import version_of

PACKAGES = ("numpy", "numba", "onnxruntime", "tokenizers")
ENGINES = {"simd": "ondevice.engines.simd.engine", "ort": "ondevice.engines.ort.engine"}
"""Engines by their modules, which import what they cannot do without."""

MEASURED = ("instruction_set", "memory_bytes_per_s", "dot_product_ops_per_s")
"""What the `simd` engine could reach; None where it cannot run."""


def this_machine() -> dict[str, Any]:
    """Versions, processor, what can run here and how fast it could be. Measuring takes some tenths of a second."""
    threads = machine.default_threads()
    obstacles = {name: reason for name, module in ENGINES.items() if (reason := _import_obstacle(module))}
    measured: dict[str, Any] = dict.fromkeys(MEASURED)
    if "simd" not in obstacles:
        try:
            measured = _measured(threads)
        except Exception as error:  # whatever compiler or CPU make of it: everything else is still worth telling
            obstacles["simd"] = reason_of(error)
    sizes = pack_sizes()
    return {
        "ondevice": __version__,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "processor": machine.processor_name(),
        "system": machine.os_name(),
        "physical_cores": machine.physical_cores(),
        "threads": threads,
        "engines": [name for name in ENGINES if name not in obstacles],
        "unavailable": obstacles,
        **measured,
        "cache": {"directory": str(machine.cache_directory()), "packs": len(sizes), "bytes": sum(sizes)},
    }


def _measured(threads: int) -> dict[str, Any]:
    """Compiles and runs two small kernels, so it also tells whether that works here."""
    from ondevice.engines.simd.kernels import instruction_set
    from ondevice.engines.simd.roofline import RooflineMeasurement

    with RooflineMeasurement(threads) as measurement:
        measurement.read()
    roofline = measurement.median()
    return dict(zip(MEASURED, (instruction_set.current().name, roofline.bandwidth, roofline.peak), strict=True))


def reason_of(error: Exception) -> str:
    """One line for something that went wrong below this program."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is missing: pip install {error.name}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _import_obstacle(module: str) -> str | None:
    try:
        for each in ("ondevice.loading", "ondevice.jit", module):  # drafters and sampling need numba too
            import_module(each)
    except Exception as error:  # a package for another processor, a cache that cannot be written, ...
        return reason_of(error)
    return None
