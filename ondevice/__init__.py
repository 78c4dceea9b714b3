"""Gemma 4 on CPUs, offline, with multi-token drafts that never change the output.

import ondevice

with ondevice.load("bundles/reference") as model:
    for step in model.stream("def fibonacci(n):", max_new_tokens=64):
        print(step.text, end="")
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ondevice.errors import OndeviceError

if TYPE_CHECKING:
    from ondevice.decoding.record import Reply, Stats, Step
    from ondevice.model import Model, load

__version__ = "0.1.0"

# ONNX Runtime's packages send telemetry from 1.29 on, unless they find this when they are imported (PR 27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["Model", "OndeviceError", "Reply", "Stats", "Step", "__version__", "load"]

_HOMES = {
    "Model": "ondevice.model",
    "load": "ondevice.model",
    "Reply": "ondevice.decoding.record",
    "Stats": "ondevice.decoding.record",
    "Step": "ondevice.decoding.record",
}


def __getattr__(name: str) -> Any:
    """Import numpy, onnxruntime and numba when they are first needed: `ondevice --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ondevice' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
