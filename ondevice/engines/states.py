"""The states of layers with the gated delta rule, of one sequence.

Unlike keys and values, a state has no rows that could be dropped: it includes all tokens up to one position. So each
layer has two: the *present* one, after the committed tokens, and the *following* one, after all rows of the last
forward. If all rows of a chain are committed, the two change places (`advance`). Otherwise the present state catches up
in the next forward: `simd` applies the keys, values and gates that the convolution's cache has kept, `ort` runs those
tokens again through all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ondevice.arrays import Float32Array, Int64Array
from ondevice.engines.kv_cache import mapped


@dataclass
class HeldStates:
    """The states after `length` tokens, by layer."""

    length: int
    arrays: Mapping[int, Float32Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class RecurrentStates:
    """The states of one sequence.

    Attributes:
        lost: whether the present states may be of no length, after an interrupt while they were replaced.
        most_rows: most rows of a forward, so most committed tokens that the states do not include.
    """

    def __init__(self, shapes: Mapping[int, tuple[int, ...]], most_rows: int) -> None:
        """
        shapes : layer -> the shape of its states
        """
        self.lost, self.most_rows = False, most_rows
        self._at = (0, 0)
        """Which buffer has the present states, and their length: one assignment, so that an interrupt tears no pair."""
        types = {layer: np.dtype((np.float32, shape)) for layer, shape in shapes.items()}
        self._buffers = mapped(types, dict.fromkeys(types, 1))
        parts = [[part.ctypes.data for part in buffer] for buffer in self._buffers.values()]
        self._addresses = np.array(parts, np.int64).reshape(-1, 2)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def length(self) -> int:
        """The number of tokens that the present states include."""
        return self._at[1]

    @property
    def layers(self) -> list[int]:
        return list(self._buffers)

    def present(self, layer: int) -> Float32Array:
        """The states after `length` tokens, which a forward reads."""
        array: Float32Array = self._buffers[layer][self._at[0], 0]
        return array

    def following(self, layer: int) -> Float32Array:
        """The states that a forward writes, after all its rows."""
        array: Float32Array = self._buffers[layer][1 - self._at[0], 0]
        return array

    @property
    def addresses(self) -> Int64Array:
        """int64[layers, 2], of the present and the following states."""
        return self._addresses[:, :: -1 if self._at[0] else 1]

    def advance(self, length: int) -> None:
        """Make the following states, after `length` tokens, the present ones."""
        self._at = (1 - self._at[0], length)

    def replaced(self, length: int) -> None:
        """The present states were replaced by those after `length` tokens; `lost` was set before."""
        self._at = (self._at[0], length)
        self.lost = False

    def clear(self) -> None:
        """Begin before the first token."""
        self.lost = True
        for layer in self._buffers:
            self.present(layer)[:] = 0
        self.replaced(0)

    def held(self) -> HeldStates:
        """The present states, copied."""
        return HeldStates(self.length, {layer: self.present(layer).copy() for layer in self._buffers})

    def adopt(self, held: HeldStates) -> None:
        """Replace the present states by a copy of these."""
        self.lost = True
        for layer, array in held.arrays.items():
            self.present(layer)[:] = array
        self.replaced(held.length)
