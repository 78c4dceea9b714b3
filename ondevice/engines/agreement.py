"""Compares the inputs and outputs of a bundle's graphs with `bundle.json`, from which engines size their memory.

Both engines do it before anything else: a manifest that was edited, or put beside the graphs of another model, is an
error that says so. What shapes cannot tell (how a row of keys is divided into heads) the `simd` engine compares with
the nodes; `ort` does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from ondevice import contract
from ondevice.contract import AttentionKind
from ondevice.errors import BundleCorruptError
from ondevice.manifest import DrafterEntry, HeadsEntry, Target

Shape = tuple[int | None, ...]
"""Sizes of a tensor's dimensions; None for one that is known at run time only."""

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
PARTS: tuple[Literal["key", "value"], ...] = ("key", "value")


class Interface(NamedTuple):
    """The inputs and outputs of a graph by name."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]


def check_target(found: Interface, target: Target) -> None:
    """Compare a target graph with the manifest.

    Raises:
        BundleCorruptError: an input or output is missing, unknown or of another shape.
    """
    caches = {layer: (1, None, target.layers[layer].kv_width) for layer in target.kv_layers()}
    inputs: dict[str, Shape] = dict.fromkeys((contract.TOKEN_IDS, contract.POSITIONS, contract.WANTED), (None,))
    inputs |= {contract.write_index(kind): (1,) for kind in KINDS}
    inputs |= {contract.mask(kind): (None, None) for kind in KINDS}
    inputs |= {contract.past(layer, part): shape for layer, shape in caches.items() for part in PARTS}
    outputs: dict[str, Shape] = {
        contract.LOGITS: (None, target.vocab_size),
        contract.HIDDEN: (None, target.hidden_size),
    }
    outputs |= {contract.present(layer, part): shape for layer, shape in caches.items() for part in PARTS}
    _compare(target.graph, found, Interface(inputs, outputs))


def check_drafter(found: Interface, drafter: DrafterEntry, target: Target) -> None:
    """Compare a drafter graph with the manifest.

    Raises:
        BundleCorruptError: an input or output is missing, unknown or of another shape.
    """
    layers: dict[AttentionKind, int] = {"full": drafter.full_layer, "sliding": drafter.sliding_layer}
    row: Shape = (1, target.hidden_size)
    inputs: dict[str, Shape] = {contract.TOKEN_ID: (1,), contract.HIDDEN: row, contract.POSITION: (1,)}
    inputs |= {contract.mask(kind): (1, None) for kind in KINDS}
    for kind, layer in layers.items():
        inputs |= {contract.shared(kind, part): (1, None, target.layers[layer].kv_width) for part in PARTS}
    scored: Shape = (drafter.candidates,)
    outputs = {contract.CANDIDATES: scored, contract.LOGITS: scored, contract.NEXT_HIDDEN: row}
    _compare(drafter.graph, found, Interface(inputs, outputs))


def check_heads(found: Interface, heads: HeadsEntry, target: Target) -> None:
    """Compare a graph of heads with the manifest.

    Raises:
        BundleCorruptError: an input or output is missing, unknown or of another shape.
    """
    scored: Shape = (heads.offsets, heads.candidates)
    outputs = {contract.CANDIDATES: scored, contract.LOGITS: scored}
    _compare(heads.graph, found, Interface({contract.HIDDEN: (1, target.hidden_size)}, outputs))


def _compare(graph: str, found: Interface, expected: Interface) -> None:
    for there, here in zip(found, expected, strict=True):
        for name in sorted(there.keys() ^ here.keys()):
            raise disagreement(f"{name} is in {'the graph' if name in there else 'bundle.json'} alone", graph)
        for name, shape in here.items():
            if not _fits(there[name], shape):
                raise disagreement(f"{name} is {_text(there[name])}, bundle.json makes it {_text(shape)}", graph)


def disagreement(what: str, graph: str | None = None) -> BundleCorruptError:
    """The error for a manifest that describes another graph than the one beside it."""
    return BundleCorruptError(f"bundle.json and {graph or 'its graphs'} disagree ({what}): export the bundle again")


def _fits(found: Shape, expected: Shape) -> bool:
    """Whether shapes agree; a size that bundle.json knows may be open in the graph (a cache that no layer reads)."""
    return len(found) == len(expected) and all(
        size is None or size == known for size, known in zip(found, expected, strict=True)
    )


def _text(shape: Shape) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
