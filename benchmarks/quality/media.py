"""How much does a vision tower lose in int8, in its soft rows and in the next tokens?

    python -m benchmarks.quality.media DIRECTORY [--tokens 280] [--pictures 4] [--threads N]

The directory is that of `benchmarks.speed.media`, whose weights are random. Its tower is written again in float32, into
a temporary directory. Printed are the smallest and the mean cosine between soft rows of both towers, the
Kullback-Leibler divergence between the distributions of the tokens after the picture, and in how many places the
likeliest token is the same. For comparison, the same of the float32 tower where every pixel differs by at most NOISE of
255. The language model is the bundle's own, so its int4 weights are the same on all sides; with random weights it
magnifies differences.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from benchmarks.bundles.shape import target_model, with_towers
from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import forward
from benchmarks.speed.media import picture
from ondevice.arrays import Float32Array
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

TEXT = 64
"""Tokens after the picture."""
NOISE = 2


class Differences(NamedTuple):
    """The cosine of every soft row, and the divergence of every token after a picture and whether it is the same."""

    cosines: list[float]
    divergences: list[float]
    same: list[bool]


def write_float32(directory: Path) -> Path:
    """Write the float32 graph of the random tower; returns its path."""
    graphs = GraphFiles(directory, ExportOptions(quantize="none"), lambda _weights: None)
    target = with_towers(target_model("E2B", directory))
    assert target.vision is not None
    graphs.write_vision(target.vision, target)
    return directory / target.vision.graph


def opened(graph: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def soft_rows(graph: ort.InferenceSession, pixels: Pixels) -> Float32Array:
    rows: Float32Array = graph.run([graph_io.SOFT_ROWS], pixels.feeds())[0]
    return rows


def cosines(one: Float32Array, other: Float32Array) -> Float32Array:
    """The cosine between each row and that of the other array."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: Float32Array = (one * other).sum(axis=1) / norms
    return found


def log_shares(engine: Engine, vision: VisionEntry, rows: Float32Array, digest: bytes) -> NDArray[np.float64]:
    """float64[TEXT, V]: logarithms of the shares of every next token, in the text after a picture."""
    text = np.random.default_rng(len(digest)).integers(100, engine.target.vocab_size // 2, TEXT).tolist()
    prompt = [2, vision.begin_token_id, *soft_ids(digest, len(rows)), vision.end_token_id]
    session = engine.open_session()
    engine.forward([Rows(session, TokenTree.chain(prompt), [0], soft=rows)])
    session.commit(range(len(prompt)))
    outputs = forward(engine, session, text, range(TEXT))
    logits = outputs.logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    made: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    session.close()
    return made


def compared(bundle: Bundle, exact: Path, tokens: int, pictures: int, threads: int) -> dict[str, Differences]:
    """Compare the bundle's tower, and other pixels, with a float32 graph and the same, over some random pictures."""
    vision = bundle.manifest.vision
    assert vision is not None
    graphs = [opened(path, threads) for path in (exact, bundle.path / vision.graph)]
    engine, rng = SimdEngine(bundle, threads), np.random.default_rng(0)
    found: dict[str, Differences] = {name: Differences([], [], []) for name in ("int8", "other pixels")}
    for seed in range(pictures):
        pixels = picture(vision, tokens, seed)
        noise = rng.integers(-NOISE, NOISE + 1, pixels.values.shape)
        noisy = replace(pixels, values=np.clip(pixels.values + noise, 0, 255).astype(np.uint8))
        exactly = soft_rows(graphs[0], pixels)
        expected = log_shares(engine, vision, exactly, pixels.digest())
        for name, rows in (("int8", soft_rows(graphs[1], pixels)), ("other pixels", soft_rows(graphs[0], noisy))):
            shares = log_shares(engine, vision, rows, pixels.digest())
            found[name].cosines.extend(cosines(exactly, rows).tolist())
            found[name].divergences.extend((np.exp(expected) * (expected - shares)).sum(axis=1).tolist())
            found[name].same.extend((expected.argmax(axis=1) == shares.argmax(axis=1)).tolist())
    engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, choices=BUDGETS, default=280)
    parser.add_argument("--pictures", type=whole(1), default=4)
    add_threads(parser)
    chosen = parser.parse_args(arguments)
    bundle = Bundle.open(chosen.directory)
    if bundle.manifest.vision is None:
        raise SystemExit(f"{chosen.directory} has no vision tower: benchmarks.speed.media writes a bundle with one")
    with tempfile.TemporaryDirectory() as directory:
        exact = write_float32(Path(directory))
        found = compared(bundle, exact, chosen.tokens, chosen.pictures, chosen.threads)
    lines = [
        [
            name,
            f"{min(each.cosines):.4f}",
            f"{np.mean(each.cosines):.4f}",
            f"{np.mean(each.divergences):.1e}",
            f"{max(each.divergences):.1e}",
            f"{np.mean(each.same):.3f}",
        ]
        for name, each in found.items()
    ]
    titles = ["difference", "smallest cosine", "mean", "mean KL, nats", "largest", "same likeliest token"]
    print(table(titles, lines, left={"difference"}))


if __name__ == "__main__":
    run_command(main)
