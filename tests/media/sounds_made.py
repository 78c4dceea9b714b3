"""Sounds for tests: tones, and WAV files of every encoding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def tone(seconds: float, hertz: float = 440.0, rate: int = 16_000) -> NDArray[np.float32]:
    """float32[N]: a tone that becomes louder, so that no two parts are equal."""
    time = np.arange(round(seconds * rate)) / rate
    loud = np.linspace(0.1, 0.9, len(time))
    return (loud * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def wav(samples: NDArray[Any], rate: int = 16_000, bits: int = 16, *, extensible: bool = False) -> bytes:
    """A WAV file of samples in [-1, 1], [N] or [N, channels]; floats of 32 or 64 bits for `bits` 320 and 640."""
    samples = samples.reshape(len(samples), -1)
    kind, width = (3, bits // 10) if bits >= 320 else (1, bits)
    if kind == 3:
        data = samples.astype(f"<f{width // 8}").tobytes()
    elif width == 8:
        data = np.clip(np.rint(samples * 128) + 128, 0, 255).astype(np.uint8).tobytes()
    else:
        most = 1 << (width - 1)
        whole = np.clip(np.rint(samples.astype(np.float64) * most), -most, most - 1).astype("<i4")
        data = whole.view(np.uint8).reshape(-1, 4)[:, : width // 8].tobytes()
    channels = samples.shape[1]
    block = channels * width // 8
    header = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * block, block, width)
    if extensible:
        header += struct.pack("<HHIH", 22, width, 0, kind) + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    return riff([(b"fmt ", header), (b"LIST", b"odd"), (b"data", data)])


def riff(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A RIFF file of the type WAVE with these chunks."""
    body = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
