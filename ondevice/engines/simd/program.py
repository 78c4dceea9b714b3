"""Prepares a bundle for the simd engine: its graphs are read, their weights packed, their forwards planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import Bundle
from ondevice.engines.protocol import ExpertShare
from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.forward_state import Frequencies, frequencies
from ondevice.engines.simd.graph.drafter import read_drafter
from ondevice.engines.simd.graph.heads import read_heads
from ondevice.engines.simd.graph.model import DecoderLayer, DrafterModel, HeadsModel, TargetModel
from ondevice.engines.simd.graph.sources import Sources
from ondevice.engines.simd.graph.target import read_target
from ondevice.engines.simd.lookup_settings import LookupSettings
from ondevice.engines.simd.pack.file import PackState, find_pack, open_pack, was_truncated
from ondevice.engines.simd.pack.layout import PackLayout
from ondevice.engines.simd.plan.drafter import DrafterPlan, PackedDrafter, drafter_plan, pack_drafter
from ondevice.engines.simd.plan.exact import exact_plan
from ondevice.engines.simd.plan.heads import HeadsPlan, PackedHeads, heads_plan, pack_heads
from ondevice.engines.simd.plan.layer import scratch_bytes, widest_attention
from ondevice.engines.simd.plan.target import PackedTarget, TargetPlanner, expert_share, pack_target
from ondevice.engines.simd.target_plans import TargetPlans
from ondevice.errors import BundleCorruptError
from ondevice.preparation import SIMD, SIMD_LAST, TOKENS, Preparation


@dataclass(frozen=True)
class Program:
    """What an engine runs: steps whose addresses point into the pack, the buffers and the mapped tables."""

    caches: Mapping[int, int]
    """Where a sequence's record has the cache of each target layer that owns one: its place among them."""
    target: TargetPlans
    """The steps of forwards of the target."""
    target_frequencies: Frequencies
    """Rotary frequencies of the target's layers, by kind of attention."""
    logits_width: int
    """Floats in a row of logits: the vocabulary, padded to whole tiles."""
    drafter: DrafterPlan | None
    exact_drafter: NDArray[np.int64] | None
    """The steps of `drafter` where they look no keys up."""
    drafter_frequencies: Frequencies
    heads: Mapping[str, HeadsPlan]
    """By kind."""
    looked_up: frozenset[int]
    """Layers whose keys are looked up."""
    scratch_bytes: int
    """Working memory of a thread, in bytes."""
    expert_layers: int
    """Layers of the target that have experts."""
    experts: ExpertShare | None
    widest_attention: tuple[int, int]
    """Numbers of the widest head, and most query heads of a layer."""
    buffers: Buffers
    sources: Sources
    """The mapped data files, of whose tables single rows are read."""
    pack: NDArray[np.uint8]

    def widest_lookup(self, width: int) -> tuple[int, int]:
        """Most query heads, and most codes of `width` numbers, that are looked up together."""
        size, heads = self.widest_attention
        return heads, size // width

    def check_files(self) -> None:
        """Before every forward and draft step, which would end the process otherwise; it takes 0.5 us a mapped file.

        Raises:
            BundleCorruptError: a file of the bundle, or its pack, was cut short while it is mapped.
        """
        if was_truncated(self.pack):
            raise BundleCorruptError("the packed weights were cut short while they were in use: load the bundle again")
        if (name := self.sources.truncated()) is not None:
            raise BundleCorruptError(f"{name} was cut short while it was in use: export the bundle again")


def load_program(
    bundle: Bundle,
    most_rows: int,
    threads: int,
    preparation: Preparation | None = None,
    lookup: LookupSettings | None = None,
) -> Program:
    """Read a bundle's graphs and plan their forwards; with `lookup`, full attention chooses its keys by codes.

    Raises:
        UnsupportedGraphError: a graph holds something that there is no kernel for.
        BundleCorruptError: a file is not what it claims to be.
    """
    read = _Read(bundle)
    of_target = None if lookup is None or lookup.mode == "lookup-drafts" else lookup
    if preparation is not None:
        preparation.compile((*TOKENS, *SIMD, SIMD_LAST))
    pack = open_pack(read.layout, read.sources, threads, preparation or Preparation())
    buffers, model, drafter = Buffers(), read.model, read.drafter
    caches = {layer: place for place, layer in enumerate(bundle.manifest.target.kv_layers())}
    plans = TargetPlans(TargetPlanner(model, read.packed, caches, pack, buffers, most_rows, threads, of_target))
    layers: list[DecoderLayer] = list(model.layers)
    drafter_steps = None
    if drafter is not None and read.packed_drafter is not None:
        drafter_steps = drafter_plan(drafter, read.packed_drafter, caches, pack, buffers, lookup)
        layers += drafter.layers
    heads = {kind: heads_plan(heads, model, packed, pack, buffers) for kind, (heads, packed) in read.heads.items()}
    looking = layers if of_target is not None else [] if lookup is None else layers[len(model.layers) :]
    looked_up = frozenset(layer.attention.source for layer in looking if layer.attention.kind == "full")
    width = read.packed.head.tiles * 16
    expert_layers = sum(layer.experts is not None for layer in model.layers)
    read.sources.release()
    return Program(
        caches, plans, read.target_frequencies, width, drafter_steps,
        None if drafter_steps is None else exact_plan(drafter_steps.steps), read.drafter_frequencies,
        heads, looked_up, scratch_bytes(layers), expert_layers, expert_share(model, read.packed),
        widest_attention(layers), buffers, read.sources, pack,
    )  # fmt: skip


def pack_state(bundle: Bundle) -> PackState:
    """The pack of a bundle, or where it would be.

    Raises what `load_program` does, as far as reading the graphs tells.
    """
    read = _Read(bundle)
    return find_pack(read.layout, read.sources.content())


def read_models(bundle: Bundle) -> tuple[TargetModel, DrafterModel | None]:
    """The target and the drafter of a bundle's graphs; raises what `load_program` does."""
    read = _Read(bundle)
    return read.model, read.drafter


class _Read:
    """The models of a bundle, read and checked, and the layout of their pack."""

    drafter: DrafterModel | None = None
    packed_drafter: PackedDrafter | None = None

    def __init__(self, bundle: Bundle) -> None:
        target, drafter = bundle.manifest.target, bundle.manifest.drafter
        self.sources, self.layout = Sources(bundle), PackLayout()
        self.model = read_target(self.sources.graph(target.graph), target)
        self.target_frequencies = frequencies(self.model.layers)
        self.packed: PackedTarget = pack_target(self.layout, self.model)
        self.drafter_frequencies: Frequencies = {}
        self.heads: dict[str, tuple[HeadsModel, PackedHeads]] = {}
        if drafter is not None:
            self.drafter = read_drafter(self.sources.graph(drafter.graph), target, drafter)
            self.drafter_frequencies = frequencies(self.drafter.layers)
            self.packed_drafter = pack_drafter(self.layout, self.drafter)
        for entry in bundle.manifest.heads:
            heads = read_heads(self.sources.graph(entry.graph), target, self.model, entry)
            self.heads[entry.kind] = heads, pack_heads(self.layout, heads, self.packed.head)
