"""Checkpoints of random weights that stand in for `Checkpoint` in an export, without a file."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.bundles.gemma4 import E2B_VISION
from ondevice.arrays import Float32Array
from ondevice.bundle_format.tensor_table import EMBEDDING
from ondevice.bundle_format.weight_format import MXFP4, WeightFormat
from ondevice_export.checkpoint import audio as audio_towers


def noise() -> Float32Array:
    """float32[N]: values that fill matrices repeatedly."""
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)


class RandomCheckpoint:
    """Stands in for `Checkpoint`: matrices and biases are one random block over and over, norms and scalars are ones,
    decays of states -1.

    embedding_factor : of the token embedding's numbers. Where the model itself does not multiply embeddings, they would
        be lost among what attention adds, and all rows would choose the same experts
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], embedding_factor: float = 1.0) -> None:
        self._shapes, self._embedding_factor = shapes, np.float32(embedding_factor)
        self._noise = noise()
        self._twice = np.concatenate([self._noise, self._noise])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def kept_format(self, name: str) -> WeightFormat | None:
        return None

    def read(self, name: str) -> Float32Array:
        shape = self._shapes[name]
        if name.endswith(("bias", "sinks")):
            return np.resize(self._noise, shape)
        if name.endswith("delta.decay"):  # positive ones would make states grow
            return np.full(shape, -1, np.float32)
        return np.ones(shape, np.float32) if len(shape) == 1 else self.rows(name, 0, shape[0])

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        width = self._shapes[name][-1]
        first, count = start * width % len(self._noise), (stop - start) * width
        part = self._twice[first : first + min(count, len(self._noise))]  # a part of no more than the noise is no copy
        if name.endswith(EMBEDDING) and self._embedding_factor != 1:
            part = part * self._embedding_factor
        return np.resize(part, (stop - start, width)) if len(part) < count else part.reshape(-1, width)

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> Float32Array:
        return self.rows(name, 0, len(indices))

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        return np.random.default_rng(1).permutation(self._shapes[name][0])


class RandomMxfp4(RandomCheckpoint):
    """The same with experts in MXFP4, as the checkpoints of gpt-oss have them."""

    def kept_format(self, name: str) -> WeightFormat | None:
        return MXFP4 if len(self._shapes[name]) == 3 else None

    def kept_blocks(self, name: str, start: int, stop: int) -> tuple[npt.NDArray[np.uint8], Float32Array, None]:
        width = self._shapes[name][-1]
        codes = np.resize(self._noise.view(np.uint8)[::4] & 15, (stop - start, width))
        return codes, np.full((stop - start, width // MXFP4.group), 2.0**-8, np.float32), None


class RandomTower(RandomCheckpoint):
    """The same for a tower, whose matrices all differ: ONNX Runtime keeps equal ones once.

    Linear layers have ranges that hold nearly all numbers. Norms spread log-normally, so that channels differ in size;
    those of queries and keys are smaller, because attention has the scale 1: with large scores it would be chaotic.
    """

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> Float32Array:
        if name.endswith(("_min", "_max")):
            return np.array(20.0 if name.endswith("_max") else -20.0, np.float32)
        shape = self._shapes[name]
        if len(shape) > 1 and name.startswith(audio_towers.TOWER):
            first = zlib.crc32(name.encode()) % len(self._noise)
            return np.resize(self._twice[first : first + len(self._noise)], shape)
        own = np.random.default_rng(zlib.crc32(name.encode()))
        spread = np.exp(own.standard_normal(self._shapes[name]) / 2).astype(np.float32)
        return spread * np.float32(
            E2B_VISION.head_dim**-0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1
        )

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        *_, width = self._shapes[name]
        first = (zlib.crc32(name.encode()) + start * width) % len(self._noise)
        count = (stop - start) * width
        return np.resize(self._twice[first : first + len(self._noise)], count).reshape(-1, width)

    def picked_rows(self, name: str, indices: npt.NDArray[np.int64]) -> Float32Array:
        return self.rows(name, 0, self._shapes[name][0])[indices]


QUANTIZATION: dict[str, Any] = {
    "quant_method": "gemma",
    "num_bits": 4,
    "quantize_embeddings": True,
    "module_quant_configs": {
        r"^lm_head$": {"num_bits": 2},
        r"embed_tokens$": {"num_bits": 2},
        r"layers\.(1[5-9]|2\d|3[0-4])\.mlp\.": {"num_bits": 2},
        r"per_layer_(input_gate|projection)$": {"num_bits": 8},
    },
    "modules_to_not_convert": ["per_layer_model_projection"],
}
"""Bit widths as published: attention, the lower layers' MLP and the table of per-layer embeddings have 4 bits, the
upper MLP, head and embedding 2, the gates and projections of per-layer embeddings 8.
"""


class MobileCheckpoint:
    """Stands in for `Checkpoint`: codes are random, scales small, norms and scalars ones, every layer is calibrated."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], blocks: int) -> None:
        self._shapes = shapes
        self._blocks = blocks
        """Scales in a row of the table of per-layer embeddings."""
        floats = np.random.default_rng(1).standard_normal(1 << 20, np.float32) * np.float32(0.02)
        self._numbers = (floats.view(np.uint32) >> 16).astype(np.uint16)
        self._noise = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Does nothing: all shapes are right."""

    def dtype(self, name: str) -> str:
        if self._is_plain(name):
            return "BF16"
        return "I8" if self._bits(name) == 8 else "U8"

    def shape(self, name: str) -> tuple[int, ...]:
        if name.endswith("embedding_scale"):
            return self._shapes[self._weight(name)][0], self._blocks if "per_layer" in name else 1
        rows, width = self._shapes[self._weight(name)]
        return rows, width if self._is_plain(name) else width * self._bits(name) // 8

    def read(self, name: str) -> npt.NDArray[np.float32]:
        if name.endswith("activation_scale"):
            return np.array(0.05, np.float32)
        if name.endswith("_scale"):
            rows = self._shapes[self._weight(name)][0]
            return np.full((rows, self.shape(name)[1] if name.endswith("embedding_scale") else 1), 0.01, np.float32)
        return np.ones(self._shapes[name], np.float32)

    def raw_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        width = self.shape(name)[1]
        if self._is_plain(name):  # bfloat16 of usual sizes: products with denormal numbers would take longer
            numbers = np.resize(np.roll(self._numbers, -start * width), (stop - start, width))
            return numbers.view(np.uint8)
        return np.resize(np.roll(self._noise, -start * width), (stop - start, width))

    def _is_plain(self, name: str) -> bool:
        return "per_layer_model_projection" in name

    def _bits(self, name: str) -> int:
        module = self._weight(name).removesuffix(".weight")
        patterns = QUANTIZATION["module_quant_configs"].items()
        return next((one["num_bits"] for pattern, one in patterns if re.search(pattern, module)), 4)

    def _weight(self, name: str) -> str:
        if name in self._shapes:
            return name
        return f"{name.rpartition('.')[0]}.weight"
