"""How long do pictures and sounds take, how much memory do they need, and what do they cost the other generations?

    python -m benchmarks.speed.media DIRECTORY [--tokens 70 140 280 560] [--seconds 1 10 30] [--threads N] [--rounds 3]
        [--towers-only]
    python -m benchmarks.speed.media DIRECTORY --llama-mtmd-cli PROGRAM --gguf FILE --mmproj-gguf FILE

If the directory does not exist, a random bundle of E2B's shape with its tower is written there, 3.6 GB. The least time
of a picture is that of its matrix products at the machine's measured peaks: those of the layers at that of 8-bit dot
products (unless the tower is float32), attention and the rest at that of float32. Memory is resident and beyond that
before the tower was opened; the peak is that of an encoding, and some of it stays. `benchmarks.bundles.shape` writes
bundles of other sizes; `--towers-only` is for those of few layers. `--llama-mtmd-cli` only compares pictures with
llama.cpp's, in turns.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import PIL.Image
from onnx import helper, numpy_helper

from benchmarks.bundles.shape import E2B, write_bundle
from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import timed
from benchmarks.memory.watch import Memory
from benchmarks.peers.llama_programs import LlamaMtmd, add_llama_mtmd, version
from ondevice import Audio, Image, machine
from ondevice.bundle import Bundle
from ondevice.bundle_format.audio import RATE
from ondevice.bundle_format.interfaces import audio_interface, vision_interface
from ondevice.bundle_format.vision import BUDGETS, VisionEntry
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Session
from ondevice.engines.simd.engine import SimdEngine
from ondevice.engines.simd.roofline import RooflineMeasurement
from ondevice.generate import loop
from ondevice.generate.request import Limits, SamplingOptions
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.stats import Round
from ondevice.media.images import Pixels
from ondevice.media.prompt import MediaEncoder
from ondevice.media.sounds import Sound
from ondevice.media.tower import Tower
from ondevice.model import MEDIA_CACHE_BYTES

QUESTION = 16
"""Tokens of text after the picture."""


class Encoding(NamedTuple):
    """The figures of pictures of one size; memory in bytes beyond that before the tower was opened."""

    tokens: int
    seconds: float
    peak: int
    after: int


def picture(vision: VisionEntry, tokens: int, seed: int = 0) -> Pixels:
    """Random pixels with at most so many soft tokens, about as wide as 4:3."""
    height = max(1, math.isqrt(tokens * 3 // 4))
    shape = (height * vision.side, tokens // height * vision.side, 3)
    values = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    return Pixels(values, vision.patch, vision.pool)


def resident() -> int:
    memory = Memory.parse(Path("/proc/self/status").read_text("ascii", errors="replace"))
    return 0 if memory is None else memory.total


def multiplications(vision: VisionEntry, width: int, tokens: int) -> tuple[int, int]:
    """Multiplications of a picture's matrix products: those of the layers' matrices, and the others.

    Args:
        vision: the tower.
        width: numbers of a soft row.
        tokens: soft tokens of the picture.
    """
    patches, hidden = tokens * vision.pool**2, vision.hidden_size
    heads = vision.query_heads * vision.head_dim
    layers = patches * vision.layers * hidden * (4 * heads + 3 * vision.intermediate_size)
    attention = vision.layers * 2 * patches**2 * heads
    return layers, attention + patches * hidden * 3 * vision.patch**2 + tokens * hidden * width


def _tower(bundle: Bundle, vision: VisionEntry, threads: int) -> Tower:
    return Tower(bundle, vision.graph, vision_interface(vision, bundle.manifest.target), threads)


def encodings(bundle: Bundle, sizes: Sequence[int], threads: int, rounds: int) -> list[Encoding]:
    """Encode pictures of each size in a tower that is opened now."""
    vision = bundle.manifest.vision
    assert vision is not None
    tower, before, found = _tower(bundle, vision, threads), resident(), []
    for size in sizes:
        pixels, seconds, peak = picture(vision, size), [], 0
        for _ in range(rounds):
            machine.reset_peak_rss()
            seconds.append(timed(partial(tower.encode, pixels)))
            peak = max(peak, machine.peak_rss_bytes())
        found.append(Encoding(pixels.tokens, median(seconds), peak - before, resident() - before))
    return found


def sounds(bundle: Bundle, lengths: Sequence[int], threads: int, rounds: int) -> list[Encoding]:
    """Encode sounds of so many seconds, spectrograms included, in a tower that is opened now."""
    audio = bundle.manifest.audio
    assert audio is not None
    tower = Tower(bundle, audio.graph, audio_interface(audio, bundle.manifest.target), threads)
    before, found = resident(), []
    for length in lengths:
        samples = np.random.default_rng(0).normal(0, 0.1, length * RATE).astype(np.float32)
        piece, seconds, peak = Sound(Audio(samples, RATE), audio, "it").piece(0), [], 0
        for _ in range(rounds + 1):  # the first time opens the graph
            machine.reset_peak_rss()
            seconds.append(timed(partial(tower.encode, piece)))
            peak = max(peak, machine.peak_rss_bytes())
        found.append(Encoding(piece.tokens, median(seconds[1:]), peak - before, resident() - before))
    return found


def compared(
    tower: Tower, vision: VisionEntry, other: LlamaMtmd, sizes: Sequence[int], rounds: int
) -> list[tuple[int, float, float]]:
    """Soft tokens of a picture, and the seconds of a tower and of llama.cpp's: medians, in turns."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "picture.png"
        for size in sizes:
            pixels, times = picture(vision, size), []
            PIL.Image.fromarray(pixels.values).save(file)
            tower.encode(pixels)  # opens the graph
            for _ in range(rounds):
                times.append((timed(partial(tower.encode, pixels)), other.seconds(file)))
            ours, others = zip(*times, strict=True)
            found.append((pixels.tokens, median(ours), median(others)))
    return found


def float_peak(threads: int, rounds: int = 5) -> float:
    """float32 multiplications and additions per second: the fastest of ONNX Runtime's products of several sizes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    best = 0.0
    for rows, width, columns in ((512, 512, 512), (2048, 512, 2048), (2520, 768, 768)):
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal((size, width), np.float32) for size in (rows, columns))
        x_info, y_info = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
        graph = helper.make_graph([node], "product", [x_info], [y_info], [numpy_helper.from_array(w, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=11)
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        run = partial(session.run, ["y"], {"x": x})
        taken = [timed(run) for _ in range(rounds + 1)]  # the first one takes memory
        best = max(best, 2 * rows * width * columns / min(taken[1:]))
    return best


def least_seconds(bundle: Bundle, sizes: Sequence[int], threads: int) -> list[float]:
    """Seconds of the matrix products alone of pictures with so many soft tokens, at the machine's measured peaks."""
    vision = bundle.manifest.vision
    assert vision is not None
    with RooflineMeasurement(threads) as measurement:
        measurement.read()
        integers = measurement.median().peak
    floats = float_peak(threads)
    print(f"{integers / 1e9:.0f} GOPS of 8-bit dot products, {floats / 1e9:.0f} GFLOPS, {threads} threads\n")
    quantised = any(tensor.scales is not None for tensor in bundle.manifest.tensors[vision.graph].tensors.values())
    found = []
    for tokens in sizes:
        layers, others = multiplications(vision, bundle.manifest.target.hidden_size, tokens)
        found.append(2 * layers / (integers if quantised else floats) + 2 * others / floats)
    return found


class Beside(NamedTuple):
    """A picture and another generation at the same time: seconds of the picture, tokens per second of the other."""

    picture_s: float
    speed: float


def beside(bundle: Bundle, threads: int, tokens: int, rounds: int) -> dict[str, Beside]:
    """Encode a picture while nothing else runs, and while another sequence decodes on the simd engine: medians."""
    vision = bundle.manifest.vision
    assert vision is not None
    tower, pixels, engine = _tower(bundle, vision, threads), picture(vision, tokens), SimdEngine(bundle, threads)
    sampler, limits = Sampler(SamplingOptions(temperature=0.0)), Limits(engine.context_length)

    def decoding() -> Iterator[Round]:
        while True:
            generation = loop.generate(engine.open_session(), [2] * QUESTION, sampler, limits)
            yield from loop.run(generation, lambda rows: engine.forward([rows])[0])

    encode = partial(timed, partial(tower.encode, pixels))
    steps, alone, together = decoding(), list[Beside](), list[Beside]()
    encode()  # opens the graph
    for _ in range(3 * QUESTION):  # until the number of threads is learnt
        next(steps)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(QUESTION):
                next(steps)
            speed = QUESTION / (time.perf_counter() - started)
            alone.append(Beside(encode(), speed))
            started, count, encoding = time.perf_counter(), 0, pool.submit(encode)
            while not encoding.done():
                next(steps)
                count += 1
            together.append(Beside(encoding.result(), count / (time.perf_counter() - started)))
    engine.close()
    return {
        title: Beside(median(each.picture_s for each in found), median(each.speed for each in found))
        for title, found in (("each alone", alone), ("at the same time", together))
    }


def stopped_s(bundle: Bundle, threads: int, tokens: int) -> float:
    """Seconds from a cancellation in the middle of an encoding to its end."""
    vision = bundle.manifest.vision
    assert vision is not None
    tower, pixels = _tower(bundle, vision, threads), picture(vision, tokens)
    half, cancelled = timed(partial(tower.encode, pixels)) / 2, list[float]()
    timer = threading.Timer(half, lambda: cancelled.append(time.perf_counter()))
    timer.start()
    rows = tower.encode(pixels, lambda: bool(cancelled))
    ended = time.perf_counter()
    timer.join()
    return ended - cancelled[0] if rows is None else 0.0


def first_tokens(bundle: Bundle, threads: int, tokens: int) -> dict[str, float]:
    """Seconds to the first token of a reply: to text alone, to a new picture, and to one that was seen before."""
    vision = bundle.manifest.vision
    assert vision is not None
    engine, found = SimdEngine(bundle, threads), dict[str, float]()
    media = MediaEncoder(bundle, threads, MEDIA_CACHE_BYTES, engine.most_rows)
    text = [1] * QUESTION

    def read(what: str, session: Session, prompt: list[int], images: list[Image]) -> None:
        started = time.perf_counter()
        ids, soft = media.insert(prompt, images, tokens, engine.context_length)
        generation = loop.generate(session, ids, Sampler(SamplingOptions(temperature=0.0)), Limits(1), soft=soft)
        next(loop.run(generation, lambda rows: engine.forward([rows])[0]))
        found[what] = time.perf_counter() - started

    def seen(seed: int) -> list[Image]:
        return [Image(picture(vision, tokens, seed).values)]

    place = [2, vision.image_token_id]
    for seed in range(2):  # the first time opens the graph
        read("text alone", engine.open_session(), [2, *text], [])
        read("a new picture", engine.open_session(), [*place, *text], seen(seed))
    session = engine.open_session()
    read("a picture of another conversation", session, [*place, *text], seen(1))
    read("a picture earlier in the conversation", session, [*place, *text, *text], seen(1))
    engine.close()
    return found


def report_prompts(bundle: Bundle, threads: int, tokens: int, rounds: int) -> None:
    """Print what a picture means for its own generation and for another one."""
    firsts = first_tokens(bundle, threads, tokens)
    cells = [[what, f"{1e3 * seconds:.0f}"] for what, seconds in firsts.items()]
    print(
        table(
            [f"prompt with {tokens} soft tokens", "first token ms"], cells, left={f"prompt with {tokens} soft tokens"}
        )
    )
    title = f"a picture of {tokens} soft tokens, and another generation"
    cells = [
        [when, f"{1e3 * each.picture_s:.0f}", f"{each.speed:.1f}"]
        for when, each in beside(bundle, threads, tokens, rounds).items()
    ]
    print("\n" + table([title, "ms of the picture", "tokens/s of the other"], cells, left={title}))


def report_compared(bundle: Bundle, chosen: argparse.Namespace) -> None:
    """Print the times of this bundle's tower and of llama.cpp's."""
    vision = bundle.manifest.vision
    assert vision is not None
    other = LlamaMtmd(chosen.llama_mtmd_cli, chosen.gguf, chosen.mmproj_gguf, chosen.threads)
    found = compared(_tower(bundle, vision, chosen.threads), vision, other, chosen.tokens, chosen.rounds)
    cells = [
        [str(size), f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{theirs / ours:.2f}"] for size, ours, theirs in found
    ]
    print(table(["soft tokens", "ms", "llama.cpp ms", "llama.cpp / ours"], cells, left=()))
    print(f"\n{chosen.threads} threads, llama.cpp {version(chosen.llama_mtmd_cli)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", choices=BUDGETS, default=[70, 140, 280, 560])
    parser.add_argument("--seconds", type=whole(1, 30), nargs="+", default=[1, 10, 30], help="of sounds, at most 30")
    add_threads(parser)
    parser.add_argument("--rounds", type=whole(1), default=3)
    add_llama_mtmd(parser)
    parser.add_argument("--towers-only", action="store_true", help="nothing that needs the language model")
    chosen = parser.parse_args(arguments)
    if not chosen.directory.exists():
        write_bundle(E2B, chosen.directory, towers=True)
    bundle = Bundle.open(chosen.directory)
    if bundle.manifest.vision is None:
        raise SystemExit(f"{chosen.directory} has no vision tower: name a new directory for a bundle with one")
    if chosen.llama_mtmd_cli is not None:
        report_compared(bundle, chosen)
        return
    encoded = encodings(bundle, chosen.tokens, chosen.threads, chosen.rounds)
    least = least_seconds(bundle, [each.tokens for each in encoded], chosen.threads)
    lines = [
        [
            str(each.tokens),
            f"{1e3 * each.seconds:.0f}",
            f"{1e3 * alone:.0f}",
            f"{each.seconds / alone:.2f}",
            f"{each.peak / 1e6:.0f}",
            f"{each.after / 1e6:.0f}",
        ]
        for each, alone in zip(encoded, least, strict=True)
    ]
    print(table(["soft tokens", "ms", "products alone ms", "ratio", "peak MB", "MB after"], lines, left=()))
    tokens = bundle.manifest.vision.tokens if bundle.manifest.vision else 0
    tokens = tokens if tokens in chosen.tokens else chosen.tokens[-1]
    print(f"\nA cancellation ends after {1e3 * stopped_s(bundle, chosen.threads, tokens):.0f} ms.\n")
    if not chosen.towers_only:
        report_prompts(bundle, chosen.threads, tokens, chosen.rounds)
    if bundle.manifest.audio is None:
        return
    heard = sounds(bundle, chosen.seconds, chosen.threads, chosen.rounds)
    rows = [
        [
            str(length),
            str(each.tokens),
            f"{1e3 * each.seconds:.0f}",
            f"{length / each.seconds:.1f}",
            f"{each.peak / 1e6:.0f}",
            f"{each.after / 1e6:.0f}",
        ]
        for length, each in zip(chosen.seconds, heard, strict=True)
    ]
    titles = ["seconds of sound", "soft tokens", "ms", "seconds of sound per second", "peak MB", "MB after"]
    print("\n" + table(titles, rows, left=()))


if __name__ == "__main__":
    run_command(main)
