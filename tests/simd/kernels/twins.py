"""The kernels reimplemented in plain numpy with the same arithmetic: int8 activations with a scale per block of 32."""

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
    scales: Floats
    """The scale of each block, [rows, blocks]; NaN for a block of NaN."""

    def values(self) -> Wide:
        """The numbers that the codes stand for, [rows, blocks * 32]."""
        scaled: Wide = np.multiply(self.codes, self.scales.astype(np.float64)[..., None])
        return scaled.reshape(len(self.codes), -1)


def quantize(x: Floats) -> Quantized:
    """Codes x / scale, ties to even; the scale is a 127th of a block's largest |x|, cut to 22 bits of precision."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1) * np.float32(1 / 127)
    scales = np.maximum((largest.view(np.uint32) & ~np.uint32(3)).view(np.float32), np.float32(2.0**-100))
    codes = np.rint(blocks * (np.float32(1) / scales)[..., None]).astype(np.int64)
    return Quantized(codes, scales)


def project(
    x: Quantized,
    codes: npt.NDArray[np.int64],
    scales: npt.NDArray[np.floating],
    minimums: npt.NDArray[np.floating] | None = None,
) -> Floats:
    """Float32 sums over blocks of minimum * (s * sum(q)), then scale * (s * (w . q)), fused multiplies and adds.

    Args:
        x: the activations; s is their scale.
        codes: signed weights [n, blocks, 32], or unsigned ones if there are minimums.
        scales: scales of the weights, [n, blocks], exact in fp16.
        minimums: of the blocks, likewise.
    """
    sums = np.zeros((len(x.codes), len(codes)), np.float32)
    steps = x.scales.astype(np.float64).T[..., None]
    dots = (np.einsum("rbk,nbk->brn", x.codes, codes) * steps).astype(np.float32)
    totals = (x.codes.sum(axis=-1).T[..., None] * steps).astype(np.float32)
    for block, dot in enumerate(dots.astype(np.float64)):
        if minimums is not None:
            sums = (totals[block].astype(np.float64) * minimums[:, block].astype(np.float64) + sums).astype(np.float32)
        sums = (dot * scales[:, block].astype(np.float64) + sums).astype(np.float32)
    return sums


def unpack(packed: npt.NDArray[np.uint8], form: WeightFormat) -> npt.NDArray[np.int64]:
    """Unpack codes [..., bytes of k codes] to their levels [..., k], which are unsigned in an affine format."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, form.bits)
    return form.levels.astype(np.int64)[(bits.astype(np.int64) << np.arange(form.bits)).sum(axis=-1)]


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


def clamped_swiglu(gate: Wide, up: Wide) -> Wide:
    gate = np.minimum(gate, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1)


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


def attend(query: Floats, keys: Floats, values: Floats, sinks: Floats | None = None, softcap: float = 0.0) -> Wide:
    """Attention softmax(q . k) . v: query [heads, d], keys and values [n, d] -> [heads, d].

    sinks : [heads], scores of positions without values; None for none
    softcap : of the other scores; 0 for none
    """
    scores = query.astype(np.float64) @ keys.astype(np.float64).T
    capped = softcap * np.tanh(scores / softcap) if softcap else scores
    return softmax(capped, sinks) @ values.astype(np.float64)


def softmax(scores: Wide, sinks: Floats | None = None) -> Wide:
    """The weights of scores [heads, n], beside the sinks' if there are any."""
    others = np.full((len(scores), 1), -np.inf) if sinks is None else sinks[:, None].astype(np.float64)
    every = np.concatenate([scores, others], axis=1)
    weights = np.exp(every - every.max(axis=-1, keepdims=True))
    return weights[:, :-1] / weights.sum(axis=-1, keepdims=True)


def scores(query: Floats, keys: npt.NDArray[Any]) -> Floats:
    """Scores q . k, [heads, n], adding one product after the other.

    A product of float32 and fp16 or int8 is exact in float64, so rounding a sum to float32 equals a fused multiply-add.
    """
    sums = np.zeros((len(query), len(keys)), np.float32)
    for own, other in zip(query.T.astype(np.float64), keys.T.astype(np.float64), strict=True):
        sums = (own[:, None] * other + sums).astype(np.float32)
    return sums


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
