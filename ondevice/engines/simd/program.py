"""Prepares a bundle for the simd engine: reads its models, packs their weights and plans their forwards.

Start with `load_program`. `pack_state`, `read_models` and `weight_classes` describe a bundle without running it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import Bundle
from ondevice.engines.layer_path import WHOLE, LayerPath
from ondevice.engines.protocol import ExpertShare
from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.forward_state import Frequencies, frequencies
from ondevice.engines.simd.model import (
    Centroids,
    DecoderLayer,
    DrafterModel,
    HeadsModel,
    PerLayerInputs,
    TargetModel,
    read_drafter,
    read_heads,
    read_target,
)
from ondevice.engines.simd.pack_file import PackState, find_pack, open_pack, was_truncated
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import exact_plan
from ondevice.engines.simd.plan.drafter import DrafterPlan, drafter_plan, pack_drafter
from ondevice.engines.simd.plan.heads import HeadsPlan, heads_plan, pack_heads
from ondevice.engines.simd.plan.layer import scratch_bytes, widest_attention
from ondevice.engines.simd.plan.target import TargetPlanner, expert_share, pack_target
from ondevice.engines.simd.tensor_files import Matrix, TensorFiles
from ondevice.errors import BundleCorruptError
from ondevice.native.functions import PARTS_OF_ENGINES
from ondevice.preparation import Preparation

MOST_PLANS = 64
"""Most plans that are kept besides the whole forward's; each has about 40 kB. The search for sub-layers to skip runs
hundreds of paths, each a few times."""

Classes = dict[str, dict[str, int]]
"""Purpose of weights -> format -> number of weights."""


@dataclass(frozen=True)
class Piece:
    """The part of a forward that one plan runs.

    path : the layers and sub-layers that are run
    side : "lower" for the layers before `cut`, "upper" for those from `cut` on, None for all
    cut : index of a layer
    """

    path: LayerPath = WHOLE
    side: Literal["lower", "upper"] | None = None
    cut: int = 0


@dataclass(frozen=True, eq=False)
class Steps:
    """A plan in two forms, both int64[steps, WIDTH].

    planned : with lookup attention if it was chosen for the target, else the same as `exact`
    exact : for forwards in which no row uses lookups
    """

    planned: NDArray[np.int64]
    exact: NDArray[np.int64]


class TargetPlans:
    """The plans of the target's forwards. Each is made when first needed; the MOST_PLANS last used are kept.

    Attributes:
        planner: makes the plans, and owns the buffers that all of them work in.
        whole: the plan of a whole forward.
    """

    def __init__(self, planner: TargetPlanner) -> None:
        self.planner = planner
        self.whole = self._made(Piece())
        self._kept: dict[Piece, Steps] = {}

    def steps(self, piece: Piece, *, looks_up: bool) -> NDArray[np.int64]:
        """The plan of a piece, int64[steps, WIDTH]; with exact attention unless `looks_up`."""
        steps = self.whole if piece.side is None and piece.path.is_whole else self._other(piece)
        return steps.planned if looks_up else steps.exact

    def _other(self, piece: Piece) -> Steps:
        steps = self._kept.pop(piece, None) or self._made(piece)
        while len(self._kept) >= MOST_PLANS:
            self._kept.pop(next(iter(self._kept)))  # the least recently used
        self._kept[piece] = steps
        return steps

    def _made(self, piece: Piece) -> Steps:
        planner = self.planner
        if piece.side is None:
            planned = planner.whole(piece.path)
        elif piece.side == "lower":
            planned = planner.lower(piece.path, piece.cut)
        else:
            planned = planner.upper(piece.path, piece.cut)
        return Steps(planned, exact_plan(planned))


@dataclass(frozen=True)
class Program:
    """A bundle ready to run: plans whose addresses point into the pack, the buffers and the mapped tables."""

    caches: Mapping[int, int]
    """Target layer -> index of its cache in a sequence's record, for the layers that have their own cache."""
    target: TargetPlans
    """Plans of the target's forwards."""
    target_frequencies: Frequencies
    """Rotary frequencies of the target's layers, by kind of attention."""
    logits_width: int
    """Floats in a row of logits: the size of the vocabulary, padded to whole tiles."""
    drafter: DrafterPlan | None
    exact_drafter: NDArray[np.int64] | None
    """The steps of `drafter` with exact attention; None without a drafter."""
    drafter_frequencies: Frequencies
    """Rotary frequencies of the drafter's layers, by kind of attention; empty without a drafter."""
    heads: Mapping[str, HeadsPlan]
    """Plans of heads, by kind."""
    looked_up: frozenset[int]
    """Target layers whose cached keys need codes for lookups."""
    scratch_bytes: int
    """Working memory per thread, in bytes."""
    expert_layers: int
    """Number of target layers that have experts."""
    experts: ExpertShare | None
    widest_attention: tuple[int, int]
    """Largest head dimension, and most query heads of a layer."""
    buffers: Buffers
    """Keeps the memory that the plans' addresses point to."""
    files: TensorFiles
    """The mapped data files. Single rows of their tables are read in place."""
    pack: NDArray[np.uint8]
    """The packed weights, uint8[bytes]; a mapped file if the pack could be saved."""

    def widest_lookup(self, width: int) -> tuple[int, int]:
        """Most query heads of a layer, and most codes per key if each code stands for `width` numbers."""
        size, heads = self.widest_attention
        return heads, size // width

    def check_files(self) -> None:
        """Check that no mapped file was truncated: reading a missing page would end the process.

        This is called before every forward and draft step, and takes 0.5 us per file.

        Raises:
            BundleCorruptError: a file of the bundle, or its pack, was truncated.
        """
        if was_truncated(self.pack):
            raise BundleCorruptError("the packed weights were cut short while they were in use: load the bundle again")
        if (name := self.files.truncated()) is not None:
            raise BundleCorruptError(f"{name} was cut short while it was in use: export the bundle again")


def load_program(
    bundle: Bundle,
    most_rows: int,
    threads: int,
    preparation: Preparation | None = None,
    lookup: LookupSettings | None = None,
) -> Program:
    """Read a bundle's models, open or make its pack, and plan all forwards.

    Args:
        bundle: the bundle.
        most_rows: most rows of one forward.
        threads: number of threads that will run the plans.
        preparation: compiles missing kernels now, and reports progress; None compiles them during the first forward.
        lookup: how layers with full attention choose keys by lookup; None for exact attention. The mode "lookup-drafts"
            applies to the drafter only.

    Raises:
        UnsupportedGraphError: there is no kernel for the format or size of some weights.
        BundleCorruptError: the weights do not match the manifest.
    """
    read = _Read(bundle)
    of_target = None if lookup is None or lookup.mode == "lookup-drafts" else lookup
    if preparation is not None:
        preparation.compile(PARTS_OF_ENGINES["simd"])
    pack = open_pack(read.layout, read.files, threads, preparation or Preparation())
    buffers, model, drafter, places = Buffers(), read.model, read.drafter, read.layout.places
    caches = {layer: place for place, layer in enumerate(bundle.manifest.target.kv_layers())}
    plans = TargetPlans(TargetPlanner(model, places, caches, pack, buffers, most_rows, threads, of_target))
    layers: list[DecoderLayer] = list(model.layers)
    drafter_steps = None
    if drafter is not None:
        drafter_steps = drafter_plan(drafter, places, caches, pack, buffers, lookup)
        layers += drafter.layers
    heads = {kind: heads_plan(heads, model, places, pack, buffers) for kind, heads in read.heads.items()}
    looking = layers if of_target is not None else [] if lookup is None else layers[len(model.layers) :]
    looked_up = frozenset(layer.attention.source for layer in looking if layer.attention.kind == "full")
    width = places[model.head].tiles * 16
    expert_layers = sum(layer.experts is not None for layer in model.layers)
    read.files.release()
    return Program(
        caches, plans, read.target_frequencies, width, drafter_steps,
        None if drafter_steps is None else exact_plan(drafter_steps.steps), read.drafter_frequencies,
        heads, looked_up, scratch_bytes(layers), expert_layers, read.experts,
        widest_attention(layers), buffers, read.files, pack,
    )  # fmt: skip


def pack_state(bundle: Bundle) -> PackState:
    """The state of a bundle's pack. The models are read and checked, but nothing is packed.

    Raises:
        UnsupportedGraphError, BundleCorruptError: as `load_program` does.
    """
    read = _Read(bundle)
    return find_pack(read.layout, read.files.content())


def read_models(bundle: Bundle) -> tuple[TargetModel, DrafterModel | None]:
    """The target and the drafter of a bundle, None if it has no drafter; raises as `load_program` does."""
    read = _Read(bundle)
    return read.model, read.drafter


def weight_classes(target: TargetModel, drafter: DrafterModel | None) -> Classes:
    """Count the weights of a target and its drafter by purpose and format.

    A token embedding that is tied to the head counts as both.
    """
    found: dict[str, Counter[str]] = {}
    for name, stored in (*_of_target(target), *(() if drafter is None else _of_drafter(drafter))):
        found.setdefault(name, Counter())[stored.format.name] += stored.rows * stored.width
    return {name: dict(counts.most_common()) for name, counts in found.items()}


class _Read:
    """The models of a bundle, read and checked, and the layout of their pack."""

    drafter: DrafterModel | None = None

    def __init__(self, bundle: Bundle) -> None:
        target, drafter = bundle.manifest.target, bundle.manifest.drafter
        self.files, self.layout = TensorFiles(bundle), PackLayout()
        self.model = read_target(self.files, bundle.manifest)
        self.target_frequencies = frequencies(self.model.layers)
        pack_target(self.layout, self.model)
        self.experts = expert_share(self.model, self.layout.places)
        self.drafter_frequencies: Frequencies = {}
        self.heads: dict[str, HeadsModel] = {}
        if drafter is not None:
            self.drafter = read_drafter(self.files, drafter, self.model)
            self.drafter_frequencies = frequencies(self.drafter.layers)
            pack_drafter(self.layout, self.drafter)
        for entry in bundle.manifest.heads:
            self.heads[entry.kind] = read_heads(self.files, entry, target)
            pack_heads(self.layout, self.heads[entry.kind])


def _of_target(model: TargetModel) -> Iterator[tuple[str, Matrix]]:
    yield from _of_layers(model.layers)
    if model.per_layer is not None:
        yield from _of_per_layer(model.per_layer)
    yield "embedding", model.table
    yield "head", model.head


def _of_layers(layers: Iterable[DecoderLayer]) -> Iterator[tuple[str, Matrix]]:
    for layer in layers:
        attention, new, own = layer.attention, layer.attention.new, layer.per_layer
        yield from (("attention", each) for each in (attention.query, attention.output))
        yield from (("attention", each) for each in (() if new is None else (new.key, new.value)) if each is not None)
        yield from (("mlp", each) for each in (layer.gate, layer.up, layer.down))
        if (experts := layer.experts) is not None:
            yield from (("experts", each) for each in (*experts.gate_up, *experts.down))
        yield from (("per_layer", each) for each in (() if own is None else (own.gate, own.projection)))


def _of_per_layer(model: PerLayerInputs) -> Iterator[tuple[str, Matrix]]:
    yield "per_layer_projection", model.projection
    yield "per_layer_table", model.table


def _of_drafter(model: DrafterModel) -> Iterator[tuple[str, Matrix]]:
    yield from (("drafter", each) for _, each in _of_layers(model.layers))
    yield from (("drafter", each) for each in (model.pre_projection, model.post_projection))
    yield "drafter_head", model.head.table if isinstance(model.head, Centroids) else model.head
