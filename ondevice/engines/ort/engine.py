"""The weights of the `ort` engine, and one run at a time: see `ondevice.engines.protocol.Engine`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import onnxruntime as ort

from ondevice import contract
from ondevice.bundle import Bundle
from ondevice.engines.agreement import KINDS, Interface, check_drafter, check_heads, check_target
from ondevice.engines.batch import check_batch
from ondevice.engines.context import context_within
from ondevice.engines.onnx.file import read_nodes
from ondevice.engines.ort.binding import Binding
from ondevice.engines.ort.draft_steps import DraftSteps
from ondevice.engines.ort.heads_run import HeadsRun
from ondevice.engines.ort.session import PREFILL_ROWS, OrtSession
from ondevice.engines.path_memory import PathMemory
from ondevice.engines.process import Process
from ondevice.engines.protocol import ExpertShare, Outputs, Rows, Session
from ondevice.engines.session_file import Origin
from ondevice.errors import BundleCorruptError, UsageError
from ondevice.manifest import HeadsEntry


class _Graphs(NamedTuple):
    target: ort.InferenceSession
    drafter: ort.InferenceSession | None
    heads: dict[str, ort.InferenceSession]


class OrtEngine:
    name = "ort"
    paths: PathMemory | None = None
    kv_cache = "fp32"
    experts: ExpertShare | None = None
    most_rows = PREFILL_ROWS

    def __init__(self, bundle: Bundle, threads: int, context_length: int | None = None) -> None:
        """
        Args:
            bundle: what to run.
            threads: that compute.
            context_length: most tokens of a sequence; None takes the target's own.

        Raises:
            BundleCorruptError: ONNX Runtime cannot load a graph.
            UsageError: an impossible context length.
        """
        self.target = bundle.manifest.target
        self.context_length = context_within(context_length, self.target.context_length)
        self.content = bundle.content
        self._threads = threads
        self._drafter_model = bundle.manifest.drafter
        self.has_drafter = self._drafter_model is not None
        self.heads: dict[str, HeadsEntry] = {heads.kind: heads for heads in bundle.manifest.heads}
        self._lock = threading.Lock()
        self._process = Process()
        target, drafter = _load(bundle.graph(self.target.graph), threads), None
        check_target(_interface(target), self.target)
        if self._drafter_model is not None:
            # One thread: a step is too small to share, and a second pool's spinning threads would fight the target's.
            drafter = _load(bundle.graph(self._drafter_model.graph), 1)
            check_drafter(_interface(drafter), self._drafter_model, self.target)
        heads = {}
        for kind, entry in self.heads.items():
            heads[kind] = _load(bundle.graph(entry.graph), 1)
            check_heads(_interface(heads[kind]), entry, self.target)
        self._graphs: _Graphs | None = _Graphs(target, drafter, heads)

    def open_session(self) -> OrtSession:
        graphs, drafts = self._open_graphs(), None
        if self._drafter_model is not None:
            drafts = DraftSteps(Binding(graphs.drafter), self._drafter_model, self.target)
        heads = {kind: HeadsRun(Binding(graph), self.heads[kind]) for kind, graph in graphs.heads.items()}
        return OrtSession(self, Origin(self.content, self.name, self.kv_cache), Binding(graphs.target), drafts, heads)

    def load_session(self, path: str | PathLike[str]) -> OrtSession:
        session = self.open_session()
        session.load(path, self.target.vocab_size, self.context_length - 1)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Outputs]:
        """See `Engine.forward`. Sessions run one after another, so each reads the weights again."""
        sessions = [self._own(rows.session) for rows in batch]
        total = check_batch(batch, self.target.vocab_size, self.most_rows)
        if not all(rows.path.is_whole for rows in batch):
            raise UsageError("the ort engine runs all layers or none: use --engine simd")
        with self.computing():
            started = perf_counter()
            for session in sessions:
                session.set_pending(None)  # an error or an interrupt in one leaves none with rows to commit
            found = [session.run(rows.tree, rows.wanted) for session, rows in zip(sessions, batch, strict=True)]
            for session, rows in zip(sessions, batch, strict=True):
                session.set_pending(rows.tree)
            seconds = perf_counter() - started
        wanted = sum(len(rows.wanted) for rows in batch)
        return [Outputs(logits, hidden, total, wanted, seconds, self._threads) for logits, hidden in found]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let one thread run graphs at a time.

        ONNX Runtime allows several, and two on two cores gave 8 to 16 % more tokens per second (reference pair, 64 and
        256 rows). But `Outputs.seconds`, from which draft sizes are learnt, would then tell of both, and `SCORES` of
        memory would be needed twice.
        """
        self._process.check()
        with self._lock:
            self._open_graphs()
            yield

    def close(self) -> None:
        """Drop the graphs. Their memory is given back once all sessions are closed too."""
        if not self._process.is_this_one:
            return  # ONNX Runtime would wait for threads that are not here
        with self._lock:
            self._graphs = None

    def _own(self, session: Session) -> OrtSession:
        if not isinstance(session, OrtSession) or session.engine is not self:
            raise ValueError("a session can only run on the engine that opened it")
        session.check_open()
        return session

    def _open_graphs(self) -> _Graphs:
        graphs = self._graphs
        if graphs is None:
            raise UsageError("this engine is closed: load the bundle again")
        return graphs


def _interface(session: ort.InferenceSession) -> Interface:
    """Names and shapes of a session's inputs and outputs; symbolic dimensions are strings, unknown ones None."""
    inputs, outputs = (
        {value.name: tuple(size if isinstance(size, int) else None for size in value.shape) for value in values}
        for values in (session.get_inputs(), session.get_outputs())
    )
    return Interface(inputs, outputs)


def _check_nodes(graph: Path) -> None:
    """Refuse what ONNX Runtime takes without looking.

    It divides by head counts, in 32 bits: a zero ends the process. And where a scatter of keys is not told which row to
    begin at, it takes the first, and what a draft leaves there changes the text.

    Raises:
        BundleCorruptError: there is such a node.
    """
    rows = {contract.write_index(kind) for kind in KINDS}
    for node in read_nodes(graph):
        if node.op == "TensorScatter" and not rows.intersection(node.inputs[2:]):
            raise BundleCorruptError(f"{graph}: a TensorScatter has no write_index: export the bundle again")
        for name in ("q_num_heads", "kv_num_heads"):
            heads = node.attributes.get(name, 1)
            if not isinstance(heads, int) or not 0 < heads < 1 << 31:
                raise BundleCorruptError(f"{graph}: {name} of {node.op} is {heads!r:.99}: export the bundle again")


def _load(graph: Path, threads: int) -> ort.InferenceSession:
    _check_nodes(graph)
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
