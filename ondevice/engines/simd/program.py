"""Prepares a bundle for the simd engine: reads its models, packs their weights and plans their forwards.

Start with `Program`. `BundleModels` describes a bundle without running it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import Bundle
from ondevice.bundle_format.decoder import Attention, Decoder, GatedDelta
from ondevice.engines.layer_path import WHOLE
from ondevice.engines.simd.buffers import AttentionScratch, Buffers, LookupScratch
from ondevice.engines.simd.caches import LookupSettings
from ondevice.engines.simd.kernels.contract.matrices import SCRATCH_BYTES, STATE_COLUMNS, TILE
from ondevice.engines.simd.model import HeadsModel, read_drafter, read_heads, read_target
from ondevice.engines.simd.pack_file import open_pack, was_truncated
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import Plan, PlanBuilder
from ondevice.engines.simd.plan.drafts import DraftPlan, drafter_plan, heads_plan, pack_drafter, pack_heads
from ondevice.engines.simd.plan.layer import cache_shape
from ondevice.engines.simd.plan.target import TargetPlanner, expert_share, pack_target
from ondevice.engines.simd.tensor_files import TensorFiles
from ondevice.engines.simd.threads import ThreadPool
from ondevice.errors import BundleCorruptError
from ondevice.native.sets import parts_of
from ondevice.preparation import Preparation

MAX_PLANS = 64
"""Most plans that are kept; each has about 40 kB. The search for sub-layers to skip runs hundreds of paths, each a few
times."""


class Program:
    """A bundle ready to run: plans whose addresses point into the pack, the buffers and the mapped tables.

    Attributes:
        models: the models; single rows of their tables are read in place, in the mapped files.
        caches: number of a cache (`Target.cached`) -> its index in a sequence's record.
        cache_shapes: int64[caches, 3], see `contract.slots.CACHE_SHAPES`.
        target: makes plans of the target's forwards.
        plan: `TargetPlanner.plan`, which keeps the MAX_PLANS last used ones; the whole one is made already.
        logits_width: floats in a row of logits: the size of the vocabulary, padded to whole tiles.
        drafter: the plan of a draft step; None without a drafter.
        heads: plans of heads, by kind.
        looked_up: target layers whose cached keys need codes for lookups -> their KV heads, and numbers of a head.
        expert_layers: number of target layers that have experts.
        scratch: working memory of attention, for all threads.
        pool: the threads that run the plans.
    """

    def __init__(
        self,
        bundle: Bundle,
        most_rows: int,
        threads: int,
        preparation: Preparation | None = None,
        lookup: LookupSettings | None = None,
    ) -> None:
        """Read a bundle's models, open or make its pack, and plan all forwards.

        Arguments and errors are those of `SimdEngine`, but for `most_rows`: the most rows of one forward. The mode
        "lookup-drafts" of `lookup` applies to the drafter only.
        """
        self.models = models = BundleModels(bundle)
        config, drafter = bundle.manifest.target, bundle.manifest.drafter
        target, places = models.target, models.layout.places
        self._lookup = lookup
        if preparation is not None:
            preparation.compile(parts_of("simd"))
        self._pack = pack = open_pack(models.layout, models.files, threads, preparation)
        self._buffers = buffers = Buffers()
        self.caches = {number: place for place, number in enumerate(config.cached)}
        self.cache_shapes = np.array([cache_shape(own) for own in config.cached.values()], np.int64)
        of_target = None if lookup is None or lookup.mode == "lookup-drafts" else lookup
        new_plan = partial(PlanBuilder, places, pack, buffers)
        builder = new_plan(most_rows, config.norm_eps)
        self.target = TargetPlanner(target, builder, self.caches, threads, of_target)
        self.plan: Callable[..., Plan] = lru_cache(MAX_PLANS)(self.target.plan)
        self.plan(WHOLE)
        self.logits_width = places[target.head].tiles * TILE
        self.drafter: DraftPlan | None = None
        looking = list(target.layers) if of_target is not None else []
        if models.drafter is not None:
            builder = new_plan(1, models.drafter.config.norm_eps)
            self.drafter = drafter_plan(models.drafter, target, builder, self.caches, lookup)
            looking += models.drafter.layers if lookup is not None else ()
        self.heads = {
            kind: heads_plan(each, target, new_plan(each.config.offsets, config.norm_eps))
            for kind, each in models.heads.items()
        }
        full = [(layer.source, own) for layer in looking if (own := layer.config.mixer).kind == "full"]
        self.looked_up = {source: (own.kv_heads, own.head_dim) for source, own in full if isinstance(own, Attention)}
        self.expert_layers = sum(layer.feed_forward.experts is not None for layer in config.layers)
        decoders: list[Decoder] = [config] if drafter is None else [config, drafter]
        bodies = [own for decoder in decoders for own in decoder.attention]
        head_dim, heads = max(own.head_dim for own in bodies), max(own.heads for own in bodies)
        lookups = None if lookup is None else LookupScratch(heads, head_dim // lookup.width, threads)
        self.scratch = AttentionScratch(head_dim, heads, threads, lookups)
        self.pool = ThreadPool(threads, scratch_bytes(*decoders))
        models.files.release()

    def steps(self, plan: Plan, last: int) -> NDArray[np.int64]:
        """The steps of a plan for rows of which the last has this position: exact ones if none may use lookups."""
        looks_up = self._lookup is not None and last + 1 >= self._lookup.begin
        return plan.steps if looks_up else plan.exact

    def check_files(self) -> None:
        """Check that no mapped file was truncated: reading a missing page would end the process.

        This is called before every forward and draft step, and takes 0.5 us per file.

        Raises:
            BundleCorruptError: a file of the bundle, or its pack, was truncated.
        """
        if was_truncated(self._pack):
            raise BundleCorruptError("the packed weights were cut short while they were in use: load the bundle again")
        if (name := self.models.files.truncated()) is not None:
            raise BundleCorruptError(f"{name} was cut short while it was in use: export the bundle again")


def scratch_bytes(*decoders: Decoder) -> int:
    """Bytes of working memory that a thread needs for the steps of these models, beside that of attention."""
    layers = [layer.mixer for decoder in decoders for layer in decoder.layers]
    heads = [own.head_dim for own in layers if isinstance(own, Attention)]
    states = [own.key_dim * (STATE_COLUMNS + 2) + 2 * STATE_COLUMNS for own in layers if isinstance(own, GatedDelta)]
    return max(SCRATCH_BYTES, 4 * max(heads + states))


class BundleModels:
    """The models of a bundle, read and checked, and the layout of their pack.

    Attributes:
        target, drafter, heads: the models; the drafter is None if there is none, heads are by kind.
        files: the mapped data files.
        layout: the layout, with all matrices.
        experts: see `expert_share`.
    """

    def __init__(self, bundle: Bundle) -> None:
        """
        Raises:
            UnsupportedGraphError, BundleCorruptError: as `Program` does.
        """
        target, drafter = bundle.manifest.target, bundle.manifest.drafter
        self.files, self.layout = TensorFiles(bundle), PackLayout()
        self.target = read_target(self.files, bundle.manifest)
        pack_target(self.layout, self.target)
        self.experts = expert_share(self.target, self.layout.places)
        self.drafter = None if drafter is None else read_drafter(self.files, drafter, self.target)
        if self.drafter is not None:
            pack_drafter(self.layout, self.drafter)
        self.heads: dict[str, HeadsModel] = {
            heads.kind: read_heads(self.files, heads, target) for heads in bundle.manifest.heads
        }
        for heads in self.heads.values():
            pack_heads(self.layout, heads)

    def weight_classes(self) -> dict[str, dict[str, int]]:
        """Number of weights of target and drafter: purpose of the weights -> format -> number.

        A token embedding that is tied to the head counts as both.
        """
        target, drafter = self.target, self.drafter
        matrices = [found for layer in target.layers for found in layer.by_purpose().items()]
        if (own := target.per_layer) is not None:
            matrices += [("per_layer_projection", [own.projection]), ("per_layer_table", [own.table])]
        if (mtp := target.mtp) is not None:
            matrices += [("drafter", [mtp.embedding, mtp.hidden, mtp.keys, mtp.values])]
        matrices += [("embedding", [target.table]), ("head", [target.head])]
        if drafter is not None:
            matrices += [("drafter", found) for layer in drafter.layers for found in layer.by_purpose().values()]
            matrices += [
                ("drafter", [each for each in (drafter.pre_projection, drafter.post_projection) if each is not None])
            ]
            matrices += [("drafter_head", [drafter.head])]
        counts: dict[str, Counter[str]] = {}
        for purpose, found in matrices:
            for matrix in found:
                counts.setdefault(purpose, Counter())[matrix.format.name] += matrix.rows * matrix.width
        return {purpose: dict(count.most_common()) for purpose, count in counts.items()}
