"""The part of a forward that its plan leaves open: how many rows there are, what they see, where results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.contract import AttentionKind
from ondevice.engines.protocol import MOST_SESSIONS, Ids
from ondevice.engines.simd.attention_scratch import AttentionScratch
from ondevice.engines.simd.graph.model import DecoderLayer
from ondevice.engines.simd.kernels import slots
from ondevice.engines.simd.kernels.attention import SPLIT_ROWS
from ondevice.engines.simd.lookup_scratch import LookupScratch
from ondevice.engines.simd.plan.layer import KIND_NUMBERS
from ondevice.engines.simd.sequence_record import SequenceRecord
from ondevice.engines.simd.unsupported import UnsupportedGraphError

_ALL_POSITIONS = 1 << 62

Frequencies = dict[AttentionKind, NDArray[np.float32]]


def frequencies(layers: Sequence[DecoderLayer]) -> Frequencies:
    """The rotary frequencies of each kind of attention, float32[head_dim / 2]."""
    found: Frequencies = {}
    for layer in layers:
        kind, own = layer.attention.kind, layer.attention.frequencies
        if not np.array_equal(found.setdefault(kind, own), own):
            raise UnsupportedGraphError(f"its {kind} layers turn at different frequencies")
    return found


class ForwardState:
    """The int64 slots of a forward, and the arrays that they point to: see `kernels.slots`.

    The arrays have room for as many rows as a forward may have, because asking numpy for an address takes longer than
    copying a few numbers.
    """

    def __init__(self, most_rows: int, rotary: Frequencies, cache_bits: int) -> None:
        """
        Args:
            most_rows: of a forward.
            rotary: frequencies.
            cache_bits: of a number in the caches.
        """
        self.slots = np.zeros(slots.SLOTS, np.int64)
        self.slots[slots.CACHE_BITS] = cache_bits
        self._held: dict[int, NDArray[Any]] = {}
        self._tokens, self._stop, self._wanted = np.zeros((3, most_rows), np.int64)
        self._addresses = np.zeros(MOST_SESSIONS, np.int64)
        self.point(slots.TOKENS, self._tokens)
        self.point(slots.WANTED_ROWS, self._wanted)
        self.point(slots.STOP, self._stop)
        self.slots[slots.WINDOW + KIND_NUMBERS["full"]] = _ALL_POSITIONS
        self.point(slots.SEQUENCES, self._addresses)
        self._frequencies = np.concatenate([np.zeros(0, np.float32), *rotary.values()])
        self._cosines, self._sines = np.zeros((2, most_rows, len(self._frequencies)), np.float32)
        self._point_at_rotary(rotary)

    def point(self, slot: int, array: NDArray[Any]) -> None:
        """Put the address of an array into a slot."""
        assert array.flags.c_contiguous
        self._held[slot] = array
        self.slots[slot] = array.ctypes.data

    def set_rows(
        self,
        tokens: Ids,
        positions: Ids,
        stop: Ids,
        wanted: Ids,
    ) -> None:
        """What rows there are and what they see.

        Args:
            tokens, positions: int64[T]
            stop: int64[T], the position behind the last one that a row sees.
            wanted: int64[R], the rows whose outputs are wanted.
        """
        count, chosen = len(tokens), len(wanted)
        self.slots[slots.ALL], self.slots[slots.WANTED] = count, chosen
        self._tokens[:count] = tokens
        self._stop[:count] = stop
        self._wanted[:chosen] = wanted
        # the angle is a float32 product, as in the model's own code; its cosine is then exact to float32
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        np.cos(angles, out=self._cosines[:count], dtype=np.float64)
        np.sin(angles, out=self._sines[:count], dtype=np.float64)

    def set_window(self, positions: int) -> None:
        """How many positions a row sees in sliding attention."""
        self.slots[slots.WINDOW + KIND_NUMBERS["sliding"]] = positions

    def set_sequences(
        self, records: Sequence[SequenceRecord], scratch: AttentionScratch, lookup: LookupScratch | None = None
    ) -> None:
        """Whose rows these are, and the memory for their attention."""
        for index, record in enumerate(records):
            self._addresses[index] = record.address
        rows = int(self.slots[slots.ALL])
        scratch.reserve(rows, max(record.most_keys for record in records))
        self.slots[slots.SEQUENCE_COUNT] = len(records)
        self.slots[slots.SCRATCH] = scratch.address
        self.slots[slots.SCRATCH_STRIDE] = scratch.stride
        self.slots[slots.PARTIALS] = scratch.partials if rows <= SPLIT_ROWS else 0
        self.slots[slots.MOST_PARTS] = scratch.most_parts
        self.slots[slots.COUNTERS] = scratch.counters
        if lookup is not None:
            lookup.reserve(max(record.most_keys for record in records))
            self.slots[slots.LOOK_UP], self.slots[slots.LOOK_UP_STRIDE] = lookup.work, lookup.work_bytes
            self.slots[slots.SHARES], self.slots[slots.SHARES_STRIDE] = lookup.shares, lookup.shares_bytes

    def _point_at_rotary(self, rotary: Frequencies) -> None:
        """The kinds of attention share rows of cosines and of sines: one call of numpy computes them all."""
        self.slots[slots.ROTARY_STRIDE] = self._cosines.strides[0]
        for slot, table in ((slots.COSINES, self._cosines), (slots.SINES, self._sines)):
            address = table.ctypes.data
            for kind, values in rotary.items():
                self.slots[slot + KIND_NUMBERS[kind]] = address
                address += values.nbytes
