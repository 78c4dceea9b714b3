"""The `ort` engine: a bundle's graphs on ONNX Runtime, with every session's KV cache bound in place.

The output of a row in a chain is the same bits whatever other rows the forward has (tests/engines/test_exactness.py),
for three reasons: the graphs fold query heads into rows, so no product has a single row; `VIEWS` aligns the positions
that attention reads; and MatMulNBits quantises activations row by row. ONNX Runtime promises none of this: it was
tested on x86-64 only. Branches of a tree are equal up to rounding: softmax sums keys in the order of their cache rows,
and siblings lie between a row and its ancestors there.

`OrtEngine` holds the graphs with their weights, `OrtSession` one sequence, `Binding` a session's inputs and outputs of
a graph in memory of numpy arrays.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ondevice.arrays import Float32Array, Int64Array
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.interfaces import Interface, drafter_interface, heads_interface, target_interface
from ondevice.bundle_format.model_config import HeadsEntry, Target
from ondevice.engines.graph_check import check_graph
from ondevice.engines.kv_cache import Views, attention_mask, first_drafted, make_caches, window_rows
from ondevice.engines.layer_path import PathMemory
from ondevice.engines.protocol import (
    ROOT,
    DraftStep,
    ExpertShare,
    Outputs,
    Proposals,
    Rows,
    Session,
    TokenTree,
    check_batch,
    context_within,
    no_heads,
)
from ondevice.engines.sequence import CachedSequence
from ondevice.engines.session_file import SessionOrigin
from ondevice.engines.states import RecurrentStates
from ondevice.errors import BundleCorruptError, UsageError, pass_on, reason
from ondevice.forks import ForkGuard


class Graph(NamedTuple):
    """A graph that was opened, and its inputs and outputs."""

    session: ort.InferenceSession
    interface: Interface


class Binding:
    """One session's inputs and outputs of a graph, in memory of numpy arrays.

    An array whose address and size have not changed is not bound again. Each session has its own bindings, so sessions
    that alternate do not bind again at every forward.

    Attributes:
        outputs: the arrays of the outputs whose shape is always the same; a run overwrites them.
    """

    def __init__(self, graph: Graph) -> None:
        self._binding = graph.session.io_binding()
        self._graph = graph.session
        self._held: dict[str, NDArray[Any]] = {}
        self.outputs: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in graph.interface.outputs.items():
            sizes = [size for size in shape if isinstance(size, int)]
            if len(sizes) == len(shape):
                self.outputs[name] = np.empty(sizes, dtype)
                self.output(name, self.outputs[name])

    def array(self, name: str, value: NDArray[Any]) -> None:
        """Set an input that changes with every run. It is copied into a buffer, so only a new shape is bound again."""
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
        """Bind an input and an output to the same rows: TensorScatter then writes the new rows and copies nothing."""
        if not self._same(past, value):
            self._bind(self._binding.bind_input, past, value[None])
            self._bind(self._binding.bind_output, present, value[None])

    def output(self, name: str, value: NDArray[Any]) -> None:
        if not self._same(name, value):
            self._bind(self._binding.bind_output, name, value)

    def run(self) -> None:
        """Run the graph.

        Raises:
            BundleCorruptError: ONNX Runtime refuses to run it, although its inputs and outputs have the right shapes.
            MemoryError: there is not enough memory.
        """
        try:
            self._graph.run_with_iobinding(self._binding)
        except Exception as error:
            raise meaning(error, "run this bundle's graphs") from error

    def _same(self, name: str, value: NDArray[Any]) -> bool:
        held = self._held.get(name)
        return held is not None and held.ctypes.data == value.ctypes.data and held.size == value.size

    def _bind(self, bind: Any, name: str, value: NDArray[Any]) -> None:
        bind(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        self._held[name] = value  # keeps the array alive: ONNX Runtime's binding holds an address only


PREFILL_ROWS = 256
"""Most rows of a forward. With more, the reference pair's prefill gets no faster, and attention scores take more
memory."""

BLOCK_ROWS = 288
"""Most rows of a forward of a model whose pictures are read at once: one of 280 tokens fits."""

PROBED = 32
"""Tokens before the one that tells whether a single row is summed apart: attention sums over their values."""

SCORES = 2**25
"""Most attention scores (query heads x rows x keys) of a forward, 128 MiB of float32; those of a picture whose rows see
each other may be more."""

VIEWS = Views(align=256, step=64, least=128)
"""The cache rows that a graph reads. With these values a row is rounded alike whether it is verified or decoded alone.

align : ONNX Runtime's GEMM sums keys in blocks of 128 or 256; a view that begins elsewhere shifts the blocks
step : a graph is bound again once in 64 tokens only, and softmax lanes line up
least : with fewer than 128 keys the GEMM picks another block size, and rounds differently (measured at head size 512)
"""


class OrtSession(CachedSequence):
    """See `Session`. Everything that a run reads or writes, apart from the weights, belongs to the session."""

    exact_trees = False
    """A row's last bits differ between a tree and a chain, which changes seeded texts of the reference pair."""

    def __init__(
        self,
        engine: OrtEngine,
        origin: SessionOrigin,
        bound: Binding,
        drafts: Binding | None,
        heads: Mapping[str, Binding],
    ) -> None:
        """
        Args:
            engine: runs its forwards.
            origin: as in `CachedSequence`.
            bound, drafts, heads: the target's graph, the drafter's if there is one, and those of heads by kind.
        """
        super().__init__(
            make_caches(engine.target, lambda own: np.dtype((np.float32, (own.kv_width,))), engine.most_rows, VIEWS),
            origin,
            RecurrentStates(shapes, engine.most_rows) if (shapes := engine.target.states) else None,
        )
        self.engine = engine
        self._bound, self._drafts, self._heads = bound, drafts, heads
        self._outputs = _OutputBuffers(engine.target)
        self._no_soft_rows = np.zeros((1, engine.target.hidden_size), np.float32)

    def max_rows(self, block: int = 1) -> int:
        self.check_open()
        most = self.engine.most_rows
        by_memory = SCORES // (self.engine.query_heads * (self.length + most))
        return min(most, max(block, by_memory), self.engine.context_length - self.length)

    def set_pending(self, tree: TokenTree | None) -> None:
        """Set the rows that `commit` may keep."""
        self._pending = tree

    def run(self, rows: Rows) -> tuple[Float32Array, Float32Array]:
        """Run rows that were checked, and write their keys and values after those of the committed rows.

        Returns:
            Logits and hidden states of the wanted rows, in arrays that are valid until the session's next run.

        Raises:
            ValueError: rows of a tree that is no chain, in a model with states.
        """
        if self._states is not None:
            self.check_states()
            if not rows.tree.is_chain:
                raise ValueError("rows that states pass are a chain on the ort engine")
            if unread := self.unread:
                self._run(Rows(self, TokenTree.chain(unread), []), self._states.length)
                self._states.advance(self.length)
        return self._run(rows, self.length)

    def _run(self, rows: Rows, length: int) -> tuple[Float32Array, Float32Array]:
        """Run rows after `length` tokens."""
        bound, tree, wanted, target = self._bound, rows.tree, rows.wanted, self.engine.target
        needed = wanted if len(wanted) else [0]  # ONNX Runtime's Attention refuses zero rows
        if self.engine.pads_single_rows:
            tree, needed = _at_least_two(tree), [*needed, *needed][: max(2, len(needed))]
        count = len(tree)
        if self._states is not None:
            bound.array(graph_io.STATE_ROWS, (np.arange(count) < len(rows.tree)).astype(np.float32))
            for layer in self._states.layers:
                bound.view(graph_io.state(layer), self._states.present(layer))
                bound.output(graph_io.next_state(layer), self._states.following(layer)[None])
        bound.array(graph_io.TOKEN_IDS, np.where(tree.tokens < 0, self.engine.pad, tree.tokens))
        if self.engine.takes_soft_rows:
            self._bind_embeddings(tree.tokens, rows.soft)
        bound.array(graph_io.POSITIONS, length + tree.depths())
        bound.array(graph_io.WANTED, np.asarray(needed, np.int64))
        for kind, cache in self._caches.items():
            start, stop = cache.reserve(length, count)
            window = target.window if kind == "sliding" else None
            if kind in target.attention_kinds:
                bound.array(graph_io.mask(kind), attention_mask(tree, length, (start, stop), window, rows.blocks))
            elif window is not None:
                bound.array(graph_io.CONVOLUTION_ROWS, window_rows(tree, length, start, window))
            bound.array(graph_io.write_index(kind), np.array([length - start], np.int64))
            for layer in cache.layers:
                for part, view in zip(graph_io.PARTS, cache.view(layer, start, stop), strict=True):
                    bound.in_place(graph_io.past(layer, part), graph_io.present(layer, part), view)
        logits, hidden = self._outputs.rows(len(needed))
        bound.output(graph_io.LOGITS, logits)
        bound.output(graph_io.HIDDEN, hidden)
        bound.run()
        return logits[: len(wanted)], hidden[: len(wanted)]

    def _bind_embeddings(self, tokens: Int64Array, soft: Float32Array | None) -> None:
        """Bind the embeddings of soft rows, and for each row where its embedding lies."""
        source = np.arange(len(tokens), dtype=np.int64)
        if soft is None:
            soft = self._no_soft_rows
        else:
            # a single row that is run twice has one embedding
            numbers = np.minimum(np.cumsum(tokens < 0) - 1, len(soft) - 1)
            source = np.where(tokens < 0, len(tokens) + numbers, source)
        self._bound.array(graph_io.SOFT_ROWS, soft)
        self._bound.array(graph_io.EMBEDDING_SOURCE, source)

    def draft_step(self, token: int, hidden: Float32Array, depth: int = 0) -> DraftStep:
        self.check_open()
        target, length, bound, drafter = self.engine.target, self.length, self._drafts, self.engine.drafter
        if bound is None or drafter is None:
            raise UsageError("this bundle has no drafter: use --drafter ngram or none")
        if not length:
            raise ValueError("nothing is committed yet: a draft follows committed tokens")
        if not 0 <= token < target.vocab_size:
            raise ValueError(f"token ids must be within 0..{target.vocab_size - 1}")
        row, writes = self._row(hidden), target.mtp is not None
        position = self.draft_position(depth) if writes else length
        with self.engine.computing():
            bound.array(graph_io.TOKEN_ID, np.array([token], np.int64))
            bound.array(graph_io.POSITION, np.array([position], np.int64))
            bound.array(graph_io.HIDDEN, row)
            for kind in drafter.kinds:
                cache, window = self._caches[kind], target.window if kind == "sliding" else None
                start, stop = cache.reserve(position, int(writes))
                positions = np.arange(start, stop)
                if writes:  # the first position follows no hidden state
                    seen = (positions > 0) & (positions <= position)
                    bound.array(graph_io.write_index(kind), np.array([position - start], np.int64))
                else:
                    seen = (first_drafted(length, window) <= positions) & (positions < length)
                bound.array(graph_io.mask(kind), seen[None])
                for layer in drafter.kv_layers():
                    if layer in cache.layers:
                        for part, view in zip(graph_io.PARTS, cache.view(layer, start, stop), strict=True):
                            past = graph_io.past(layer, part)
                            if writes:
                                bound.in_place(past, graph_io.present(layer, part), view)
                            else:
                                bound.view(past, view)
            bound.run()
        found = bound.outputs
        return DraftStep(found[graph_io.CANDIDATES], found[graph_io.LOGITS], found[graph_io.NEXT_HIDDEN][0])

    def propose(self, kind: str, hidden: Float32Array) -> Proposals:
        self.check_open()
        if kind not in self._heads:
            raise no_heads(kind)
        bound, row = self._heads[kind], self._row(hidden)
        with self.engine.computing():
            bound.array(graph_io.HIDDEN, row)
            bound.run()
        return Proposals(bound.outputs[graph_io.CANDIDATES], bound.outputs[graph_io.LOGITS])

    def _row(self, hidden: Float32Array) -> Float32Array:
        """A hidden state as float32[1, H]."""
        size = self.engine.target.hidden_size
        if np.size(hidden) != size:
            raise ValueError(f"a hidden state must be {size} numbers, not {np.size(hidden)}")
        return np.asarray(hidden, np.float32).reshape(1, -1)

    def close(self) -> None:
        if not self.closed:
            del self._bound, self._drafts, self._heads, self._outputs
        super().close()

    def _sibling(self) -> OrtSession:
        return self.engine.open_session()


def _at_least_two(tree: TokenTree) -> TokenTree:
    """The tree, or a single row twice: the copy's keys and values lie after the row's and are never committed."""
    return tree if len(tree) > 1 else TokenTree(np.repeat(tree.tokens, 2), np.array([ROOT, ROOT], np.int64))


class _OutputBuffers:
    """Reused arrays for logits and hidden states: new memory for 8 rows of 262,144 logits faults 8 MiB of pages."""

    def __init__(self, target: Target) -> None:
        self._widths = (target.vocab_size, target.hidden_size)
        self._logits, self._hidden = (np.empty((0, width), np.float32) for width in self._widths)

    def rows(self, count: int) -> tuple[Float32Array, Float32Array]:
        if count > len(self._logits):
            self._logits, self._hidden = (np.empty((count, width), np.float32) for width in self._widths)
        return self._logits[:count], self._hidden[:count]


class OrtEngine:
    """See `Engine`. One graph runs at a time."""

    name = "ort"
    paths: PathMemory | None = None
    kv_cache = "fp32"
    experts: ExpertShare | None = None

    def __init__(self, bundle: Bundle, threads: int, context_length: int | None = None) -> None:
        """Arguments as for `choice.open_engine`.

        Raises:
            BundleCorruptError: the tensor tables contradict the configuration or the files, a graph is not what the
                exporter writes, or ONNX Runtime cannot load it.
            UsageError: the context length is impossible.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self.content = bundle.content
        self.query_heads = max(own.heads for own in self.target.attention)
        self._threads = threads
        self.drafter = bundle.manifest.drafter
        self.heads: dict[str, HeadsEntry] = {heads.kind: heads for heads in bundle.manifest.heads}
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        bundle.manifest.check_tensors()
        self.takes_soft_rows = bundle.manifest.reads_media
        vision = bundle.manifest.vision
        self.most_rows = BLOCK_ROWS if vision is not None and vision.bidirectional else PREFILL_ROWS
        self.pad = bundle.manifest.pad_token_id or 0
        interfaces = {self.target.graph: target_interface(self.target, takes_soft_rows=self.takes_soft_rows)}
        if self.drafter is not None:
            interfaces[self.drafter.graph] = drafter_interface(self.drafter, self.target)
        interfaces |= {entry.graph: heads_interface(entry, self.target) for entry in self.heads.values()}
        # The others have one thread: a step is too small to share, and the spinning threads of a second pool would
        # compete with the target's for the cores.
        self._graphs: dict[str, Graph] | None = {
            name: Graph(open_graph(bundle, name, expected, threads if name == self.target.graph else 1), expected)
            for name, expected in interfaces.items()
        }
        self.pads_single_rows = False
        """Whether a single row is run twice, because ONNX Runtime sums it in another order than rows of several.

        Its MatMulNBits of 4 bits does so on x86-64 with AVX2 only (seen with 1.31 and 1.32), its attention where each
        query head has a KV head of its own: drafts would change the text there. From two rows on, a row's result does
        not depend on their number.
        """
        self.pads_single_rows = self._sums_single_rows_apart()

    def _sums_single_rows_apart(self) -> bool:
        """Run one token alone and before another, after some others, and compare the bits of its logits."""
        with closing(self.open_session()) as session:
            before = TokenTree.chain(range(min(PROBED, self.target.vocab_size, session.max_rows() - 1)))
            session.run(Rows(session, before, []))
            session.set_pending(before)
            session.commit(range(len(before)))
            alone = session.run(Rows(session, TokenTree.chain([1]), [0]))[0].copy()
            twice = session.run(Rows(session, TokenTree.chain([1, 1]), [0, 1]))[0]
            return not np.array_equal(alone[0], twice[0])

    def open_session(self) -> OrtSession:
        graphs = self._open_graphs()
        drafts = None if self.drafter is None else Binding(graphs[self.drafter.graph])
        heads = {kind: Binding(graphs[entry.graph]) for kind, entry in self.heads.items()}
        origin = SessionOrigin(self.content, self.name, self.kv_cache)
        return OrtSession(self, origin, Binding(graphs[self.target.graph]), drafts, heads)

    def load_session(self, path: str | PathLike[str]) -> OrtSession:
        session = self.open_session()
        session.load(path, self.target.vocab_size, self.context_length)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        """See `Engine.forward`. Sessions run one after another, so the weights are read once for each."""
        sessions = [self._own(rows.session) for rows in batch]
        total = check_batch(batch, self.target, self.most_rows)
        if not all(rows.path.is_whole for rows in batch):
            raise UsageError("the ort engine runs all layers or none: use --engine simd")
        if not self.takes_soft_rows and any(rows.soft is not None for rows in batch):
            raise UsageError("this bundle's graph has no input for soft rows: export it again with its towers")
        with self.computing():
            started = perf_counter()
            for session in sessions:
                session.set_pending(None)  # after an error or an interrupt, no session has rows to commit
            found = [session.run(rows) for session, rows in zip(sessions, batch, strict=True)]
            for session, rows in zip(sessions, batch, strict=True):
                session.set_pending(rows.tree)
            seconds = perf_counter() - started
        wanted = sum(len(rows.wanted) for rows in batch)
        return [Outputs(logits, hidden, total, wanted, seconds, self._threads) for logits, hidden in found]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let one thread run graphs at a time.

        ONNX Runtime allows several, and two on two cores gave 8 to 16 % more tokens per second (reference pair, 64 and
        256 rows). But `Outputs.seconds`, from which draft sizes are learnt, would then include the other's time, and
        the memory for SCORES would be needed twice.
        """
        self._fork_guard.check()
        with self._lock:
            self._open_graphs()
            yield

    def close(self) -> None:
        """Drop the graphs. Their memory is freed once all sessions are closed too."""
        if not self._fork_guard.in_own_process:
            return  # ONNX Runtime would wait for threads that a fork does not have
        with self._lock:
            self._graphs = None

    def _own(self, session: Session) -> OrtSession:
        if not isinstance(session, OrtSession) or session.engine is not self:
            raise ValueError("a session can only run on the engine that opened it")
        session.check_open()
        return session

    def _open_graphs(self) -> dict[str, Graph]:
        graphs = self._graphs
        if graphs is None:
            raise UsageError("this engine is closed: load the bundle again")
        return graphs


def open_graph(bundle: Bundle, name: str, expected: Interface, threads: int) -> ort.InferenceSession:
    """Check a graph of a bundle, then open it for ONNX Runtime.

    Args:
        bundle: the bundle.
        name: file name of the graph.
        expected: its inputs and outputs.
        threads: number of threads that compute.

    Raises:
        BundleCorruptError: it is not what the exporter writes, or ONNX Runtime cannot load it.
        MemoryError: there is not enough memory.
    """
    graph = bundle.graph(name)
    check_graph(graph, bundle.manifest, expected)
    ort.disable_telemetry_events()  # ORT_DISABLE_TELEMETRY has no effect on Windows
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(os.fspath(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise meaning(error, f"load {graph}") from error


SHORT = re.compile("failed to allocate memory|bad_alloc|bad allocation", re.IGNORECASE)
"""How ONNX Runtime's arena and the C++ libraries say that there is not enough memory."""


def meaning(error: Exception, task: str) -> Exception:
    """The exception of this package for one of ONNX Runtime, whose classes share no base and tell no lack of memory.

    Args:
        task: what it was doing: `run this bundle's graphs`.

    Raises:
        Exception: the error itself, if it is none of ONNX Runtime: see `pass_on`.
    """
    if isinstance(error, MemoryError) or SHORT.search(str(error)) is not None:
        return MemoryError(f"not enough memory for onnxruntime to {task}")
    if not type(error).__module__.startswith("onnxruntime."):
        pass_on(error)
    return BundleCorruptError(f"onnxruntime cannot {task} ({reason(error)}): export the bundle again")


POLL_S = 0.02
"""Seconds between two questions whether a run was cancelled."""


def run_graph(
    graph: ort.InferenceSession, output: str, feeds: Mapping[str, Any], cancelled: Callable[[], bool]
) -> Any | None:
    """Run a graph that takes seconds, and return one output; None if `cancelled` returned True before it was done.

    It runs in another thread, so that this one can be interrupted; it then ends after the node that is being computed.
    What it took for intermediate results is given back to the system.

    Raises:
        Exception: whatever ONNX Runtime raises.
    """
    options, found, failures = ort.RunOptions(), list[Any](), list[Exception]()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run() -> None:
        try:
            found.extend(graph.run([output], feeds, options))
        except Exception as error:  # onnxruntime's own errors share no base class
            failures.append(error)

    thread = threading.Thread(target=run, name="ondevice-media", daemon=True)
    stopped = cancelled()
    if stopped:
        return None
    thread.start()
    try:
        while thread.is_alive() and not stopped:
            thread.join(POLL_S)
            stopped = cancelled()
    finally:  # also after a KeyboardInterrupt
        options.terminate = True
        thread.join()
    if found:
        return found[0]
    if stopped:
        return None
    raise failures[0]
