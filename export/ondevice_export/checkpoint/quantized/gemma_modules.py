"""Reads and checks the codes and scales of a checkpoint that was trained quantised; they are kept unchanged.

8-bit codes are int8 in such a checkpoint and uint8 with zero point 128 in a bundle; 2-bit and 4-bit codes are unsigned
in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ondevice.bundle_format.tensor_table import Shapes, is_table
from ondevice.bundle_format.weight_format import BFLOAT16, BY_ROW, FLOAT32, WeightFormat
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.quantized.gemma import GemmaQuantization

_OF_LINEAR = (".weight_scale", ".input_activation_scale", ".output_activation_scale")
_OF_TABLE = (".embedding_quantized", ".embedding_scale")
_OF_CACHE = (".k_cache_scale", ".v_cache_scale")
"""Suffixes of scales for a quantised KV cache, which are ignored; transformers does not read them either."""


@dataclass(frozen=True)
class QuantizedModule:
    """A quantised linear layer or embedding table."""

    codes: str
    """Name of the tensor with the codes."""
    format: WeightFormat
    scales: npt.NDArray[np.float32]
    """[rows, 1] for a linear layer, [rows, blocks] for a table."""
    signed: bool
    """Whether the checkpoint's codes are int8 instead of unsigned."""
    input_step: float = 0.0
    output_step: float = 0.0


class QuantizedModules:
    """Reads quantised modules, by the names that their weights have in an unquantised checkpoint."""

    def __init__(self, checkpoint: Checkpoint, quantization: GemmaQuantization, shapes: Shapes) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._shapes = shapes
        """Shapes of all tensors to be read, by their names in an unquantised checkpoint."""

    def shape(self, weight: str) -> tuple[int, int]:
        """Rows and width of a matrix."""
        rows, width = self._shapes[weight]
        return rows, width

    def check(self) -> None:
        """Check that all tensors to be read have the shapes that follow from `config.json`.

        Raises:
            CheckpointError: a tensor is missing or has a wrong shape; the message names the first one.
        """
        if any(len(shape) > 2 for shape in self._shapes.values()):
            raise CheckpointError("experts that were trained quantised are not supported")
        quantised = [name for name, shape in self._shapes.items() if len(shape) == 2 and self._converts(name)]
        self._checkpoint.check({name: shape for name, shape in self._shapes.items() if name not in set(quantised)})
        for name in quantised:
            self.module(name)

    def module(self, weight: str) -> QuantizedModule | None:
        """The quantised module with this weight; None if the weight is not quantised."""
        if not self._converts(weight):
            return None
        module = weight.removesuffix(".weight")
        rows, width = shape = self.shape(weight)
        table = is_table(weight)
        codes, scale = (module + name for name in _OF_TABLE) if table else (weight, module + _OF_LINEAR[0])
        bits = self._bits(module, codes, shape)
        blocks = self._checkpoint.shape(scale)[-1] if table else 1
        self._checkpoint.check({scale: (rows, blocks)})
        scales = self._checkpoint.read(scale)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{scale} holds NaN or infinite scales")
        if width % 32 or width % blocks or (blocks > 1 and width // blocks % 32):
            raise CheckpointError(f"{module} has rows of {width} weights in {blocks} blocks, no multiples of 32")
        form = WeightFormat(bits, width // blocks) if blocks > 1 else BY_ROW[bits]
        steps = () if table else tuple(self._step(module + name) for name in _OF_LINEAR[1:])
        return QuantizedModule(codes, form, scales, bits == 8, *steps)

    def format(self, weight: str) -> WeightFormat:
        """The format in which a matrix is stored."""
        module = self.module(weight)
        return self.plain_format(weight) if module is None else module.format

    def bytes(self) -> int:
        """Total bytes of all tensors that are read, in their stored formats."""
        total = 0
        for name, shape in self._shapes.items():
            form = self.format(name) if len(shape) == 2 else FLOAT32
            total += form.bytes(math.prod(shape)) + 4 * (shape[0] * form.scales(shape[1]) if len(shape) == 2 else 0)
        return total

    def plain_format(self, weight: str) -> WeightFormat:
        """The stored format of a matrix that is not quantised: BFLOAT16 if the checkpoint has BF16, else FLOAT32."""
        return BFLOAT16 if self._checkpoint.dtype(weight) == "BF16" else FLOAT32

    def _converts(self, weight: str) -> bool:
        module = weight.removesuffix(".weight")
        return self._quantization.converts(module) and (self._quantization.embeddings or not is_table(weight))

    def _bits(self, module: str, codes: str, shape: tuple[int, int]) -> int:
        """The bits of a module's codes: the first candidate of the configuration that fits the tensor's size.

        Raises:
            CheckpointError: no candidate fits.
        """
        found = (self._checkpoint.dtype(codes), self._checkpoint.shape(codes))
        said = self._quantization.candidates(module)
        for bits in said:
            if found == ("I8" if bits == 8 else "U8", (shape[0], BY_ROW[bits].bytes(shape[1]))):
                return bits
        raise CheckpointError(
            f"{codes} is {found[0]} {list(found[1])}, and config.json asks for {list(shape)} weights of "
            f"{' or '.join(map(str, said))} bits"
        )

    def _step(self, name: str) -> float:
        """The static scale of activations in tensor `name`; 0 if the checkpoint has no such tensor."""
        if name not in self._checkpoint:
            return 0.0
        values = self._checkpoint.read(name).reshape(-1)
        if len(values) != 1 or not np.isfinite(values).all() or values[0] < 0:
            raise CheckpointError(f"{name} is not a scale: one number, 0 or more, is expected")
        return float(values[0])


def plain_names(names: Iterable[str]) -> dict[str, None]:
    """The tensors' names in an unquantised checkpoint.

    The tensors of a quantised module become the name of its weight; scales of quantised KV caches are dropped.
    """
    found: dict[str, None] = {}
    for name in names:
        suffix = next((suffix for suffix in (*_OF_LINEAR, *_OF_TABLE, *_OF_CACHE) if name.endswith(suffix)), "")
        if suffix not in _OF_CACHE:
            found[name.removesuffix(suffix) + ".weight" if suffix else name] = None
    return found
