"""The `ort` engine: a bundle's graphs on ONNX Runtime, with the KV cache bound in place.

Rows of a chain are bit-identical however many run beside them (tests/engines/test_exactness.py), for three reasons:
the graphs fold query heads into rows, so no product has a single row; `KVCache` aligns what attention sees; and
MatMulNBits quantises activations row by row. ONNX Runtime promises none of this: it holds where it was tested, x86-64.
A tree's branches are equal up to rounding: softmax adds up keys in the order of their cache rows, which siblings part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ondevice import contract
from ondevice.bundle import Bundle
from ondevice.contract import AttentionKind
from ondevice.engines.agreement import Interface, check_drafter, check_target
from ondevice.engines.committed import CommittedRows, context_within
from ondevice.engines.kv_cache import KVCache
from ondevice.engines.protocol import DraftStep, Floats, Outputs, TokenTree, attention_mask
from ondevice.errors import BundleCorruptError, UsageError

KINDS: tuple[AttentionKind, ...] = ("full", "sliding")

PREFILL_ROWS = 256
"""Rows of a prefill chunk: beyond this the reference pair's prefill gets no faster, and attention scores grow."""

SCORES = 2**25
"""Most attention scores (query heads x rows x keys) of a forward: 128 MiB of float32."""

PARTS: tuple[Any, ...] = ("key", "value")


class OrtEngine(CommittedRows):
    name = "ort"
    kv_cache = "fp32"

    def __init__(self, bundle: Bundle, threads: int, context_length: int | None = None) -> None:
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self._drafter_model = bundle.manifest.drafter
        self.has_drafter = self._drafter_model is not None
        self._session = _session(bundle.graph(self.target.graph), threads)
        check_target(_interface(self._session), self.target)
        self._bound = _Binding(self._session)
        if self._drafter_model is not None:
            # One thread: a step is too small to share, and a second pool's spinning threads would fight the target's.
            drafter = _session(bundle.graph(self._drafter_model.graph), 1)
            check_drafter(_interface(drafter), self._drafter_model, self.target)
            self._drafter = _Binding(drafter)
        self._caches = self._make_caches()
        super().__init__(self._caches)
        self._outputs = _OutputBuffers(self.target.vocab_size, self.target.hidden_size)

    def max_rows(self) -> int:
        by_memory = max(1, SCORES // (self.target.query_heads * (self._length + PREFILL_ROWS)))
        return min(PREFILL_ROWS, by_memory, self.context_length - self._length)

    def forward(self, rows: TokenTree, wanted: Sequence[int]) -> Outputs:
        """See `Engine.forward`. The arrays are the engine's own and hold until the next forward."""
        count = len(rows.tokens)
        if not 0 < count <= self.max_rows():
            raise ValueError(f"{count} rows do not fit: at most {self.max_rows()} now")
        bound = self._bound
        bound.array(contract.TOKEN_IDS, rows.tokens)
        bound.array(contract.POSITIONS, self._length + rows.depths())
        bound.array(contract.WANTED, np.asarray(wanted, np.int64))
        for kind, cache in self._caches.items():
            start, stop = cache.reserve(self._length, count)
            window = self.target.sliding_window if kind == "sliding" else None
            mask = attention_mask(rows, self._length, (start, stop), window)
            bound.array(contract.mask(kind), mask)
            bound.array(contract.write_index(kind), np.array([self._length - start], np.int64))
            for layer in cache.layers:
                for part, view in zip(PARTS, cache.view(layer, start, stop), strict=True):
                    bound.in_place(contract.past(layer, part), contract.present(layer, part), view)
        outputs = self._outputs.rows(len(wanted))
        bound.output(contract.LOGITS, outputs.logits)
        bound.output(contract.HIDDEN, outputs.hidden)
        bound.run()
        self._pending = count
        return outputs

    def draft_step(self, token: int, hidden: Floats) -> DraftStep:
        model = self._drafter_model
        if model is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        bound = self._drafter
        bound.array(contract.TOKEN_ID, np.array([token], np.int64))
        bound.array(contract.POSITION, np.array([self._length], np.int64))
        bound.array(contract.HIDDEN, hidden.astype(np.float32, copy=False).reshape(1, -1))
        layers: dict[AttentionKind, int] = {"full": model.full_layer, "sliding": model.sliding_layer}
        for kind, layer in layers.items():
            start, stop = self._caches[kind].reserve(self._length, 0)
            bound.array(contract.mask(kind), self._drafter_mask(kind, start, stop))
            for part, view in zip(PARTS, self._caches[kind].view(layer, start, stop), strict=True):
                bound.view(contract.shared(kind, part), view)
        candidates = np.empty(model.candidates, np.int64)
        logits = np.empty(model.candidates, np.float32)
        following = np.empty((1, self.target.hidden_size), np.float32)
        bound.output(contract.CANDIDATES, candidates)
        bound.output(contract.LOGITS, logits)
        bound.output(contract.NEXT_HIDDEN, following)
        bound.run()
        return DraftStep(candidates, logits, following[0])

    def close(self) -> None:
        """Drop the sessions and the cache; the engine is of no use afterwards."""
        self.__dict__.clear()

    def _drafter_mask(self, kind: AttentionKind, start: int, stop: int) -> NDArray[np.bool_]:
        """Verified rows only. The reference's window is inclusive here: the last `window + 1` of them.

        Source: `create_bidirectional_sliding_window_mask` over the flipped cache, Gemma4AssistantForCausalLM.
        """
        positions = np.arange(start, stop)
        seen = positions < self._length
        if kind == "sliding":
            seen &= positions >= self._length - 1 - self.target.sliding_window
        return seen[None, :]

    def _make_caches(self) -> dict[AttentionKind, KVCache]:
        caches: dict[AttentionKind, KVCache] = {}
        for kind in KINDS:
            owners = [index for index in self.target.kv_layers() if self.target.layers[index].kind == kind]
            widths = {index: self.target.layers[index].kv_width for index in owners}
            # window - 1 rows are enough for the target, the drafter sees two more
            history = self.target.sliding_window + 1 if kind == "sliding" else None
            caches[kind] = KVCache(widths, PREFILL_ROWS, history)
        return caches


class _Binding:
    """A session's inputs and outputs bound to memory that numpy owns. What has not moved is not bound again."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._held: dict[str, NDArray[Any]] = {}

    def array(self, name: str, value: NDArray[Any]) -> None:
        """Give an input that changes every time. The binding has its own copy, so that only a new shape binds anew."""
        held = self._held.get(name)
        if held is not None and held.shape == value.shape:
            held[...] = value
        else:
            self._bind(self._binding.bind_input, name, np.array(value, order="C"))

    def view(self, name: str, value: NDArray[np.float32]) -> None:
        """Bind an input to rows of a cache, float32[S, width], as [1, S, width]."""
        if not self._same(name, value):
            self._bind(self._binding.bind_input, name, value[None])

    def in_place(self, past: str, present: str, value: NDArray[np.float32]) -> None:
        """Bind an input and an output to the same rows: TensorScatter then writes the new ones and copies nothing."""
        if not self._same(past, value):
            self._bind(self._binding.bind_input, past, value[None])
            self._bind(self._binding.bind_output, present, value[None])

    def output(self, name: str, value: NDArray[Any]) -> None:
        if not self._same(name, value):
            self._bind(self._binding.bind_output, name, value)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def _same(self, name: str, value: NDArray[Any]) -> bool:
        held = self._held.get(name)
        return held is not None and held.ctypes.data == value.ctypes.data and held.size == value.size

    def _bind(self, bind: Any, name: str, value: NDArray[Any]) -> None:
        bind(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        self._held[name] = value  # the binding holds an address only


class _OutputBuffers:
    """Logits and hidden states, allocated once per row count: 8 rows of 262,144 logits are 8 MiB of page faults."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self._widths = (vocab_size, hidden_size)
        self._logits, self._hidden = (np.empty((0, width), np.float32) for width in self._widths)

    def rows(self, count: int) -> Outputs:
        if count > len(self._logits):
            self._logits, self._hidden = (np.empty((count, width), np.float32) for width in self._widths)
        return Outputs(self._logits[:count], self._hidden[:count])


def _interface(session: ort.InferenceSession) -> Interface:
    """Names and shapes of a session's inputs and outputs; symbolic dimensions are strings, unknown ones None."""
    inputs, outputs = (
        {value.name: tuple(size if isinstance(size, int) else None for size in value.shape) for value in values}
        for values in (session.get_inputs(), session.get_outputs())
    )
    return Interface(inputs, outputs)


def _session(graph: Path, threads: int) -> ort.InferenceSession:
    ort.disable_telemetry_events()  # Windows knows no ORT_DISABLE_TELEMETRY
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(os.fspath(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own errors share no base class
        reason = str(error).splitlines()[0][:200]
        raise BundleCorruptError(f"onnxruntime cannot load {graph} ({reason}): export the bundle again") from error
