"""Write a bundle of E2B's exact shapes that computes the reference pair's function: real text at E2B's real cost.

    python -m benchmarks.bundles.widened DIRECTORY [--head-bits 4] [--size E2B|small] [--draft-model DIRECTORY]
    python -m benchmarks.bundles.widened DIRECTORY --beside bundles/reference    # compares the greedy texts of the two

Every tensor of the pair lies in a larger one of zeros. Nothing is written but the bundle: rows are computed as the
exporter asks for them, so an export takes no more memory than any other.

- Hidden state: c = sqrt(W / H) times the pair's in its first H numbers, zero in the others. Then both have the same
  mean square, and a norm gives c times the pair's values. Norms before a projection are divided by c; norms after one
  keep their weights, as what they add to the hidden state has to be c times as large. The embedding needs no change, as
  the model itself multiplies it by sqrt(W).
- Heads: number i of a query or key is number (D' / D) * i of the wide one, which is rotated by the same frequency, also
  beside the same partner half a head further. Values, which are not rotated, keep their places, so that the output
  projection keeps its blocks of 32. Added heads give zero.
- Layers: the pair's lie last among the layers with a KV cache of their own, and last among those without. The others
  are random, and what they add is multiplied by zero. So drafts with a part of the layers look better than they are.
- Tokens that only the wide vocabulary has: the last number of the hidden state is positive, and their rows of the
  embedding are negative there, which takes their logits to minus the soft cap. Their clusters are never scored, but for
  as many as the wide model scores more than the pair does: the candidates are the pair's and tokens that lose.
- The draft model keeps its layers, and gets the wide vocabulary and a block of 32 hidden numbers for the spare one: the
  size of a draft model that is trained for E2B, most of whose weights are embeddings.

Window, context and control tokens are the pair's. At E2B's shape, all matrices of the target but the gates of per-layer
embeddings are scaled by powers of two: their int4 codes are the pair's own. A norm's epsilon counts for up to twice as
much or as little, and so greedy texts may part where two tokens are about equally likely.
`benchmarks.bundles.gguf_files` writes the same weights for llama.cpp, and `benchmarks.drafts.real_text` measures both.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.bundles.gemma4 import DRAFTER, TARGET, Fields
from benchmarks.bundles.random_checkpoints import RandomCheckpoint
from benchmarks.bundles.shape import described_target
from benchmarks.command import command_line, run_command
from ondevice import load
from ondevice.arrays import Float32Array
from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER
from ondevice.bundle_format.decoder import Attention, Decoder, Layer
from ondevice.bundle_format.model_config import DrafterEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import (
    CENTROIDS,
    DRAFTER_CENTROIDS,
    DRAFTER_EMBEDDING,
    DRAFTER_ORDERING,
    EMBEDDING,
    ORDERING,
    PLE_TABLE,
    Shapes,
    drafter_shapes,
    target_shapes,
)
from ondevice.cli.bench.measure import load_scenarios
from ondevice.cli.bench.tables import table
from ondevice.errors import CheckpointError
from ondevice_export.bundle_writer import BundleWriter
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.checkpoint.heads import HeadsCheckpoint, all_shapes, open_heads
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.models import (
    DrafterCheckpoint,
    TargetCheckpoint,
    open_drafter,
    open_target,
)
from ondevice_export.checkpoint.named_tensors import NamedTensors
from ondevice_export.checkpoint.source import Checkout, locate
from ondevice_export.export_options import ExportOptions
from ondevice_export.families import read_target
from ondevice_export.families.gemma4_assistant import read_drafter
from ondevice_export.graph_files import GraphFiles
from ondevice_export.manifest import make_manifest
from ondevice_export.text_files import copy_text_files

PAIR = Path(__file__).parents[2] / "models" / "reference"
IntArray = npt.NDArray[np.int64]

PREFIX = "model."

OF_THE_PAIR = (
    "sliding_window",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "final_logit_softcapping",
)
CONTROL = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENS = 96
"""The length of the replies that are compared."""

_SMALL: Fields = {
    "hidden_size": 384,
    "num_hidden_layers": 15,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3,
    "num_attention_heads": 6,
    "head_dim": 128,
    "global_head_dim": 256,
    "intermediate_size": 512,
    "num_kv_shared_layers": 5,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 12_288,
    "vocab_size": 12_288,
}
_SMALL_DRAFTER: Fields = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "global_head_dim": 256,
    "intermediate_size": 512,
    "vocab_size": 12_288,
}

SIZES: dict[str, tuple[Fields, Fields]] = {
    "E2B": (TARGET, DRAFTER),
    "small": (
        {**TARGET, **_SMALL},
        {
            **DRAFTER,
            "backbone_hidden_size": 384,
            "num_centroids": 96,
            "centroid_intermediate_top_k": 12,
            "text_config": {**DRAFTER["text_config"], **_SMALL_DRAFTER},
        },
    ),
}
"""`config.json` of target and drafter. The small one is for tests: wider than the pair in every dimension."""

USED, UNUSED = 2.0**-14, -(2.0**14)
"""The spare number of a token's embedding row: what brings it into the hidden state, and what takes logits down.

Each is alone in its block of 32, so every format holds it exactly. The spare number is about `LEVEL` after a norm: the
logits of the pair's tokens rise by 2e-6, the others' fall by 512."""

BLOCK = 32
"""Numbers that share a scale."""

LEVEL = 2.0**-5
RMS = 4.0
"""Root mean square of a hidden state at its last norm; it may be 8 times as large or small."""


@dataclass(frozen=True)
class Placed:
    """A tensor of the pair in a wide tensor of zeros.

    values : float32[r, k], scaled for the wide model; a vector is one row
    rows, columns : int64[r], int64[k], ascending places in the wide tensor
    marks : float32[wide rows], the last column of the wide tensor; None leaves it as it is
    """

    values: Float32Array
    rows: IntArray
    columns: IntArray
    marks: Float32Array | None = None

    def picked_rows(self, indices: IntArray, width: int) -> Float32Array:
        """The rows `indices` of the wide tensor, float32[n, width]."""
        found = np.zeros((len(indices), width), np.float32)
        own = np.minimum(np.searchsorted(self.rows, indices), len(self.rows) - 1)
        hit = np.flatnonzero(self.rows[own] == indices)
        found[hit[:, None], self.columns] = self.values[own[hit]]
        if self.marks is not None:
            found[:, -1] = self.marks[indices]
        return found


class WidenedCheckpoint(RandomCheckpoint):
    """Stands in for `Checkpoint`: tensors with a part of the pair's, and random ones in the layers that add nothing."""

    def __init__(self, shapes: Shapes, placed: Mapping[str, Placed], order: IntArray | None = None) -> None:
        """
        Args:
            shapes: of the wide tensors, by name.
            placed: the pair's parts of them; tensors without one are random.
            order: token ids in the order of the clusters, int64[V].
        """
        super().__init__(shapes)
        self._placed = placed
        self._order = order

    def read(self, name: str) -> Float32Array:
        shape = self._shapes[name]
        if (own := self._placed.get(name)) is None:
            return np.zeros(shape, np.float32) if _is_added(name) else super().read(name)
        if len(shape) == 1:
            return own.picked_rows(np.zeros(1, np.int64), shape[0]).reshape(-1)
        return self.rows(name, 0, shape[0])

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        if (own := self._placed.get(name)) is None:
            return super().rows(name, start, stop)
        return own.picked_rows(np.arange(start, stop), self._shapes[name][-1])

    def picked_rows(self, name: str, indices: IntArray) -> Float32Array:
        return self._placed[name].picked_rows(indices, self._shapes[name][-1])

    def integers(self, name: str) -> IntArray:
        assert self._order is not None
        return self._order


def _is_added(name: str) -> bool:
    """Whether a tensor is the norm of what a sub-layer adds to the hidden state."""
    return name.rsplit(".", 2)[-2].startswith("post_")


def _power(number: float) -> float:
    """The nearest power of two."""
    return 2.0 ** round(math.log2(number))


class Widening:
    """The pair's decoder in a wide one; target and drafter have one each.

    Attributes:
        c: ratio of the wide hidden state to the pair's.
        hidden: int64[H], places in the wide hidden state.
    """

    def __init__(self, pair: Decoder, wide: Decoder) -> None:
        self.c = math.sqrt(wide.hidden_size / pair.hidden_size)
        self.hidden = np.arange(pair.hidden_size)
        self._pair, self._wide = pair, wide
        self._spare = wide.hidden_size - 1

    def norm(self, weight: Float32Array, spare: float = 0.0, factor: float | None = None) -> Placed:
        """A norm over the hidden state.

        Args:
            spare: the spare number before the norm, which will be about `LEVEL` after it; 0 keeps it zero.
            factor: of the weights; by default 1 / c, which gives the pair's values.
        """
        values = weight * np.float32(1 / self.c if factor is None else factor)
        if not spare:
            return Placed(values[None], np.zeros(1, np.int64), self.hidden)
        values = np.append(values, np.float32(LEVEL * RMS / spare))
        return Placed(values[None], np.zeros(1, np.int64), np.append(self.hidden, self._spare))

    def layer(self, tensors: Mapping[str, Float32Array], own: Layer, wide_layer: Layer) -> dict[str, Placed]:
        """A layer's tensors, by their names without the layer's prefix; those of per-layer embeddings are left out."""
        pair, wide = own.mixer, wide_layer.mixer
        assert isinstance(pair, Attention)
        assert isinstance(wide, Attention)
        step = wide.head_dim // pair.head_dim
        if pair.kind != wide.kind or step * pair.head_dim != wide.head_dim or pair.kv_heads != wide.kv_heads:
            raise CheckpointError("a layer of the pair does not fit the layer in its place")
        e, after = np.float32(math.sqrt(step)), np.float32(_power(self.c))
        dims, inner = step * np.arange(pair.head_dim), np.arange(own.feed_forward.width)
        queries, keys = (_blocks(count, wide.head_dim, dims) for count in (pair.heads, pair.kv_heads))
        unturned = np.arange(pair.head_dim)
        values, mixed = (_blocks(count, wide.head_dim, unturned) for count in (pair.kv_heads, pair.heads))
        places = {
            "self_attn.q_proj.weight": (queries, self.hidden, e),
            "self_attn.k_proj.weight": (keys, self.hidden, e),
            "self_attn.v_proj.weight": (values, self.hidden, e),
            "self_attn.o_proj.weight": (self.hidden, mixed, after / e),
            "mlp.gate_proj.weight": (inner, self.hidden, np.float32(1)),
            "mlp.up_proj.weight": (inner, self.hidden, np.float32(1)),
            "mlp.down_proj.weight": (self.hidden, inner, after),
        }
        one = np.zeros(1, np.int64)
        found = {
            name: Placed(tensors[name] * factor, rows, columns)
            for name, (rows, columns, factor) in places.items()
            if name in tensors
        }
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            if name in tensors:
                found[name] = Placed(tensors[name][None] / e, one, dims)
        for name in ("input_layernorm.weight", "pre_feedforward_layernorm.weight"):
            found[name] = self.norm(tensors[name])
        for name in ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"):
            found[name] = self.norm(tensors[name], factor=1.0)
        found["layer_scalar"] = Placed(tensors["layer_scalar"][None], one, one)
        return found


def _blocks(count: int, size: int, within: IntArray) -> IntArray:
    """The places `within` of the first `count` blocks of this size: int64[count * len(within)]."""
    return (size * np.arange(count)[:, None] + within).reshape(-1)


def layer_places(pair: Target, wide: Target) -> list[int]:
    """The index in the wide model of each of the pair's layers."""
    own, shared = pair.first_shared_layer, len(pair.layers) - pair.first_shared_layer
    if own > wide.first_shared_layer or shared > len(wide.layers) - wide.first_shared_layer:
        raise CheckpointError("the wide model has too few layers")
    end = len(wide.layers)
    return [*range(wide.first_shared_layer - own, wide.first_shared_layer), *range(end - shared, end)]


@dataclass(frozen=True)
class Vocabulary:
    """The pair's tokens in a larger vocabulary: the same ids, followed by tokens that are not used."""

    used: int
    size: int

    def marks(self, used: float) -> Float32Array:
        """float32[size]: the spare column of a table of tokens."""
        return np.where(np.arange(self.size) < self.used, np.float32(used), np.float32(UNUSED)).astype(np.float32)

    def order(self, pair: IntArray, clusters: ShortlistEntry, wide: ShortlistEntry) -> IntArray:
        """Token ids by cluster: the pair's clusters, each filled up, then clusters without a used token."""
        free = np.arange(self.used, self.size)
        missing = self.size // wide.clusters - self.used // clusters.clusters
        filled = free[: clusters.clusters * missing].reshape(clusters.clusters, missing)
        ordered = np.concatenate([pair.reshape(clusters.clusters, -1), filled], axis=1)
        return np.concatenate([ordered.reshape(-1), free[filled.size :]])


def centroids(values: Float32Array, hidden: IntArray, clusters: ShortlistEntry, wide: ShortlistEntry) -> Placed:
    """The pair's centroids; some clusters without a used token are always scored, the others never."""
    marks = np.full(wide.clusters, UNUSED, np.float32)
    marks[: clusters.clusters] = 0
    marks[clusters.clusters :][: wide.top - clusters.top] = -UNUSED
    return Placed(values, np.arange(clusters.clusters), hidden, marks)


def widen_target(pair: TargetCheckpoint, wide: Target) -> dict[str, Placed]:
    """The pair's tensors in the wide target, by their names without a prefix."""
    read = {name: pair.tensors.read(name) for name in target_shapes(pair.config)}
    config, way = pair.config, Widening(pair.config, wide)
    if config.per_layer is None or wide.per_layer is None:
        raise CheckpointError("only targets with per-layer embeddings can be widened")
    narrow_slice, wide_slice = config.per_layer.width, wide.per_layer.width
    d, c = math.sqrt(wide_slice / narrow_slice), way.c
    places, slots = layer_places(config, wide), np.arange(narrow_slice)
    slices = np.concatenate([wide_slice * place + slots for place in places])
    tokens = np.arange(config.vocab_size)
    marks = Vocabulary(config.vocab_size, wide.vocab_size).marks(USED)
    found = {
        EMBEDDING: Placed(read[EMBEDDING], tokens, way.hidden, marks),
        "norm.weight": way.norm(read["norm.weight"], spare_after(pair, wide, len(places))),
        PLE_TABLE: Placed(read[PLE_TABLE], tokens, slices),
        "per_layer_model_projection.weight": Placed(
            read["per_layer_model_projection.weight"] * np.float32(_power(d)), slices, way.hidden
        ),
        "per_layer_projection_norm.weight": Placed(
            read["per_layer_projection_norm.weight"][None], np.zeros(1, np.int64), slots
        ),
    }
    for index, place in enumerate(places):
        own = _below(read, f"layers.{index}.")
        placed = way.layer(own, config.layers[index], wide.layers[place])
        placed["per_layer_input_gate.weight"] = Placed(
            own["per_layer_input_gate.weight"] / np.float32(c), slots, way.hidden
        )
        placed["per_layer_projection.weight"] = Placed(
            own["per_layer_projection.weight"] * np.float32(_power(c / d)), way.hidden, slots
        )
        name = "post_per_layer_input_norm.weight"
        placed[name] = way.norm(own[name], factor=1.0)
        found |= {f"layers.{place}.{name}": each for name, each in placed.items()}
    return found


def spare_after(pair: TargetCheckpoint, wide: Target, layers: int) -> float:
    """The spare number of the hidden state after the first `layers` of the pair's layers."""
    scalars = (pair.tensors.read(f"layers.{index}.layer_scalar").item() for index in range(layers))
    return USED * wide.embedding_factor * math.prod(scalars)


SEED = 2.0**-6
"""The spare number that `pre_projection` gives the drafter's hidden state."""


def widen_drafter(pair: DrafterCheckpoint, wide: DrafterEntry, source: Target, target: Target) -> dict[str, Placed]:
    """The tensors of the pair's drafter in the wide drafter.

    Args:
        wide: the wide drafter's configuration.
        source, target: those of the pair's target and of the wide target.
    """
    config, read = pair.config, pair.checkpoint.read
    clusters, wide_clusters = _shortlists(config.shortlist, wide.shortlist)
    way, backbone = Widening(config, wide), Widening(source, target)
    tokens, width, last = np.arange(source.vocab_size), source.hidden_size, wide.hidden_size - 1
    # the embedding is c times the pair's, the hidden state after the target's last norm is the same
    joined = np.zeros((config.hidden_size + 1, 2 * width + 1), np.float32)
    before = read("pre_projection.weight") * np.float32(way.c)
    joined[:-1, :width], joined[:-1, width + 1 :] = before[:, :width] / np.float32(backbone.c), before[:, width:]
    joined[-1, width] = SEED / (USED * target.embedding_factor)
    places = np.concatenate([backbone.hidden, [target.hidden_size - 1], target.hidden_size + backbone.hidden])
    spare = SEED * math.prod(read(f"model.layers.{index}.layer_scalar").item() for index in range(len(config.layers)))
    marks = Vocabulary(source.vocab_size, target.vocab_size).marks(0.0)
    found = {
        "pre_projection.weight": Placed(joined, np.append(way.hidden, last), places),
        "post_projection.weight": Placed(read("post_projection.weight"), backbone.hidden, way.hidden),
        "model.norm.weight": way.norm(read("model.norm.weight"), spare),
        DRAFTER_EMBEDDING: Placed(read(DRAFTER_EMBEDDING), tokens, way.hidden, marks),
        DRAFTER_CENTROIDS: centroids(read(DRAFTER_CENTROIDS), way.hidden, clusters, wide_clusters),
    }
    everything = {name: read(name) for name in pair.shapes if name.startswith("model.layers.")}
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        placed = way.layer(_below(everything, prefix), layer, wide.layers[index])
        found |= {prefix + name: each for name, each in placed.items()}
    return found


def widen_heads(
    pair: HeadsCheckpoint, source: TargetCheckpoint, target: Target, wide: ShortlistEntry
) -> HeadsCheckpoint:
    """The pair's heads for the wide target, which score a shortlist of the wide drafter's size."""
    way, read, places = Widening(source.config, target), pair.checkpoint.read, layer_places(source.config, target)
    known = Vocabulary(source.config.vocab_size, target.vocab_size)
    entries, found, order = [], dict[str, Placed](), None
    for each in pair.heads:
        offsets = _blocks(each.offsets, target.hidden_size, way.hidden)
        clusters, _ = _shortlists(each.shortlist, wide)
        candidates, layer = wide.candidates(target.vocab_size), each.layer
        width = each.width * target.hidden_size // source.config.hidden_size
        if each.kind == "medusa":
            found["medusa.blocks.weight"] = Placed(read("medusa.blocks.weight"), offsets, way.hidden)
        elif each.kind == "blockwise":
            inner = np.arange(each.width)
            found["blockwise.inner.weight"] = Placed(read("blockwise.inner.weight"), inner, way.hidden)
            found["blockwise.outer.weight"] = Placed(read("blockwise.outer.weight"), offsets, inner)
            found["blockwise.norm.weight"] = way.norm(read("blockwise.norm.weight"), LEVEL)
        else:
            assert layer is not None
            spare, layer = spare_after(source, target, layer + 1), places[layer]
            found["exit.norm.weight"] = way.norm(read("exit.norm.weight"), spare)
            found["exit.block.weight"] = Placed(read("exit.block.weight"), way.hidden, way.hidden)
        found[CENTROIDS] = centroids(read(CENTROIDS), way.hidden, clusters, wide)
        order = known.order(pair.checkpoint.integers(ORDERING), clusters, wide)
        entries.append(replace(each, candidates=candidates, layer=layer, width=width, shortlist=wide))
    shapes = all_shapes(tuple(entries), target)
    checkpoint = cast(Checkpoint, WidenedCheckpoint(shapes, found, order))
    return HeadsCheckpoint(pair.checkout, checkpoint, tuple(entries), shapes)


def _shortlists(pair: ShortlistEntry | None, wide: ShortlistEntry | None) -> tuple[ShortlistEntry, ShortlistEntry]:
    if pair is None or wide is None:
        raise CheckpointError("only heads that score a shortlist can be widened")
    return pair, wide


def _below(tensors: Mapping[str, Float32Array], prefix: str) -> dict[str, Float32Array]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class WidePair:
    """The wide checkpoints, as the exporter sees them."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    heads: HeadsCheckpoint


@contextmanager
def widened(size: str) -> Iterator[WidePair]:
    """Open the pair and widen it to one of `SIZES`."""
    fields, drafter_fields = SIZES[size]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(open_target(locate(str(PAIR / "target")), lambda line: None))
        assistant = stack.enter_context(open_drafter(locate(str(PAIR / "drafter")), source))
        trained = stack.enter_context(open_heads(locate(str(PAIR / "heads")), source))
        own = read_json(PAIR / "target" / "config.json")
        kept = {name: own[name] for name in (*OF_THE_PAIR, *CONTROL) if name in own}
        fields = {**fields, **kept}
        target = _wide_target(source, _checkout(directory / f"widened-{size}", fields, PAIR / "target"), fields)
        config = target.config
        text = {name: own[name] for name in OF_THE_PAIR[:-1] if name in own}
        drafter_fields = {**drafter_fields, "text_config": {**drafter_fields["text_config"], **text}}
        drafter_checkout = _checkout(directory / f"widened-{size}-assistant", drafter_fields, PAIR / "drafter")
        entry = read_drafter(drafter_fields, drafter_checkout.id, config)
        shapes = drafter_shapes(entry, config)
        clusters, wide = _shortlists(assistant.config.shortlist, entry.shortlist)
        order = Vocabulary(source.config.vocab_size, config.vocab_size).order(
            assistant.checkpoint.integers(DRAFTER_ORDERING), clusters, wide
        )
        drafter = WidenedCheckpoint(shapes, widen_drafter(assistant, entry, source.config, config), order)
        yield WidePair(
            target,
            DrafterCheckpoint(drafter_checkout, NamedTensors(cast(Checkpoint, drafter)), entry, shapes),
            widen_heads(trained, source, config, wide),
        )


@contextmanager
def widened_draft_model(vocab_size: int) -> Iterator[TargetCheckpoint]:
    """Open the pair's draft model, with a vocabulary of this size."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(open_target(locate(str(PAIR / "draft-model")), lambda line: None))
        fields = read_json(PAIR / "draft-model" / "config.json") | {
            "hidden_size": source.config.hidden_size + BLOCK,
            "vocab_size": vocab_size,
            "vocab_size_per_layer_input": vocab_size,
        }
        checkout = _checkout(directory / "widened-draft-model", fields, PAIR / "draft-model")
        yield _wide_target(source, checkout, fields)


def _wide_target(source: TargetCheckpoint, checkout: Checkout, fields: Mapping[str, Any]) -> TargetCheckpoint:
    """The target of a wide configuration that computes what `source` does."""
    config = read_target(fields, checkout.id).target
    placed = {PREFIX + name: each for name, each in widen_target(source, config).items()}
    return described_target(checkout, fields, lambda shapes: cast(Checkpoint, WidenedCheckpoint(shapes, placed)))


def _checkout(directory: Path, fields: Mapping[str, Any], pair: Path) -> Checkout:
    """A directory with a `config.json` and the text files of the pair's model."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields), "utf-8")
    for name in (TOKENIZER, GENERATION_CONFIG, CHAT_TEMPLATE):
        if (pair / name).is_file():
            shutil.copyfile(pair / name, directory / name)
    return Checkout(directory, directory.name)


def write_bundle(out: Path, size: str = "E2B", head_bits: int = 8, quantize: str = "int4") -> None:
    """Write the bundle with drafter and heads; an older one there is replaced."""
    options = ExportOptions(quantize=quantize, head_bits=head_bits)
    with widened(size) as wide, BundleWriter(out) as bundle:
        graphs = GraphFiles(bundle.directory, options, lambda _weights: None)
        table = graphs.write_target(wide.target)
        graphs.write_drafter(wide.drafter, wide.target.config, table)
        graphs.write_heads(wide.heads, wide.target.config, table)
        copy_text_files(wide.target.checkout.directory, bundle.directory, print)
        bundle.commit(make_manifest(wide.target, wide.drafter, options, wide.heads), graphs.tensors)


def write_draft_model(out: Path, size: str = "E2B", head_bits: int = 8, quantize: str = "int4") -> None:
    """Write the bundle of the pair's draft model for a target of `SIZES`; an older one there is replaced."""
    options = ExportOptions(quantize=quantize, head_bits=head_bits)
    with widened_draft_model(SIZES[size][0]["vocab_size"]) as wide, BundleWriter(out) as bundle:
        graphs = GraphFiles(bundle.directory, options, lambda _weights: None)
        graphs.write_target(wide)
        copy_text_files(wide.checkout.directory, bundle.directory, print)
        bundle.commit(make_manifest(wide, None, options), graphs.tensors)


def compare(wide: Path, pair: Path) -> str:
    """Markdown: greedy replies of the two bundles, with the number of tokens before the first that differs."""
    replies: list[list[tuple[int, ...]]] = []
    with load(pair) as first, load(wide) as second:
        kinds = load_scenarios(None, as_chat=CHAT_TEMPLATE in first.manifest.files)
        prompts = [(kind.name, prompt) for kind in kinds for prompt in kind.prompts]
        for model in (first, second):
            generated = (model.generate(prompt, max_new_tokens=TOKENS, temperature=0.0) for _, prompt in prompts)
            replies.append([reply.token_ids for reply in generated])
    lines, same = [], 0
    for (name, _), own, other in zip(prompts, *replies, strict=True):
        differ = (at for at, (one, two) in enumerate(zip(own, other, strict=False)) if one != two)
        first_difference = next(differ, min(len(own), len(other)))
        same += own == other
        lines.append([name, str(len(own)), "all" if own == other else str(first_difference)])
    rows = table(["prompt", "tokens", "equal"], lines, left={"prompt"})
    return f"{rows}\n\n{same} of {len(lines)} greedy replies are the pair's, token for token"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="E2B")
    parser.add_argument("--head-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--draft-model", type=Path, metavar="DIRECTORY", help="write the draft model's bundle here")
    parser.add_argument("--beside", type=Path, metavar="BUNDLE", help="compare the bundle with this one of the pair")
    arguments = parser.parse_args()
    if arguments.beside is not None:
        print(compare(arguments.directory, arguments.beside))
    else:
        write_bundle(arguments.directory, arguments.size, arguments.head_bits)
        if arguments.draft_model is not None:
            write_draft_model(arguments.draft_model, arguments.size, arguments.head_bits)


if __name__ == "__main__":
    run_command(main)
