"""Chooses a format of 4 bits or int8 for every matrix of a target, so that all together have a given number of bits.

Matrices get more bits in the order in which this lowers the loss most per byte. The loss of a matrix is its squared
error relative to its weights, measured in each format on some of its rows, times the sensitivity of its kind: the KL
divergence that such an error causes in all layers together, measured on published models by
`benchmarks.quality.sensitivity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT4_TABLE, INT8, MXFP4, WeightFormat
from ondevice.errors import UsageError
from ondevice_export.checkpoint.models import TargetCheckpoint
from ondevice_export.quantize import BLOCK, dequantize, quantize

FORMATS = (INT4, INT4_TABLE, INT4_AFFINE, INT8)
"""From the least bits on, which the first two have: a matrix begins with the better one of them."""

NARROW = 2
"""Number of formats with the least bits."""

SAMPLED_ROWS = 64
"""Rows of a matrix, evenly spread, on which its error is measured."""

SENSITIVITY: Mapping[str, float] = {
    "q_proj": 2.0,
    "k_proj": 2.0,
    "v_proj": 12.4,
    "o_proj": 2.2,
    "gate_proj": 3.3,
    "up_proj": 6.5,
    "down_proj": 13.8,
    "embed_tokens": 11.5,
}
"""Kind of a matrix -> KL divergence, in nats per token, over the relative squared error of all matrices of the kind:
measured on SmolLM2-135M, 1,530 tokens, with int4 for one kind at a time. The token table is the head too."""

OTHERS = 5.0
"""The same for kinds that it does not have."""


def check_budget(bits: float) -> None:
    """
    Raises:
        UsageError: no choice of formats has this number of bits per weight.
    """
    least, most = FORMATS[0].stored_bits, FORMATS[-1].stored_bits
    if not least <= bits <= most:
        raise UsageError(f"--bits-per-weight is {bits:g}: choose a number from {least:g} to {most:g}")


def choose_formats(target: TargetCheckpoint, bits: float) -> dict[str, WeightFormat]:
    """The format of every matrix by its name in the checkpoint, with at most `bits` per weight on average.

    Matrices in MXFP4, which stay as they are, count with the bits that they have.
    """
    matrices = target.matrices
    shapes = {name: shape for name, shape in matrices.items() if target.checkpoint.kept_format(name) != MXFP4}
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    kinds = {name: kind_of(name) for name in shapes}
    members = {kind: sum(each == kind for each in kinds.values()) for kind in kinds.values()}
    losses = {
        name: [SENSITIVITY.get(kinds[name], OTHERS) / members[kinds[name]] * error for error in errors(target, name)]
        for name in shapes
    }
    levels = {name: min(range(NARROW), key=each.__getitem__) for name, each in losses.items()}
    room = (bits - FORMATS[0].stored_bits) * sum(map(math.prod, matrices.values()))
    while steps := [
        ((losses[name][level] - losses[name][wider]) / cost, name, wider, cost)
        for name, level in levels.items()
        for wider in range(level + 1, len(FORMATS))
        if (cost := counts[name] * (FORMATS[wider].stored_bits - FORMATS[level].stored_bits)) <= room
        and losses[name][wider] < losses[name][level]
    ]:
        _, name, wider, cost = max(steps)
        levels[name] = wider
        room -= cost
    return {name: FORMATS[level] for name, level in levels.items()}


def kind_of(name: str) -> str:
    """The kind of a matrix: the last word of its name but `weight`; the head counts as the token table."""
    if name.endswith(HEAD):
        name = EMBEDDING
    return name.removesuffix(".weight").rpartition(".")[2]


def errors(target: TargetCheckpoint, name: str) -> Iterator[float]:
    """The squared error relative to the weights' squares in each of `FORMATS`, on some rows of a matrix."""
    *leading, width = target.checkpoint.shape(name)
    rows = math.prod(leading)
    if width % BLOCK:
        return iter([0.0] * len(FORMATS))  # the writer refuses it by its name
    picked = np.unique(np.linspace(0, rows - 1, SAMPLED_ROWS).astype(int))
    sample = np.concatenate([target.checkpoint.rows(name, row, row + 1) for row in picked.tolist()])
    squares = float(np.square(sample).sum()) or 1.0
    return (float(np.square(sample - dequantize(quantize(sample, form), form)).sum()) / squares for form in FORMATS)
