"""The kernels reimplemented in plain numpy with the same arithmetic: int8 activations scaled by powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.bundle_format.weight_format import WeightFormat

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quantized:
    codes: npt.NDArray[np.int64]
    """Signed codes, [rows, blocks, 32]."""
    exponents: npt.NDArray[np.int64]
    """Exponent e of each block's scale 2**e, [rows, blocks]; 105 for a block of NaN."""

    def values(self) -> Wide:
        """The numbers that the codes stand for, [rows, blocks * 32]."""
        scales: Wide = np.where(self.exponents > 104, np.nan, np.exp2(self.exponents))[..., None]
        scaled: Wide = np.multiply(self.codes, scales)
        return scaled.reshape(len(self.codes), -1)


def quantize(x: Floats) -> Quantized:
    """Codes x / 2**e, ties to even; e is the smallest exponent in -100..104 that keeps a block's codes within 127."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1).astype(np.float64)
    exponents = np.full(largest.shape, -100)
    positive = largest > 0
    exponents[positive] = np.ceil(np.log2(largest[positive] / 127)).astype(np.int64)
    exponents += largest > 127 * np.exp2(exponents)  # corrects a logarithm that was rounded down
    exponents = np.clip(exponents, -100, 104)
    codes = np.rint(blocks * np.exp2(-exponents)[..., None]).astype(np.int64)
    return Quantized(codes, exponents)


def project(
    x: Quantized,
    codes: npt.NDArray[np.int64],
    scales: npt.NDArray[np.floating],
    minimums: npt.NDArray[np.floating] | None = None,
) -> Floats:
    """Float32 sums over blocks of minimum * 2**e * sum(q), then scale * 2**e * (w . q), fused multiplies and adds.

    Args:
        x: the activations.
        codes: signed weights [n, blocks, 32], or unsigned ones if there are minimums.
        scales: scales of the weights, [n, blocks], exact in fp16.
        minimums: of the blocks, likewise.
    """
    sums = np.zeros((len(x.codes), len(codes)), np.float32)
    steps = np.exp2(x.exponents).T[..., None]
    dots = np.einsum("rbk,nbk->brn", x.codes, codes) * steps
    totals = x.codes.sum(axis=-1).T[..., None] * steps
    for block, dot in enumerate(dots):
        if minimums is not None:
            sums = (totals[block] * minimums[:, block].astype(np.float64) + sums).astype(np.float32)
        sums = (dot * scales[:, block].astype(np.float64) + sums).astype(np.float32)
    return sums


def unpack(packed: npt.NDArray[np.uint8], form: WeightFormat) -> npt.NDArray[np.int64]:
    """Unpack codes [..., bytes of k codes] to signed weights [..., k]; to unsigned ones of an affine format."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, form.bits)
    return (bits.astype(np.int64) << np.arange(form.bits)).sum(axis=-1) - form.zero


def to_steps(x: Floats, step: float) -> npt.NDArray[np.int64]:
    """Codes of a static scale: clamp(round(x / step), -128, 127)."""
    return np.clip(np.rint(x / np.float32(step)), -128, 127).astype(np.int64)


def on_steps(x: Floats, step: float) -> Floats:
    """The numbers that the codes of `to_steps` stand for; x itself if step is 0."""
    return (to_steps(x, step) * np.float32(step)).astype(np.float32) if step else x


def project_steps(x: Floats, weights: npt.NDArray[np.int64], scales: Floats, step: float, output_step: float) -> Floats:
    """Exact sums of codes [rows, k] times weights [n, k], times one factor per output, rounded to `output_step`."""
    sums = (to_steps(x, step) @ weights.T).astype(np.float32)
    return on_steps(sums * (scales * np.float32(step)), output_step)


def project_floats(x: Floats, weights: Floats, scales: Floats, output_step: float) -> Floats:
    """Sum of two float32 chains of fused multiply-adds, one over even k and one over odd k."""
    sums = np.zeros((2, len(x), len(weights)), np.float32)
    for k, (a, b) in enumerate(zip(x.T.astype(np.float64), weights.T.astype(np.float64), strict=True)):
        sums[k % 2] = (a[:, None] * b + sums[k % 2]).astype(np.float32)
    return on_steps((sums[0] + sums[1]) * scales, output_step)


def gelu(x: Wide) -> Wide:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: Wide) -> Wide:
    return x / (1 + np.exp(-x))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Wide:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x: Floats, cosines: Floats, sines: Floats) -> Wide:
    """Rotary embedding of x [rows, head_dim]; cosines and sines are [rows, head_dim / 2]."""
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def to_int8(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantise rows [n, d] to int8 codes; a row's scale is its largest magnitude / 127."""
    scales = np.maximum(np.abs(x).max(axis=-1), np.float32(1e-30)) / np.float32(127)
    return np.rint(x * (1 / scales)[:, None]).astype(np.int8), scales


def attend(query: Floats, keys: Floats, values: Floats) -> Wide:
    """Attention softmax(q . k) . v: query [heads, d], keys and values [n, d] -> [heads, d]."""
    scores = query.astype(np.float64) @ keys.astype(np.float64).T
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values.astype(np.float64)


def scores(query: Floats, keys: npt.NDArray[Any]) -> Floats:
    """Scores q . k, [heads, n], summed in the kernel's order: 16 sums of every 16th product, then pairwise by halves.

    A product of float32 and fp16 or int8 is exact in float64, so rounding a sum to float32 equals a fused multiply-add.
    """
    products = query.astype(np.float64)[:, None] * keys.astype(np.float64)[None]
    sums = np.zeros((len(query), len(keys), 16), np.float32)
    for start in range(0, query.shape[1], 16):
        sums = (sums + products[..., start : start + 16]).astype(np.float32)
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def mix(start: Floats, weights: Floats, values: npt.NDArray[Any]) -> Floats:
    """start + weights @ values, adding one row of values at a time: [heads, d], [heads, n], [n, d] -> [heads, d]."""
    for weight, value in zip(weights.T.astype(np.float64), values.astype(np.float64), strict=True):
        start = (weight[:, None] * value + start).astype(np.float32)
    return start


def integer_scores(
    queries: npt.NDArray[np.int64], factors: Floats, keys: npt.NDArray[np.int64], scales: Floats
) -> Floats:
    """Exact integer products of codes, times both scales: [rows, d], [rows], [n, d], [n] -> [rows, n]."""
    return (queries @ keys.T).astype(np.float32) * factors[:, None] * scales


def integer_mix(
    start: Floats, weights: npt.NDArray[np.int64], scales: Floats, values: npt.NDArray[np.int64], chain: int
) -> Floats:
    """Add exact integer sums over `chain` units each, times their scales, to `start`, one after another.

    [rows, d], [units, rows, 32], [units / chain, rows], [units * 32, d] -> [rows, d]
    """
    sums = np.einsum("urp,upd->urd", weights, values.reshape(len(weights), -1, values.shape[1]))
    for sum_of_chain, scale in zip(sums.reshape(-1, chain, *sums.shape[1:]).sum(axis=1), scales, strict=False):
        start = (sum_of_chain * scale.astype(np.float64)[:, None] + start).astype(np.float32)
    return start
