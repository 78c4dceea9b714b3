"""How wide the weights of a model are, by what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ondevice.engines.simd.graph.model import (
    Centroids,
    DecoderLayer,
    DrafterModel,
    Matrix,
    PerLayerInputs,
    Table,
    TargetModel,
)

Classes = dict[str, dict[str, int]]
"""Weights by class, then by format."""


def weight_classes(target: TargetModel, drafter: DrafterModel | None) -> Classes:
    """Of a target and its drafter; a table that is the head too is counted as both."""
    found: dict[str, Counter[str]] = {}
    for name, stored in (*_of_target(target), *(() if drafter is None else _of_drafter(drafter))):
        rows = stored.rows if isinstance(stored, Matrix) else stored.entries
        found.setdefault(name, Counter())[stored.format.name] += rows * stored.width
    return {name: dict(counts.most_common()) for name, counts in found.items()}


def _of_target(model: TargetModel) -> Iterator[tuple[str, Matrix | Table]]:
    yield from _of_layers(model.layers)
    if model.per_layer is not None:
        yield from _of_per_layer(model.per_layer)
    yield "embedding", model.table
    yield "head", model.head


def _of_layers(layers: Iterable[DecoderLayer]) -> Iterator[tuple[str, Matrix | Table]]:
    for layer in layers:
        attention, new, own = layer.attention, layer.attention.new, layer.per_layer
        yield from (("attention", each) for each in (attention.query, attention.output))
        yield from (("attention", each) for each in (() if new is None else (new.key, new.value)) if each is not None)
        yield from (("mlp", each) for each in (layer.gate, layer.up, layer.down))
        if (experts := layer.experts) is not None:
            yield from (("experts", each) for each in (*experts.gate_up, *experts.down))
        yield from (("per_layer", each) for each in (() if own is None else (own.gate, own.projection)))


def _of_per_layer(model: PerLayerInputs) -> Iterator[tuple[str, Matrix | Table]]:
    yield "per_layer_projection", model.projection
    yield "per_layer_table", model.table


def _of_drafter(model: DrafterModel) -> Iterator[tuple[str, Matrix | Table]]:
    yield from (("drafter", each) for _, each in _of_layers(model.layers))
    yield from (("drafter", each) for each in (model.pre_projection, model.post_projection))
    yield "drafter_head", model.head.table if isinstance(model.head, Centroids) else model.head
