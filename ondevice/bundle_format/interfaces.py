"""The inputs and outputs of each graph, as they follow from the configuration; `graph_io` says what they are.

The exporter declares them, and engines open no graph with others: their buffers have the sizes of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.audio import AudioEntry
from ondevice.bundle_format.decoder import Mixer
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.model_config import DrafterEntry, HeadsEntry, Target
from ondevice.bundle_format.vision import VisionEntry

Shape = tuple[int | str, ...]
"""Sizes of a tensor's dimensions; a name for a size that is known at run time only."""

OPEN = "?"
"""Stands for any such name."""

CACHE_ROWS: Mapping[AttentionKind, str] = {"full": "Sf", "sliding": "Ss"}
"""Name of the number of rows in the caches and masks of each kind of attention."""


class TensorSignature(NamedTuple):
    """Element type and shape of an input or an output."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def unnamed(self) -> TensorSignature:
        """The tensor with `OPEN` for every name of a size."""
        return TensorSignature(self.dtype, tuple(OPEN if isinstance(size, str) else size for size in self.shape))


class Interface(NamedTuple):
    """The inputs and outputs of a graph by name, in order."""

    inputs: Mapping[str, TensorSignature]
    outputs: Mapping[str, TensorSignature]


def target_interface(target: Target, *, takes_soft_rows: bool = False) -> Interface:
    """Inputs and outputs of the target's graph; soft rows only in a bundle with a tower."""
    rows, hidden = TensorSignature("int64", ("T",)), target.hidden_size
    inputs = {graph_io.TOKEN_IDS: rows, graph_io.POSITIONS: rows, graph_io.WANTED: TensorSignature("int64", ("R",))}
    inputs |= {graph_io.write_index(kind): TensorSignature("int64", (1,)) for kind in target.kinds}
    masks = {kind: TensorSignature("bool", ("T", CACHE_ROWS[kind])) for kind in target.attention_kinds}
    inputs |= {graph_io.mask(kind): mask for kind, mask in masks.items()}
    if target.convolves:
        assert target.window is not None
        inputs[graph_io.CONVOLUTION_ROWS] = TensorSignature("int64", ("T", target.window))
    if takes_soft_rows:
        inputs |= {graph_io.SOFT_ROWS: TensorSignature("float32", ("S", hidden)), graph_io.EMBEDDING_SOURCE: rows}
    outputs = {
        graph_io.LOGITS: TensorSignature("float32", ("R", target.vocab_size)),
        graph_io.HIDDEN: TensorSignature("float32", ("R", hidden)),
    }
    for index, own in target.cached.items():
        cache = _cache(own)
        inputs |= {graph_io.past(index, part): cache for part in graph_io.PARTS}
        outputs |= {graph_io.present(index, part): cache for part in graph_io.PARTS}
    if states := target.states:
        inputs[graph_io.STATE_ROWS] = TensorSignature("float32", ("T",))
    for index, shape in states.items():
        inputs[graph_io.state(index)] = outputs[graph_io.next_state(index)] = TensorSignature("float32", (1, *shape))
    return Interface(inputs, outputs)


def drafter_interface(drafter: DrafterEntry, target: Target) -> Interface:
    """Inputs and outputs of the MTP drafter's graph, which reads caches of the target; with an MTP layer, it writes the
    keys and values of its row.
    """
    one, row = TensorSignature("int64", (1,)), TensorSignature("float32", (1, target.hidden_size))
    inputs = {graph_io.TOKEN_ID: one, graph_io.HIDDEN: row, graph_io.POSITION: one}
    inputs |= {graph_io.mask(kind): TensorSignature("bool", (1, CACHE_ROWS[kind])) for kind in drafter.kinds}
    for index in drafter.kv_layers():
        inputs |= {graph_io.past(index, part): _cache(target.cached[index]) for part in graph_io.PARTS}
    outputs = {
        graph_io.CANDIDATES: TensorSignature("int64", (drafter.candidates,)),
        graph_io.LOGITS: TensorSignature("float32", (drafter.candidates,)),
        graph_io.NEXT_HIDDEN: row,
    }
    if target.mtp is not None:
        inputs[graph_io.write_index("full")] = one
        cache = _cache(target.mtp)
        outputs |= {graph_io.present(target.mtp_cache, part): cache for part in graph_io.PARTS}
    return Interface(inputs, outputs)


def _cache(own: Mixer) -> TensorSignature:
    """The keys or the values of a target layer, or one half of the cache of a convolution."""
    return TensorSignature("float32", (1, CACHE_ROWS[own.kind], own.kv_width))


def heads_interface(heads: HeadsEntry, target: Target) -> Interface:
    """Inputs and outputs of a graph of heads."""
    scored = heads.offsets, heads.candidates
    outputs = {
        graph_io.CANDIDATES: TensorSignature("int64", scored),
        graph_io.LOGITS: TensorSignature("float32", scored),
    }
    return Interface({graph_io.HIDDEN: TensorSignature("float32", (1, target.hidden_size))}, outputs)


def vision_interface(vision: VisionEntry, target: Target) -> Interface:
    """Inputs and outputs of the vision tower's graph."""
    place, patches = TensorSignature("int64", ("N",)), TensorSignature("float32", ("N", 3 * vision.patch**2))
    inputs = {graph_io.PATCHES: patches, graph_io.COLUMN: place, graph_io.ROW: place}
    return Interface(inputs, {graph_io.SOFT_ROWS: TensorSignature("float32", ("S", target.hidden_size))})


def audio_interface(audio: AudioEntry, target: Target) -> Interface:
    """Inputs and outputs of the audio tower's graph."""
    inputs = {graph_io.SOUND: TensorSignature("float32", ("F", audio.frame_width))}
    return Interface(inputs, {graph_io.SOFT_ROWS: TensorSignature("float32", ("S", target.hidden_size))})
