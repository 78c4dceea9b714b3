"""Engines by name, without the text layer around them: a bundle of random weights has no tokenizer."""

from __future__ import annotations

from typing import Literal

from ondevice.bundle import Bundle
from ondevice.engines.protocol import Engine

EngineName = Literal["simd", "ort"]


def open_engine(name: EngineName, bundle: Bundle, threads: int) -> Engine:
    if name == "simd":
        from ondevice.engines.simd.engine import SimdEngine

        return SimdEngine(bundle, threads)
    from ondevice.engines.ort import OrtEngine

    return OrtEngine(bundle, threads)
