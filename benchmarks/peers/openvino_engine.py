"""OpenVINO on a bundle's own `target.onnx`, to compare speeds with; not an engine to generate with.

Its ONNX reader supports every operator of the graph except TensorScatter, which is composed here. Options are its
defaults, with bfloat16 if the CPU supports it; they were the fastest of those tried.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.frontend.onnx import ConversionExtension

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.model_config import Target
from ondevice.engines.kv_cache import Views, attention_mask, make_caches
from ondevice.engines.protocol import DraftStep, Outputs, Proposals, Rows, TokenTree
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.session_file import SessionOrigin
from ondevice.errors import UsageError

VERSION = ov.__version__.split("-")[0]
MAX_ROWS = 512
"""Rows of one forward. A prefill takes as long in chunks of 256, as `ort` runs it."""

PARTS: tuple[Literal["key", "value"], ...] = ("key", "value")
VIEWS = Views(align=256, step=64, least=128)
"""The same as those of `ort`."""


class OpenVinoEngine:
    """The part of `Engine` that is timed, without a drafter. The precision is OpenVINO's own choice: `precision`."""

    name = "openvino"

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self._target = bundle.manifest.target
        self._origin = SessionOrigin(bundle.content, self.name, "fp32")
        core = ov.Core()
        core.add_extension(ConversionExtension("TensorScatter", _tensor_scatter))
        model = core.read_model(os.fspath(bundle.graph(self._target.graph)))
        _keep_packed(model)
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(model, "CPU", options)
        self.precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self._request = compiled.create_infer_request()

    def open_session(self) -> OpenVinoSession:
        return OpenVinoSession(self._target, self._request, self._origin)

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        """`Engine.forward` for one session; the arrays belong to OpenVINO and are valid until the next forward."""
        [rows] = batch
        assert isinstance(rows.session, OpenVinoSession)
        return [Outputs(*rows.session.run(rows.tree, rows.wanted), len(rows.tree))]


class OpenVinoSession(CachedSequence):
    """See `Session`."""

    def __init__(self, target: Target, request: ov.InferRequest, origin: SessionOrigin) -> None:
        super().__init__(
            make_caches(target, lambda own: np.dtype((np.float32, (own.kv_width,))), MAX_ROWS, VIEWS),
            origin,
        )
        self._target = target
        self._request = request

    def max_rows(self, block: int = 1) -> int:
        return MAX_ROWS

    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep:
        raise UsageError("drafts are not measured here")

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
        raise UsageError("OpenVINO is measured without heads")

    def run(self, tree: TokenTree, wanted: Sequence[int]) -> tuple[Float32Array, Float32Array]:
        """Logits and hidden states of the wanted rows; the KV of all of them is left pending."""
        count, length = len(tree), self.length
        inputs: dict[str, Any] = {
            graph_io.TOKEN_IDS: tree.tokens,
            graph_io.POSITIONS: length + tree.depths(),
            graph_io.WANTED: np.asarray(wanted, np.int64),
        }
        written = []
        for kind, cache in self._caches.items():
            start, stop = cache.reserve(length, count)
            window = self._target.window if kind == "sliding" else None
            first = length - start
            inputs[graph_io.mask(kind)] = attention_mask(tree, length, (start, stop), window)
            inputs[graph_io.write_index(kind)] = np.array([first], np.int64)
            for layer in cache.layers:
                for part, view in zip(PARTS, cache.view(layer, start, stop), strict=True):
                    inputs[graph_io.past(layer, part)] = view[None]
                    written.append((graph_io.present(layer, part), view, slice(first, first + count)))
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        for name, view, new in written:
            view[new] = found[name][0, new]
        self._pending = tree
        return found[graph_io.LOGITS], found[graph_io.HIDDEN]

    def _sibling(self) -> OpenVinoSession:
        return OpenVinoSession(self._target, self._request, self._origin)


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
