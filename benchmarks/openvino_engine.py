"""OpenVINO on a bundle's own `target.onnx`: a peer to measure against, not an engine to generate with.

Its ONNX reader knows every operator of the graph but TensorScatter, which is put together here. Options are its own
defaults, bfloat16 where the CPU has it: of those that were tried, they are the fastest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.frontend.onnx import ConversionExtension

from ondevice import contract
from ondevice.bundle import Bundle
from ondevice.contract import AttentionKind
from ondevice.engines.committed import CommittedRows
from ondevice.engines.kv_cache import KVCache
from ondevice.engines.protocol import Outputs, TokenTree, attention_mask

VERSION = ov.__version__.split("-")[0]
MOST_ROWS = 512
"""Of one forward. In chunks of 256, which `ort` has, a prefill takes as long."""

KINDS: tuple[AttentionKind, ...] = ("full", "sliding")


class OpenVinoEngine(CommittedRows):
    """`Engine` without a drafter. The precision is OpenVINO's own choice, told by `precision`."""

    name = "openvino"

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self._target = bundle.manifest.target
        core = ov.Core()
        core.add_extension(ConversionExtension("TensorScatter", _tensor_scatter))
        model = core.read_model(os.fspath(bundle.graph(self._target.graph)))
        _keep_packed(model)
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(model, "CPU", options)
        self.precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self._request = compiled.create_infer_request()
        self._caches = {kind: self._cache(kind) for kind in KINDS}
        super().__init__(self._caches)

    def max_rows(self) -> int:
        return MOST_ROWS

    def forward(self, rows: TokenTree, wanted: Sequence[int]) -> Outputs:
        """See `Engine.forward`. The arrays are OpenVINO's own and hold until the next forward."""
        inputs: dict[str, Any] = {
            contract.TOKEN_IDS: rows.tokens,
            contract.POSITIONS: self._length + rows.depths(),
            contract.WANTED: np.asarray(wanted, np.int64),
        }
        count = len(rows.tokens)
        written = []
        for kind, cache in self._caches.items():
            start, stop = cache.reserve(self._length, count)
            window = self._target.sliding_window if kind == "sliding" else None
            first = self._length - start
            inputs[contract.mask(kind)] = attention_mask(rows, self._length, (start, stop), window)
            inputs[contract.write_index(kind)] = np.array([first], np.int64)
            for layer in cache.layers:
                for part, view in zip(("key", "value"), cache.view(layer, start, stop), strict=True):
                    inputs[contract.past(layer, part)] = view[None]
                    written.append((contract.present(layer, part), view, slice(first, first + count)))
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        for name, view, new in written:
            view[new] = found[name][0, new]
        self._pending = count
        return Outputs(found[contract.LOGITS], found[contract.HIDDEN])

    def _cache(self, kind: AttentionKind) -> KVCache:
        layers = self._target.layers
        widths = {index: layers[index].kv_width for index in self._target.kv_layers() if layers[index].kind == kind}
        return KVCache(widths, MOST_ROWS, self._target.sliding_window if kind == "sliding" else None)


def _tensor_scatter(node: Any) -> Any:
    """TensorScatter (ONNX opset 24) of one sequence, axis -2 of three: rows from `index` on are replaced."""
    past, new, index = (node.get_input(number) for number in range(3))
    axis = ops.constant(np.int64(1))
    count = ops.gather(ops.shape_of(new), axis, ops.constant(np.int64(0)))
    first = ops.squeeze(index)
    where = ops.range(first, ops.add(first, count), ops.constant(np.int64(1)), output_type="i64")
    return ops.scatter_update(past, where, new, axis).outputs()


def _keep_packed(model: ov.Model) -> None:
    """Put a clamp that clamps nothing between matrices and the scalars that follow them.

    OpenVINO would multiply such a scalar into the weights and keep the product in bfloat16: E2B's head, which
    1 / softcap follows, then takes 45 ms of a forward instead of 14.
    """
    for node in model.get_ops():
        if node.get_type_name() == "MatMul":
            for user in node.output(0).get_target_inputs():
                if _scales(user.get_node()):
                    user.replace_source_output(ops.clamp(node, -1e30, 1e30).output(0))


def _scales(node: ov.Node) -> bool:
    factors = [source.get_source_output() for source in node.inputs()]
    return node.get_type_name() == "Multiply" and any(
        factor.get_node().get_type_name() == "Constant" and factor.get_partial_shape() == ov.PartialShape([])
        for factor in factors
    )
