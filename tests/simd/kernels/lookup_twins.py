"""The kernels of lookup attention, reimplemented in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.simd.kernels.twins import Floats, Wide

Numbers = npt.NDArray[np.int64]


def learn(keys: Floats, width: int, steps: int) -> Floats:
    """k-means of every `width` numbers of keys [n, codes * width]; returns centroids [codes, 16, width]."""
    count = len(keys)
    parts = keys.reshape(count, -1, width).swapaxes(0, 1)
    centroids = parts[:, np.arange(16) * count // 16].copy()
    for _ in range(steps):
        members = nearest(keys, centroids)
        for code, part in enumerate(parts):
            for centroid in range(16):
                own = part[members[:, code] == centroid]
                if len(own):
                    centroids[code, centroid] = own.astype(np.float64).sum(axis=0) / len(own)
    return centroids


def nearest(keys: Floats, centroids: Floats) -> Numbers:
    """The index of the nearest centroid, [n, codes], of every `width` numbers of keys [n, codes * width].

    The lowest index wins ties.
    """
    parts = keys.reshape(len(keys), len(centroids), 1, -1).astype(np.float64)
    return ((parts - centroids.astype(np.float64)) ** 2).sum(axis=-1).argmin(axis=-1)


@dataclass(frozen=True)
class Tables:
    entries: Numbers
    """Quantised products, [heads, codes, 16], 0..255."""
    scales: Wide
    """One scale per head, [heads]."""
    constants: Wide
    """Constant part of each head's scores, [heads]: the sum of the smallest product of every code."""

    def scores(self, codes: Numbers) -> Wide:
        """Scores [heads, n] of keys with codes [n, codes], without the constants."""
        sums = sum(self.entries[:, code][:, codes[:, code]] for code in range(codes.shape[1]))
        return np.asarray(sums * self.scales[:, None], np.float64)


def tables(query: Floats, centroids: Floats) -> Tables:
    """Quantise the products of query [heads, codes * width] with all centroids, with one scale per head."""
    parts = query.reshape(len(query), len(centroids), 1, -1).astype(np.float64)
    products = (parts * centroids.astype(np.float64)).sum(axis=-1)
    least = products.min(axis=-1, keepdims=True)
    products -= least
    scales = products.max(axis=(1, 2)) / 255
    return Tables(np.rint(products / scales[:, None, None]).astype(np.int64), scales, least.sum(axis=(1, 2)))


def shares(scores: Wide, block: int) -> Wide:
    """Each block's share of the softmax of scores [heads, blocks * block], summed over heads: [blocks]."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(weights.reshape(len(scores), -1, block).sum(axis=(0, 2)), np.float64)


def choose(shares: npt.NDArray[Any], least: int, most: int, wanted: float) -> list[int]:
    """The indices of the best blocks, `least` to `most` of them, until their shares reach `wanted`.

    The lower index wins ties.
    """
    order = np.argsort(-shares, kind="stable")
    enough = np.cumsum(shares[order].astype(np.float64)) >= wanted
    count = int(enough.argmax()) + 1 if enough.any() else len(shares)
    return sorted(order[: min(max(count, least), most, len(shares))].tolist())
