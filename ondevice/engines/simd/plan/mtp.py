"""The steps that make the inputs, keys and values of an MTP layer (`Target.mtp`), in a forward and in a draft step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ondevice.bundle_format.decoder import Decoder
from ondevice.engines.simd.buffers import float_bits
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.matrices import TILE
from ondevice.engines.simd.kernels.contract.steps import Convolve, Head, Residual
from ondevice.engines.simd.model import MtpInputs, TargetModel
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder, input_form
from ondevice.engines.simd.plan.layer import KIND_NUMBERS

_BEFORE = 2
"""Positions of a convolution that has the state of the row before as its sum."""


def pack_mtp(layout: PackLayout, inputs: MtpInputs) -> None:
    """Add the matrices to the pack."""
    layout.add(inputs.embedding)
    layout.add(inputs.hidden)
    if inputs.values.joins(inputs.keys):
        layout.add(inputs.keys, inputs.values)
    else:
        layout.add(inputs.keys)
        layout.add(inputs.values)


class MtpPlanner:
    """Adds the steps of all rows of a forward, or of the row of a draft step."""

    def __init__(
        self,
        builder: PlanBuilder,
        target: TargetModel,
        inputs: MtpInputs,
        caches: Mapping[int, int],
        rotation: tuple[Decoder, int | None],
        x: int,
    ) -> None:
        """
        Args:
            builder: collects the steps, and allocates buffers.
            target: the target, whose token embedding is read.
            inputs: its weights for the layer.
            caches: as for `LayerPlanner`.
            rotation: the decoder whose rotary embeddings a forward has, and the index of that of the keys.
            x: address of float32[rows, H], to which the input of the layer is written.
        """
        self._builder, self._target, self._inputs = builder, target, inputs
        assert target.config.mtp is not None
        self._own, (decoder, rotary) = target.config.mtp, rotation
        self._width = width = target.config.hidden_size
        self._rotary = -1 if rotary is None else 4 * sum(map(len, decoder.rotary[:rotary]))
        self._states, self._cache = 2 * caches[len(target.config.layers)], 2 * caches[target.config.mtp_cache]
        self._x = x
        self._embedded, self._projected, self._before = (builder.rows(width) for _ in range(3))
        self._entry, self._heads = builder.rows(width), builder.rows(2 * self._own.kv_width)
        self._taps = np.array([[0], [1]], np.float32).repeat(width, axis=1)

    def add_rows(self, hidden: int) -> None:
        """Add the steps of a forward's rows, whose residual stream after the last layer is at an address.

        The projected state of the row before comes from the same forward or from the cache, as the products of a
        convolution do.
        """
        builder, width, sliding = self._builder, self._width, KIND_NUMBERS["sliding"]
        self._project_states(hidden, self._projected)
        taps = builder.constant(self._taps)
        builder.add(
            Convolve(
                slots.ALL, self._projected, 4 * width, width, taps=taps, window=_BEFORE,
                kind=sliding, cache=self._states, half=2 * width, activations=0, form=0, sums=self._before,
            )
        )  # fmt: skip
        self._add_inputs()

    def add_step(self, hidden: int) -> None:
        """Add the steps of a draft step, which follows the hidden state float32[H] at an address."""
        self._project_states(hidden, self._before)
        self._add_inputs()

    def _project_states(self, hidden: int, out: int) -> None:
        builder, inputs = self._builder, self._inputs
        builder.quantize(slots.ALL, hidden, self._width, self._entry, inputs.hidden, inputs.hidden_norm)
        builder.project(slots.ALL, inputs.hidden, self._entry, out)

    def _add_inputs(self) -> None:
        """Add the steps that compute x, keys and values, and write the latter two to the cache."""
        builder, inputs, own, width = self._builder, self._inputs, self._own, self._width
        builder.embed(self._target.table, self._target.config.embedding_factor, self._embedded, 4 * width)
        builder.quantize(slots.ALL, self._embedded, width, self._entry, inputs.embedding, inputs.embedding_norm)
        builder.project(slots.ALL, inputs.embedding, self._entry, self._x)
        norm, form, column = builder.constant(inputs.norm), input_form(inputs.keys), 0
        builder.add(
            Residual(
                slots.ALL, self._x, width, builder.eps, x=self._before, next_weight=norm,
                activations=self._entry, form=form,
            )
        )  # fmt: skip
        for part in (inputs.keys, inputs.values):
            if part not in builder.places:  # values that are joined with keys
                continue
            if column and input_form(part) != form:
                builder.quantize(slots.ALL, self._x, width, self._entry, part, inputs.norm)
            builder.project(slots.ALL, part, self._entry, self._heads + column, stride=8 * own.kv_width)
            column += 4 * TILE * builder.places[part].tiles
        builder.add(
            Head(
                slots.ALL, self._heads, 8 * own.kv_width, 0, own.kv_heads, own.head_dim,
                query_norm=0, key_norm=0 if inputs.key_norm is None else builder.constant(inputs.key_norm),
                value_norm=0, value=own.kv_width, rotary=self._rotary, scale=float_bits(1.0),
                kind=KIND_NUMBERS["full"], cache=self._cache, eps=builder.eps,
            )
        )  # fmt: skip
