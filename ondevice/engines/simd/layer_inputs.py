"""Runs a target layer by layer over a text, and shows the inputs of its matrices: for calibrated rounding.

All chunks of the text pass a layer before the next one is run. So one layer's weights are packed at a time, in memory,
and between layers there are the hidden states of all tokens, and the keys and values that later layers share. `save`
writes them to a directory, from which another process can go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Int64Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.graph_io import AttentionKind
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD
from ondevice.engines.kv_cache import KVCache, make_caches
from ondevice.engines.layer_path import WHOLE
from ondevice.engines.protocol import TokenTree
from ondevice.engines.simd.buffers import AttentionScratch, Buffers
from ondevice.engines.simd.caches import BITS, UNITS, VIEWS, cache_unit
from ondevice.engines.simd.forward_state import ForwardState, SequenceRecord
from ondevice.engines.simd.kernels.contract import slots
from ondevice.engines.simd.kernels.contract.entries import read_groups
from ondevice.engines.simd.kernels.contract.matrices import BLOCK, FORM_SHIFT, GROUPS
from ondevice.engines.simd.kernels.contract.steps import Gated, KernelStep, Project
from ondevice.engines.simd.model import DecoderLayer, read_target
from ondevice.engines.simd.pack_file import pack_in_memory
from ondevice.engines.simd.pack_layout import PackLayout
from ondevice.engines.simd.plan.builder import PlanBuilder
from ondevice.engines.simd.plan.layer import GATE, HEADS, pack_layer
from ondevice.engines.simd.plan.target import TargetPlanner
from ondevice.engines.simd.program import scratch_bytes
from ondevice.engines.simd.tensor_files import TensorFiles
from ondevice.engines.simd.threads import NEIGHBOURS, ThreadPool
from ondevice.engines.states import RecurrentStates

READ_TOGETHER = (
    (*HEADS, GATE),
    ("self_attn.o_proj",),
    ("delta.qkv", "delta.z"),
    ("delta.out",),
    ("conv.in_proj",),
    ("conv.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("per_layer_input_gate",),
    ("per_layer_projection",),
)
"""Names of a layer's matrices, those that multiply the same input together. Experts are left out: each has inputs of
its own, and 128 times their moments would fill the memory."""

Show = Callable[[Sequence[str], Float32Array], None]
"""Is given the names of a layer's matrices and their input, float32[T, width], as the kernels read it."""


@dataclass
class _Chunk:
    """A part of the text, which is a sequence of its own.

    first : the index of its first token among those of all chunks
    hidden : the hidden states after the newest layer, float32[T, H]
    shared : layer -> its keys and values, which later layers read
    """

    tokens: Int64Array
    first: int
    hidden: Float32Array
    shared: dict[int, tuple[NDArray[np.generic], NDArray[np.generic]]] = field(default_factory=dict)


class LayerInputs:
    """Runs the layers of a bundle in their order, and then its final norm.

    Attributes:
        layers: number of layers.
        head: the head's name in the tensor table, without `.weight`.
    """

    def __init__(
        self, bundle: Bundle, chunks: Sequence[Int64Array], threads: int, directory: Path, done: int = 0
    ) -> None:
        """
        Args:
            bundle: a bundle with the model's weights in a format with groups, such as int8.
            chunks: token ids of at most MAX_ROWS tokens each.
            threads: number of threads.
            directory: an existing directory for per-layer embeddings and for `save`.
            done: number of layers after which `save` was called there, with the same bundle and chunks.

        Raises:
            UnsupportedGraphError: there is no kernel for the format or size of the weights.
        """
        self._target = target = bundle.manifest.target
        self.layers = len(target.layers)
        self.head = (EMBEDDING if target.tied else HEAD).removesuffix(".weight")
        self._files = TensorFiles(bundle)
        self._model = read_target(self._files, bundle.manifest)
        firsts = [0, *accumulate(map(len, chunks))]
        self._chunks = [
            _Chunk(chunk, first, np.zeros((len(chunk), target.hidden_size), np.float32))
            for chunk, first in zip(chunks, firsts, strict=False)
        ]
        self._directory = directory
        self._per_layer = (directory / "embeddings").open("r+b" if done else "w+b")
        """The per-layer embeddings of each chunk, float32[layers, T, size]: 1.2 GB for E2B and 34,000 tokens."""
        self._most_rows, self._threads = max(map(len, chunks)), threads
        self._sources = {target.kv_source(index) for index in range(target.first_shared_layer, self.layers)}
        self._places = {layer: place for place, layer in enumerate(target.kv_layers())}
        head_dim = max(own.head_dim for own in target.attention)
        self._scratch = AttentionScratch(head_dim, max(own.heads for own in target.attention), threads)
        self._state = ForwardState(self._most_rows, target.frequencies(), BITS["fp16"])
        self._state.set_window(target.window)
        self._pool = ThreadPool(threads, scratch_bytes(target))
        if done:
            self._restore(done)

    @property
    def hidden(self) -> list[Float32Array]:
        """The hidden states after the newest layer, of every chunk."""
        return [chunk.hidden for chunk in self._chunks]

    def run(self, index: int, show: Show, after_chunk: Callable[[], None] = lambda: None) -> None:
        """Run layer `index` after the one before; after the last layer, the final norm.

        Args:
            show: called with every input of every chunk.
            after_chunk: called when a chunk has passed the layer.
        """
        if index == self.layers:
            for hidden in self.hidden:
                squares = np.square(hidden).mean(axis=1, keepdims=True)
                show([self.head], hidden / np.sqrt(squares + self._target.norm_eps) * self._model.norm)
            return
        layer, layout = self._model.layers[index], PackLayout()
        pack_layer(layout, layer)
        if index == 0 and self._model.per_layer is not None:
            layout.add(self._model.per_layer.projection)
        pack = pack_in_memory(layout, self._threads)
        builder = _NotingBuilder(layout.places, pack, Buffers(), self._most_rows, self._target.norm_eps)
        planner = TargetPlanner(self._model, builder, self._places, self._threads)
        steps = planner.plan(WHOLE, index, index + 1).exact
        readers = builder.inputs_of(layer)
        own, record = layer.source, SequenceRecord(self._places)
        caches = make_caches(self._target, partial(cache_unit, "fp16"), self._most_rows, VIEWS, UNITS)
        states = RecurrentStates(self._target.states, self._most_rows)
        record.follow_states(states)
        for chunk in self._chunks:
            states.clear()
            self._enter(chunk, index, planner, caches, record)
            start, rows = 0, len(chunk.tokens)
            for number, (stop, names, step) in enumerate(readers):
                self._run(steps[start:stop], number, rows)
                show(names, _read(step, rows))
                start = stop
            self._run(steps[start:], len(readers), rows)
            chunk.hidden[:] = planner.streams[0][:rows]
            if index == 0:
                self._write_embeddings(chunk, planner)
            if index in self._sources:
                keys, values = caches[self._target.layers[own].mixer.kind].parts(own)
                units = -(-rows // UNITS.positions)
                chunk.shared[own] = keys[:units].copy(), values[:units].copy()
            after_chunk()
        self._files.release()

    def save(self, done: int) -> None:
        """Write the states after the newest layer to the directory, for a process that goes on after it.

        Args:
            done: number of layers that were run. The files of another number stay until `save` was called again, so
                that an interrupt does no harm.
        """
        self._per_layer.flush()
        os.fsync(self._per_layer.fileno())
        if done - 1 in self._sources:
            shared = zip(*(chunk.shared[done - 1] for chunk in self._chunks), strict=True)
            for name, parts in zip(("keys", "values"), shared, strict=True):
                _write(self._directory / f"{name}-{done - 1}.npy", parts)
        for path in self._directory.glob("hidden-*.npy"):
            if path != self._states(done - 1):
                path.unlink()
        _write(self._states(done), self.hidden)

    def _restore(self, done: int) -> None:
        for chunk, hidden in zip(self._chunks, np.load(self._states(done)), strict=True):
            chunk.hidden[:] = hidden
        for layer in self._sources:
            if layer < done:
                parts = [np.load(self._directory / f"{name}-{layer}.npy") for name in ("keys", "values")]
                for chunk, keys, values in zip(self._chunks, *parts, strict=True):
                    chunk.shared[layer] = keys, values

    def _states(self, done: int) -> Path:
        return self._directory / f"hidden-{done}.npy"

    def close(self) -> None:
        """End the threads, and unmap the bundle's files, which Windows does not delete before."""
        self._pool.close()
        self._per_layer.close()
        del self._model, self._files

    def _enter(
        self,
        chunk: _Chunk,
        index: int,
        planner: TargetPlanner,
        caches: dict[AttentionKind, KVCache],
        record: SequenceRecord,
    ) -> None:
        """Write a chunk's rows, the residual stream before layer `index`, and the keys and values that it shares."""
        rows, source = len(chunk.tokens), self._model.layers[index].source
        planner.streams[0][:rows] = chunk.hidden
        if index > 0:
            self._read_embeddings(chunk, index, planner)
        for cache in caches.values():
            cache.reserve(0, rows)
        record.follow(caches)
        if source != index:
            parts = caches[self._target.layers[source].mixer.kind].parts(source)
            for part, kept in zip(parts, chunk.shared[source], strict=True):
                part[: len(kept)] = kept
        positions = np.arange(rows)
        record.set_rows(TokenTree.chain(chunk.tokens.tolist()), 0)
        for row_set in (slots.ALL, slots.WANTED):
            record.set_place(row_set, 0, rows)
        self._state.set_rows(chunk.tokens, positions, positions + 1, positions)
        self._state.set_sequences([record], self._scratch)

    def _write_embeddings(self, chunk: _Chunk, planner: TargetPlanner) -> None:
        for rows in planner.streams[1:]:
            by_layer = rows[: len(chunk.tokens)].reshape(len(chunk.tokens), self.layers, -1).swapaxes(0, 1)
            self._per_layer.seek(chunk.first * rows.strides[0])
            self._per_layer.write(by_layer.tobytes())

    def _read_embeddings(self, chunk: _Chunk, index: int, planner: TargetPlanner) -> None:
        count = len(chunk.tokens)
        for rows in planner.streams[1:]:
            own = rows[:count].reshape(count, self.layers, -1)[:, index]
            self._per_layer.seek(chunk.first * rows.strides[0] + index * own.nbytes)
            own[:] = np.frombuffer(self._per_layer.read(own.nbytes), np.float32).reshape(own.shape)

    def _run(self, steps: NDArray[np.int64], number: int, rows: int) -> None:
        """Run part `number` of a layer's steps."""
        if len(steps):
            self._pool.run(steps, self._state.slots, NEIGHBOURS * number, rows)


class _NotingBuilder(PlanBuilder):
    """Notes the steps that multiply with a packed matrix, by their numbers in the plan."""

    def __init__(self, *operands: Any) -> None:
        super().__init__(*operands)
        self._products: list[tuple[int, Project | Gated]] = []

    def add(self, step: KernelStep) -> None:
        if isinstance(step, Project | Gated):
            self._products.append((len(self._steps), step))
        super().add(step)

    def inputs_of(self, layer: DecoderLayer) -> list[tuple[int, list[str], Project | Gated]]:
        """The first step that reads each input of a layer: its number, the names of the matrices, and the step."""
        matrices, found = layer.matrices, []
        for names in READ_TOGETHER:
            if there := [name for name in names if name in matrices]:
                packed = {self._packed(own).weights for name in there if (own := matrices[name]) in self.places}
                number, step = next(each for each in self._products if each[1].matrix.weights in packed)
                found.append((number, there, step))
        return sorted(found, key=lambda each: each[0])


def _write(path: Path, arrays: Sequence[NDArray[Any]]) -> None:
    """Write arrays of one shape as one, and wait until the disk has it."""
    with path.open("wb") as file:
        np.save(file, np.stack(arrays))
        file.flush()
        os.fsync(file.fileno())


def _read(step: Project | Gated, rows: int) -> Float32Array:
    """The input of a product, float32[rows, width]."""
    assert step.form >> FORM_SHIFT == GROUPS
    blocks = step.matrix.blocks
    out = np.empty((rows, BLOCK * blocks), np.float32)
    read_groups(step.activations, blocks, out)
    return out
