"""The kernels of lookup attention once more in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.simd.twins import Floats, Wide

Numbers = npt.NDArray[np.int64]


def learn(keys: Floats, width: int, steps: int) -> Floats:
    """k-means of every few numbers of keys [n, codes * width]: centroids [codes, 16, width]."""
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
    """The nearest centroid of every few numbers of keys [n, codes * width]: [n, codes], the lowest of equal ones."""
    parts = keys.reshape(len(keys), len(centroids), 1, -1).astype(np.float64)
    return ((parts - centroids.astype(np.float64)) ** 2).sum(axis=-1).argmin(axis=-1)


@dataclass(frozen=True)
class Tables:
    entries: Numbers
    """[heads, codes, 16], 0..255."""
    scales: Wide
    """[heads]"""
    constants: Wide
    """[heads], the sums of the least product of every code."""

    def scores(self, codes: Numbers) -> Wide:
        """Of keys with codes [n, codes], less the constants: [heads, n]."""
        sums = sum(self.entries[:, code][:, codes[:, code]] for code in range(codes.shape[1]))
        return np.asarray(sums * self.scales[:, None], np.float64)


def tables(query: Floats, centroids: Floats) -> Tables:
    """The products of query [heads, codes * width] with all centroids, one scale for each head."""
    parts = query.reshape(len(query), len(centroids), 1, -1).astype(np.float64)
    products = (parts * centroids.astype(np.float64)).sum(axis=-1)
    least = products.min(axis=-1, keepdims=True)
    products -= least
    scales = products.max(axis=(1, 2)) / 255
    return Tables(np.rint(products / scales[:, None, None]).astype(np.int64), scales, least.sum(axis=(1, 2)))


def shares(scores: Wide, block: int) -> Wide:
    """Every block's share of the softmaxes of scores [heads, blocks * block], summed over heads: [blocks]."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(weights.reshape(len(scores), -1, block).sum(axis=(0, 2)), np.float64)


def choose(shares: npt.NDArray[Any], least: int, most: int, wanted: float) -> list[int]:
    """The best blocks that have `wanted` of the shares, `least` to `most` of them; the lower of equal ones wins."""
    order = np.argsort(-shares, kind="stable")
    enough = np.cumsum(shares[order].astype(np.float64)) >= wanted
    count = int(enough.argmax()) + 1 if enough.any() else len(shares)
    return sorted(order[: min(max(count, least), most, len(shares))].tolist())
