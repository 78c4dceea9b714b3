"""The two graphs of a bundle on plain ONNX Runtime: no engine, so that a failure here is the exporter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.graph_io import PARTS, AttentionKind
from ondevice.bundle_format.manifest import Manifest

KINDS: tuple[AttentionKind, AttentionKind] = ("full", "sliding")
CACHE_ROWS = 128


@dataclass
class Step:
    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class TargetRunner:
    """Appends rows to caches of `CACHE_ROWS` rows; a row sees its ancestors, in sliding layers the last window."""

    def __init__(self, bundle: Path) -> None:
        self.manifest = Manifest.from_json((bundle / "bundle.json").read_text())
        self.session = session(bundle / "target.onnx")
        self.caches = {
            graph_io.past(index, part): np.zeros(
                (1, CACHE_ROWS, self.manifest.target.layers[index].mixer.kv_width), np.float32
            )
            for index in self.manifest.target.kv_layers()
            for part in ("key", "value")
        }
        self.length = 0

    def forward(self, ids: list[int], wanted: list[int] | None = None, parents: list[int] | None = None) -> Step:
        """`parents[t]` is the new row before row t, -1 for the last cached row; a chain by default."""
        parents = list(range(-1, len(ids) - 1)) if parents is None else parents
        positions, full, sliding = self._masks(parents)
        outputs = self.session.run(
            None,
            {
                graph_io.TOKEN_IDS: np.array(ids, np.int64),
                graph_io.POSITIONS: positions,
                graph_io.WANTED: np.array(range(len(ids)) if wanted is None else wanted, np.int64),
                graph_io.mask("full"): full,
                graph_io.mask("sliding"): sliding,
                **{graph_io.write_index(kind): np.array([self.length], np.int64) for kind in KINDS},
                **self.caches,
            },
        )
        named = dict(zip([output.name for output in self.session.get_outputs()], outputs, strict=True))
        self.caches = {name: named[name.replace("past", "present")] for name in self.caches}
        self.length += len(ids)
        return Step(named[graph_io.LOGITS], named[graph_io.HIDDEN])

    def _masks(self, parents: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        positions = np.zeros(len(parents), np.int64)
        seen = np.zeros((len(parents), CACHE_ROWS), bool)
        row_positions = np.arange(CACHE_ROWS)
        for row, parent in enumerate(parents):
            seen[row, : self.length] = True
            if parent >= 0:
                seen[row] = seen[parent]
            positions[row] = self.length if parent < 0 else positions[parent] + 1
            seen[row, self.length + row] = True
            row_positions[self.length + row] = positions[row]
        age = positions[:, None] - row_positions[None, :]
        return positions, seen, seen & (age < (self.manifest.target.window or 0))


@dataclass
class Draft:
    candidates: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]


class DrafterRunner:
    """One MTP step over a target's caches."""

    def __init__(self, bundle: Path, target: TargetRunner) -> None:
        self.session = session(bundle / "drafter.onnx")
        self.target = target

    def step(self, token: int, hidden: npt.NDArray[np.float32], position: int) -> Draft:
        drafter = self.target.manifest.drafter
        assert drafter is not None
        rows = np.arange(CACHE_ROWS)[None]
        seen = rows < self.target.length
        # The reference's window is inclusive here: create_bidirectional_sliding_window_mask over the flipped cache.
        window = seen & (rows >= self.target.length - 1 - (self.target.manifest.target.window or 0))
        feeds = {
            graph_io.TOKEN_ID: np.array([token], np.int64),
            graph_io.HIDDEN: hidden,
            graph_io.POSITION: np.array([position], np.int64),
            graph_io.mask("full"): seen,
            graph_io.mask("sliding"): window,
        }
        for layer in drafter.kv_layers():
            names = [graph_io.past(layer, part) for part in PARTS]
            feeds |= {name: self.target.caches[name] for name in names}
        return Draft(*self.session.run([graph_io.CANDIDATES, graph_io.LOGITS, graph_io.NEXT_HIDDEN], feeds))
