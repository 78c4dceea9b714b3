"""A bundle's graphs made ready to run: read, packed, planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import Bundle, sha256
from ondevice.engines.simd.buffers import Buffers
from ondevice.engines.simd.drafter_graph import read_drafter
from ondevice.engines.simd.drafter_plan import DrafterPlan, drafter_plan, pack_drafter
from ondevice.engines.simd.model import DrafterModel, Layer, TargetModel
from ondevice.engines.simd.onnx_file import Bytes, Graph, read_graph
from ondevice.engines.simd.pack import PackLayout, open_pack
from ondevice.engines.simd.plan import scratch_bytes
from ondevice.engines.simd.state import Frequencies, frequencies
from ondevice.engines.simd.target_graph import read_target
from ondevice.engines.simd.target_plan import pack_target, target_plan
from ondevice.errors import BundleCorruptError

SHARED_FROM = 4 << 20
"""Bytes of a drafter's packed weights from which all threads run its steps: forty meetings cost E2B's, 14 MB, less than
they gain (0.74 ms instead of 0.83, the next step 0.25 instead of 0.37), a small one more (0.049 ms instead of 0.029).
"""


@dataclass(frozen=True)
class Program:
    target: NDArray[np.int64]
    """The target's steps."""
    target_turns: Frequencies
    logits_width: int
    """Floats in a row of logits: the vocabulary, padded to whole tiles."""
    drafter: DrafterPlan | None
    drafter_turns: Frequencies
    drafter_shared: bool
    """Whether all threads run a draft step, or the calling one alone."""
    scratch_bytes: int
    """Working memory that each thread needs."""
    buffers: Buffers
    """What the steps' addresses point into."""


def load_program(bundle: Bundle, most_rows: int, threads: int) -> Program:
    """Read a bundle's graphs and plan their forwards.

    Raises:
        UnsupportedGraphError: a graph holds something that there is no kernel for.
        BundleCorruptError: a file is not what it claims to be.
    """
    files, target = _Files(bundle), bundle.manifest.target
    layout, buffers = PackLayout(), Buffers()
    model, drafter = _read(bundle, files)
    packed = pack_target(layout, model)
    layers: list[Layer] = list(model.layers)
    target_bytes = layout.size
    packed_drafter = None if drafter is None else pack_drafter(layout, drafter)
    shared = layout.size - target_bytes >= SHARED_FROM
    pack = open_pack(layout, files.content(), files.verify, threads)
    caches = {layer: index for index, layer in enumerate(target.kv_layers())}
    steps = target_plan(model, packed, caches, pack, buffers, most_rows, threads)
    drafter_steps, drafter_turns = None, Frequencies()
    if drafter is not None and packed_drafter is not None:
        drafter_steps = drafter_plan(drafter, packed_drafter, pack, buffers)
        drafter_turns = frequencies(drafter.layers)
        layers += drafter.layers
    width = packed.head.tiles * 16
    turns = frequencies(model.layers)
    return Program(steps, turns, width, drafter_steps, drafter_turns, shared, scratch_bytes(layers), buffers)


def read_models(bundle: Bundle) -> tuple[TargetModel, DrafterModel | None]:
    """What a bundle's graphs compute; raises what `load_program` does."""
    return _read(bundle, _Files(bundle))


def _read(bundle: Bundle, files: _Files) -> tuple[TargetModel, DrafterModel | None]:
    target, manifest = bundle.manifest.target, bundle.manifest.drafter
    model = read_target(files.graph(target.graph), target)
    return model, None if manifest is None else read_drafter(files.graph(manifest.graph), target, manifest)


class _Files:
    """The graphs of a bundle and the data files beside them, each mapped once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._mapped: dict[str, Bytes] = {}
        self._read: set[str] = set()

    def graph(self, name: str) -> Graph:
        self._read.add(name)
        return read_graph(self._bundle.graph(name), self._data)

    def content(self) -> str:
        """What identifies all that was read: the hashes that the manifest lists."""
        entries = self._bundle.manifest.files
        return " ".join(entries[name].sha256 for name in sorted(self._read | set(self._mapped)))

    def verify(self) -> None:
        """Compare what was read with those hashes, so that no bundle leaves a pack under another's name."""
        for name in self._read | set(self._mapped):
            path = self._bundle.graph(name)
            if sha256(path) != self._bundle.manifest.files[name].sha256:
                raise BundleCorruptError(f"{path} was altered (its sha256 differs): export the bundle again")

    def _data(self, name: str) -> Bytes:
        if name not in self._mapped:
            path = self._bundle.file(name)
            if path is None:
                raise BundleCorruptError(f"a graph reads {name!r}, which the bundle does not list: export it again")
            self._mapped[name] = np.memmap(path, np.uint8, "r")
        return self._mapped[name]
