"""Second moments of the inputs of every matrix, from a forward of a text, one layer at a time.

The target's graph of a bundle is cut into its layers. Each is run by ONNX Runtime over all chunks of the text, with the
inputs of its matrices as further outputs, and the inputs x of a matrix become the sum of x x^T at once. So one layer's
weights and moments are in memory, and between layers the hidden states of all tokens, and the keys and values that
later layers share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.engines.kv_cache import attention_mask
from ondevice.engines.protocol import TokenTree
from ondevice.progress import Advance
from ondevice_export.calibration.rounding import Moments

CHUNK = 512
"""Tokens of a chunk, which is one forward."""


class LayerRun:
    """Runs the layers of a bundle in their order over a text.

    Attributes:
        layers: number of layers.
    """

    def __init__(self, bundle: Bundle, token_ids: Sequence[int], threads: int, advance: Advance, share: int) -> None:
        """
        Args:
            bundle: a bundle with the model's weights, in any format.
            token_ids: the text; what is left behind the last whole chunk is not used, unless it is the only one.
            threads: threads of ONNX Runtime.
            advance, share: `advance` is called with parts of `share`, as chunks are run.
        """
        self._target = target = bundle.manifest.target
        self.layers = len(target.layers)
        self._threads = threads
        size = min(CHUNK, target.context_length, len(token_ids))
        self._chunks = np.array(token_ids[: len(token_ids) // size * size], np.int64).reshape(-1, size)
        if (first := bundle.manifest.first_token_id) is not None:
            self._chunks[:, 0] = first
        self._advance, self._share = advance, share / (self.layers * len(self._chunks))
        self._place = bundle.graph(target.graph)
        self._graph = onnx.load(self._place, load_external_data=False)
        self._producer = {out: node for node in self._graph.graph.node for out in node.output}
        self._ends = self._layer_outputs()
        self._kept: list[dict[str, NDArray[np.float32]]] = [{} for _ in self._chunks]
        """For every chunk the hidden states after the newest layer, and shared keys and values, by their names."""
        self._sources = {target.kv_source(index) for index in range(target.first_shared_layer, self.layers)}

    @property
    def hidden(self) -> list[NDArray[np.float32]]:
        """The hidden states behind the newest layer, of every chunk."""
        [name] = set(self._ends) & set(self._kept[0])
        return [kept[name] for kept in self._kept]

    def run(self, index: int) -> dict[str, Moments]:
        """Run layer `index` after the one before; the moments by the names of the matrices in the checkpoint."""
        given = set(self._kept[0])
        shared = [graph_io.present(index, part) for part in graph_io.PARTS] if index in self._sources else []
        nodes = self._between([self._ends[index], *shared], given)
        inputs = self._matrix_inputs(node for node in nodes if node.name.startswith(f"layers.{index}/"))
        outputs = [self._ends[index], *shared, *dict.fromkeys(inputs.values())]
        session = self._session(nodes, outputs)
        moments: dict[str, Moments] = {}
        for chunk, kept in zip(self._chunks, self._kept, strict=True):
            feeds = {each.name: self._feed(each.name, chunk, kept) for each in session.get_inputs()}
            found = dict(zip(outputs, session.run(outputs, feeds), strict=True))
            for value in set(inputs.values()):
                rows = found[value].reshape(-1, found[value].shape[-1])
                moments.setdefault(value, Moments.zeros(rows.shape[-1])).add(rows)
            for name in [name for name in self._ends if name in kept]:
                del kept[name]
            kept.update({name: found[name] for name in outputs[: 1 + len(shared)]})
            self._advance(round(self._share))
        return {name: moments[value] for name, value in inputs.items()}

    def _layer_outputs(self) -> list[str]:
        """The names of the hidden states behind every layer: the output of the last node in the layer's scope."""
        found: dict[int, str] = {}
        for node in self._graph.graph.node:
            scope = node.name.split("/")[0]
            if scope.startswith("layers."):
                found[int(scope.removeprefix("layers."))] = node.output[0]
        return [found[index] for index in range(self.layers)]

    def _between(self, wanted: Iterable[str], given: set[str]) -> list[Any]:
        """The nodes that compute the wanted values from given ones and from the graph's inputs, in their order."""
        pending, needed = list(wanted), set[str]()
        while pending:
            name = pending.pop()
            if name in given or name not in self._producer:
                continue
            node = self._producer[name]
            if node.name not in needed:
                needed.add(node.name)
                pending += node.input
        return [node for node in self._graph.graph.node if node.name in needed]

    @staticmethod
    def _matrix_inputs(nodes: Iterable[Any]) -> dict[str, str]:
        """The name of every quantised matrix that these nodes multiply with -> the name of its input.

        Experts are left out: each has inputs of its own, and 128 times their moments would fill the memory.
        """
        found = {}
        for node in nodes:
            name = node.input[1].rsplit(".", 1)[0] if node.op_type == "MatMulNBits" else ""
            if name.endswith(".weight"):
                found[name] = node.input[0]
        return found

    def _session(self, nodes: Sequence[Any], outputs: Sequence[str]) -> ort.InferenceSession:
        """A session of some of the graph's nodes. Its file lies beside the weights, to which it refers."""
        graph = self._graph.graph
        used = {name for node in nodes for name in node.input}
        made = {name for node in nodes for name in node.output}
        constants = [each for each in graph.initializer if each.name in used]
        values = {each.name: each for each in [*graph.input, *graph.output]}
        names = used - made - {each.name for each in constants} - {""}
        for name in names | set(outputs):
            values.setdefault(name, onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        inputs, results = ([values[name] for name in each] for each in (sorted(names), outputs))
        model = onnx.ModelProto()
        model.CopyFrom(self._graph)
        model.graph.CopyFrom(onnx.helper.make_graph(nodes, "layer", inputs, results, constants))
        path = self._place.with_name("layer.onnx")
        onnx.save(model, path)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = self._threads, 1, 3
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def _feed(self, name: str, chunk: NDArray[np.int64], kept: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
        """An input of a layer's graph for a chunk, which is a sequence of its own."""
        count, target = len(chunk), self._target
        if name in kept:
            return kept[name]
        if name == graph_io.TOKEN_IDS:
            return chunk
        if name in (graph_io.POSITIONS, graph_io.WANTED):
            return np.arange(count)
        for kind in target.kinds:
            if name == graph_io.write_index(kind):
                return np.zeros(1, np.int64)
            if name == graph_io.mask(kind):
                window = target.window if kind == "sliding" else None
                return attention_mask(TokenTree.chain(chunk.tolist()), 0, (0, count), window)
        layer = int(name.split(".")[1])
        return np.zeros((1, count, target.layers[layer].attention.kv_width), np.float32)
