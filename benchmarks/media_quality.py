"""What int8 costs a vision tower: its soft rows and the language model's next tokens, against the float32 tower.

    python -m benchmarks.media_quality DIRECTORY [--tokens 280] [--pictures 4] [--threads N]

The directory is that of `benchmarks.media`, whose weights are random. Its tower is written again in float32, into a
temporary directory. Printed are the smallest and the mean cosine between soft rows of both towers, the Kullback-Leibler
divergence between the distributions of the tokens after the picture, in how many places the likeliest token is the
same, and the time of a picture in both towers. The language model is the bundle's own, so its int4 weights are the same
on both sides.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from benchmarks.e2b_shape import target_model, with_towers
from benchmarks.media import picture
from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import BUDGETS, VisionEntry
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.media.images import Pixels
from ondevice.media.prompt import soft_ids
from ondevice_export.export_options import ExportOptions
from ondevice_export.graph_files import GraphFiles

FloatArray = NDArray[np.float32]

TEXT = 64
"""Tokens after the picture."""


def write_float32(directory: Path) -> Path:
    """Write the float32 graph of the random tower; returns its path."""
    graphs = GraphFiles(directory, ExportOptions(quantize="none"), lambda _weights: None)
    target = with_towers(target_model(directory))
    assert target.vision is not None
    graphs.write_vision(target.vision, target)
    return directory / target.vision.graph


def opened(graph: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def soft_rows(graph: ort.InferenceSession, pixels: Pixels) -> FloatArray:
    rows: FloatArray = graph.run([graph_io.SOFT_ROWS], pixels.feeds())[0]
    return rows


def cosines(one: FloatArray, other: FloatArray) -> FloatArray:
    """The cosine between each row and that of the other array."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: FloatArray = (one * other).sum(axis=1) / norms
    return found


def log_shares(engine: Engine, vision: VisionEntry, rows: FloatArray, digest: bytes) -> NDArray[np.float64]:
    """float64[TEXT, V]: logarithms of the shares of every next token, in the text after a picture."""
    text = np.random.default_rng(len(digest)).integers(100, engine.target.vocab_size // 2, TEXT).tolist()
    prompt = [2, vision.begin_token_id, *soft_ids(digest, len(rows)), vision.end_token_id]
    session = engine.open_session()
    engine.forward([Rows(session, TokenTree.chain(prompt), [0], soft=rows)])
    session.commit(range(len(prompt)))
    (outputs,) = engine.forward([Rows(session, TokenTree.chain(text), range(TEXT))])
    logits = outputs.logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    made: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    session.close()
    return made


def compared(bundle: Bundle, exact: Path, tokens: int, pictures: int, threads: int) -> dict[str, Any]:
    """Compare the bundle's tower with a float32 graph, over some random pictures."""
    vision = bundle.manifest.vision
    assert vision is not None
    graphs = [opened(path, threads) for path in (exact, bundle.path / vision.graph)]
    engine, near, divergences, same = SimdEngine(bundle, threads), list[float](), list[float](), list[bool]()
    seconds: list[list[float]] = [[], []]
    for seed in range(pictures):
        pixels = picture(vision, tokens, seed)
        both = []
        for graph, taken in zip(graphs, seconds, strict=True):
            started = time.perf_counter()
            both.append(soft_rows(graph, pixels))
            taken.append(time.perf_counter() - started)
        near += cosines(*both).tolist()
        first, second = (log_shares(engine, vision, rows, pixels.digest()) for rows in both)
        divergences += (np.exp(first) * (first - second)).sum(axis=1).tolist()
        same += (first.argmax(axis=1) == second.argmax(axis=1)).tolist()
    engine.close()
    return {
        "smallest cosine": f"{min(near):.4f}",
        "mean cosine": f"{np.mean(near):.4f}",
        "mean KL, nats": f"{np.mean(divergences):.2e}",
        "largest KL, nats": f"{max(divergences):.2e}",
        "same likeliest token": f"{np.mean(same):.3f}",
        "float32 ms": f"{1e3 * median(seconds[0]):.0f}",
        "int8 ms": f"{1e3 * median(seconds[1]):.0f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, choices=BUDGETS, default=280)
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--threads", type=int, default=machine.default_threads())
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        exact = write_float32(Path(directory))
        found = compared(Bundle.open(chosen.directory), exact, chosen.tokens, chosen.pictures, chosen.threads)
    print(table(list(found), [list(found.values())], left=()))


if __name__ == "__main__":
    main()
