"""Product quantisation of keys: a code of 4 bits for every few numbers of a key, and the centroids behind the codes.

A codebook is float32[codes, width + 1, 16]: the 16 centroids of each sub-quantiser, number by number, and minus half
their squared lengths, with which the nearest centroid is the one whose product with a key is largest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ondevice.engines.simd.kernels.integer_tile import UNIT
from ondevice.engines.simd.kernels.jit import kernel
from ondevice.engines.simd.kernels.lookup_tile import CODE_BYTES, CODES, KEY_BYTES, TILE_BYTES
from ondevice.engines.simd.kernels.memory import read_f32, write_byte
from ondevice.engines.simd.kernels.vector import argmax_lanes, fma, full, load

CENTROIDS = 16
SPAN = UNIT * 16
"""Positions whose codes lie together: vector i has the i-th position of each of 16 units, so that what is said of units
is worked out lane by lane."""


class Codebook(NamedTuple):
    """The centroids of one KV head."""

    address: int
    codes: int
    """Sub-quantisers."""
    width: int
    """Numbers of each."""


@kernel
def nearest(key: int, codebook: Codebook, code: int) -> Any:
    """The centroid of sub-quantiser `code` that is nearest to the key, the lowest of equal ones."""
    at = codebook.address + code * (codebook.width + 1) * 64
    product = load(at + 64 * codebook.width)
    for i in range(codebook.width):
        product = fma(full(read_f32(key + 4 * (code * codebook.width + i))), load(at + 64 * i), product)
    return argmax_lanes(product)


@kernel
def write_codes(key: int, codebook: Codebook, position: int, out: int, stride: int) -> None:
    """Write the codes of float32[codes * width] to a cache of codes: spans of [UNIT][codes / 8] tiles.

    Args:
        key: address of the numbers.
        codebook: of its KV head.
        position: of the key.
        out: address of the first span's codes.
        stride: bytes to the next span's.
    """
    span, within = position // SPAN, position % SPAN
    at = out + span * stride + within % UNIT * 16 * (codebook.codes // 2) + within // UNIT * KEY_BYTES
    for first in range(0, codebook.codes, CODES):
        for i in range(CODES // 2):
            low, high = nearest(key, codebook, first + i), nearest(key, codebook, first + CODES // 2 + i)
            write_byte(at + first // CODES * TILE_BYTES + i * CODE_BYTES, low | high << 4)


@kernel
def encode(keys: np.ndarray, codebooks: np.ndarray, first: int, out: int, stride: int) -> None:
    """Write the codes of keys at positions from `first` on.

    Args:
        keys: float32[n, kv_heads, codes * width]
        codebooks: float32[kv_heads, codes, width + 1, 16]
        first: position of the first key.
        out: address of uint8[spans, kv_heads, SPAN, codes / 2].
        stride: bytes from a span to the next.
    """
    heads, codes, width = codebooks.shape[0], codebooks.shape[1], codebooks.shape[2] - 1
    for n in range(len(keys)):
        for head in range(heads):
            key = keys.ctypes.data + 4 * (n * heads + head) * codes * width
            book = Codebook(codebooks.ctypes.data + 4 * head * codes * (width + 1) * CENTROIDS, codes, width)
            write_codes(key, book, first + n, out + head * SPAN * codes // 2, stride)


@kernel
def learn(keys: np.ndarray, codebook: np.ndarray, steps: int) -> None:
    """k-means of every sub-quantiser, float32[codes, width + 1, 16], from keys float32[n, codes * width].

    It begins with keys at even distances. The order of every sum is fixed, and a centroid that nothing is near stays.
    """
    count, (codes, width) = len(keys), (codebook.shape[0], codebook.shape[1] - 1)
    sums, members = np.zeros((CENTROIDS, width)), np.zeros(CENTROIDS, np.int64)
    book = Codebook(codebook.ctypes.data, codes, width)
    for code in range(codes):
        for centroid in range(CENTROIDS):
            for i in range(width):
                codebook[code, i, centroid] = keys[centroid * count // CENTROIDS, code * width + i]
        for step in range(steps + 1):
            for centroid in range(CENTROIDS):
                length = 0.0
                for i in range(width):
                    length += np.float64(codebook[code, i, centroid]) ** 2
                codebook[code, width, centroid] = -0.5 * length
            if step == steps:
                break
            sums[:], members[:] = 0.0, 0
            for n in range(count):
                centroid = nearest(keys.ctypes.data + 4 * n * codes * width, book, code)
                members[centroid] += 1
                for i in range(width):
                    sums[centroid, i] += keys[n, code * width + i]
            for centroid in range(CENTROIDS):
                for i in range(width):
                    if members[centroid]:
                        codebook[code, i, centroid] = sums[centroid, i] / members[centroid]
