"""Attention in NoMAD-Attention's own setting: 32 layers of 32 heads with keys of their own, 128 numbers each, one row.

    python -m benchmarks.attention [--keys 2048 4096 8192 16384] [--rounds 5]

Milliseconds of the products of a query with all keys, and of whole attention, on one thread: in float32 over keys of
fp16, with dot products of int8, and with lookups of 4-bit codes of 1, 2 or 4 numbers. Two layers are measured and the
time is multiplied. Child processes repeat this with newer instructions switched off. `lookup` attends exactly to the
keys that the codes choose, at least 1,024, and to the newest 512; `nomad` takes its scores from tables only, as in the
paper.

The paper (Zhang et al., NeurIPS 2024) reports 8.3 times as fast products and twice the tokens per second at 16k keys,
on AVX2, compared with float32 over fp16 keys, for CodeLlama-7B.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice import machine
from ondevice.cli.bench.tables import PACKAGES, table, versions, versions_line
from ondevice.engines.protocol import KVCacheType, TokenTree
from ondevice.engines.simd.buffers import AttentionScratch, LookupScratch
from ondevice.engines.simd.caches import BITS, unit_type
from ondevice.engines.simd.forward_state import ForwardState, SequenceRecord
from ondevice.engines.simd.kernels import contract
from ondevice.engines.simd.kernels.activations import ROW_BYTES
from ondevice.engines.simd.kernels.attention.chosen import attend_chosen_share, attend_looked_up_share
from ondevice.engines.simd.kernels.attention.exact import attend_share
from ondevice.engines.simd.kernels.attention.float_cache import lay_queries, score
from ondevice.engines.simd.kernels.attention.integer_cache import quantize_queries, score_keys
from ondevice.engines.simd.kernels.attention.key_codes import SHUFFLE, SUMS, Codebook
from ondevice.engines.simd.kernels.attention.lookup import Tables, look_up, look_up_share, make_tables, workspace_at
from ondevice.engines.simd.kernels.attention.query_key_value import part_bytes
from ondevice.engines.simd.kernels.attention.scratch import scratch_at
from ondevice.engines.simd.kernels.contract import (
    LANES,
    SPAN,
    UNIT,
    WIDTH,
    Attend,
    KernelStep,
    LookUp,
    Scratch,
    ThreadWorkspace,
    instruction_set,
    to_row,
)
from ondevice.engines.simd.kernels.isa.memory import write_i64
from ondevice.native.functions import kernel

HEADS, SIZE, LAYERS, MEASURED = 32, 128, 32, 2
WIDTHS = (1, 2, 4)
CHOSEN, WINDOW = 1024, 512
MAX_SECONDS = 2
"""A measurement that takes longer is not repeated: without FMA instructions, float takes half a minute."""
SETS = ("avx2", "generic")
"""Instruction sets of child processes, besides that of this machine."""

_ONE = np.int64(1)


@kernel
def float_products(query: int, keys: int, count: int, out: int, scratch: Scratch) -> None:
    """Products of float32[HEADS, SIZE] with `count` fp16 keys in units."""
    part = part_bytes(16, SIZE)
    for head in range(HEADS):
        write_i64(scratch.table + 24, np.int64(query + 4 * head * SIZE))
        lay_queries(scratch, 1, SIZE)
        score(scratch.queries, _ONE, SIZE, keys + head * part, count // UNIT, HEADS * part, out, 4 * count)


@kernel
def integer_products(query: int, keys: int, count: int, out: int, scratch: Scratch) -> None:
    """Products of float32[HEADS, SIZE], quantised here, with `count` int8 keys in units."""
    part = part_bytes(8, SIZE)
    for head in range(HEADS):
        write_i64(scratch.table + 24, np.int64(query + 4 * head * SIZE))
        quantize_queries(scratch, 1, SIZE)
        score_keys(scratch, 0, 1, SIZE, keys + head * part, count // 16, HEADS * part, out, 4 * count)


@kernel
def looked_up_products(  # noqa: PLR0917 - numba has no keyword-only arguments
    query: int, codes: int, books: int, width: int, count: int, work: ThreadWorkspace
) -> None:
    """Products of float32[HEADS, SIZE], whose tables are made here, with the codes of `count` keys."""
    number = SIZE // width
    for head in range(HEADS):
        tables = Tables(work.tables, work.scales, 1, number)
        head_book = Codebook(books + 64 * head * number * (width + 1), number, width)
        make_tables(query + 4 * head * SIZE, head_book, work.products, tables)
        for span in range(count // SPAN):
            at = codes + (span * HEADS + head) * SPAN * number // 2
            for vector in range(0, UNIT, SUMS):
                look_up(1, at + vector * LANES * number // 2, LANES * number // 2, tables, 0, work.sums)


class Layer:
    """Keys, values and codes of random numbers, and the steps that attend to them."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.count = count
        self._held: list[object] = []
        self.query = rng.standard_normal((HEADS, SIZE)).astype(np.float32) * np.float32(0.2)
        self.scratch, self.out = AttentionScratch(SIZE, HEADS, 1), np.zeros((HEADS, count), np.float32)
        self.activations = np.zeros(HEADS * SIZE // 32 * ROW_BYTES, np.uint8)
        self.parts: dict[KVCacheType, NDArray[Any]] = {
            "fp16": np.zeros((2, count // UNIT), unit_type("fp16", HEADS, SIZE)),
            "int8": np.zeros((2, count // UNIT), unit_type("int8", HEADS, SIZE)),
        }
        self.parts["fp16"][:] = rng.standard_normal((2, 1, HEADS, UNIT * SIZE)).astype(np.float16)
        self.parts["int8"][:] = rng.integers(0, 256, (2, 1, HEADS, UNIT * (SIZE + 4)), np.uint8)
        keys, values = self.parts["int8"]
        keys.reshape(len(keys), HEADS, 2, -1)[..., UNIT // 2 * SIZE :].view(np.float32)[...] = 0.001
        values[..., UNIT * SIZE :].view(np.float32)[...] = 0.01
        spans = count // SPAN
        self.codes = {
            width: rng.integers(0, 256, (spans, HEADS, SPAN, SIZE // width // 2), np.uint8) for width in WIDTHS
        }
        self.books = {
            width: rng.standard_normal((HEADS, SIZE // width, width + 1, 16)).astype(np.float32) for width in WIDTHS
        }
        self.chosen = np.zeros(HEADS * (1 + CHOSEN // UNIT), np.int64)
        self.lookup = self.scratch.lookup = LookupScratch(1, SIZE, 1)

    def products(self) -> dict[str, Callable[[], object]]:
        """The functions that multiply the query with all keys, by name."""
        query, out, count = self.query.ctypes.data, self.out.ctypes.data, self.count
        fp16, int8 = (self.parts[kind][0].ctypes.data for kind in ("fp16", "int8"))
        scratch = scratch_at(self.scratch.address, SIZE)
        work = workspace_at(self.lookup.work, 1, SIZE)
        found: dict[str, Callable[[], object]] = {
            "float": lambda: float_products(query, fp16, count, out, scratch),
            "int8": lambda: integer_products(query, int8, count, out, scratch),
        }
        for width in WIDTHS:
            codes, book = self.codes[width].ctypes.data, self.books[width].ctypes.data
            found[f"nomad, width {width}"] = partial(looked_up_products, query, codes, book, width, count, work)
        return found

    def whole(self) -> dict[str, Callable[[], object]]:
        """The functions of the whole attention, by name."""
        x = (contract.ALL, self.query.ctypes.data, self.query.nbytes, HEADS, HEADS, SIZE)
        attend = Attend(*x, kind=0, cache=0, activations=self.activations.ctypes.data, form=8)
        chosen = self.chosen.ctypes.data
        found: dict[str, Callable[[], object]] = {
            "float": self._steps("fp16", None, (attend_share, attend, True)),
            "int8": self._steps("int8", None, (attend_share, attend, True)),
        }
        for width in WIDTHS:
            looks = LookUp(*x, 2, width, WINDOW, 0, CHOSEN // UNIT, CHOSEN // UNIT, 0, chosen)
            to_chosen = attend._replace(window=WINDOW, chosen=chosen, most=CHOSEN // UNIT)
            by_tables = attend._replace(window=WINDOW, codes=2, width=width)
            steps = (look_up_share, looks, True), (attend_chosen_share, to_chosen, False)
            found[f"nomad, width {width}"] = self._steps("int8", width, (attend_looked_up_share, by_tables, False))
            found[f"lookup, width {width}"] = self._steps("int8", width, *steps)
        return found

    def _steps(
        self, kind: KVCacheType, width: int | None, *steps: tuple[Any, KernelStep, bool]
    ) -> Callable[[], object]:
        """Run steps over a cache of this kind: (kernel, fields, whether it takes the number of threads) of each."""
        state, record = ForwardState(1, [], BITS[kind]), SequenceRecord({0: 0})
        record.set_rows(TokenTree.chain([0]), self.count - 1)
        record.set_place(contract.ALL, 0, 1)
        record.most_keys = self.count
        arrays = [*self.parts[kind]] if width is None else [*self.parts[kind], self.codes[width], self.books[width]]
        for offset, array in enumerate(arrays):
            record.point(contract.CACHES + offset, array)
        position = np.array([self.count - 1])
        state.set_rows(np.zeros(1, np.int64), position, position + 1, np.zeros(1, np.int64))
        state.set_sequences([record], self.scratch)
        calls, claims = [], np.zeros(1, np.int64)
        for run, step, shares in steps:
            words, row = np.zeros(WIDTH, np.int64), to_row(step)
            words[: len(row)] = row
            calls.append((run, (words, state.slots, 0, 1) if shares else (words, state.slots, 0)))

        self._held += [state, record]  # kernels have addresses of their arrays

        def attend() -> None:
            for run, arguments in calls:
                claims[0] = 0
                run(*arguments, claims.ctypes.data)

        return attend


def measure(counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of 32 layers, [products, whole] by keys and then by name."""
    found: dict[str, Any] = {"set": f"{instruction_set().name}, {SHUFFLE or 'no byte shuffle'}"}
    for count in counts:
        rng = np.random.default_rng(0)
        layers = [Layer(count, rng) for _ in range(MEASURED)]
        taken: dict[str, list[dict[str, Any]]] = {"products": [], "whole": []}
        for layer in layers:
            taken["products"].append(layer.products())
            taken["whole"].append(layer.whole())
        found[str(count)] = {
            part: {name: _median([calls[name] for calls in of_layers], rounds) for name in of_layers[0]}
            for part, of_layers in taken.items()
        }
    return found


def _median(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """Median milliseconds of LAYERS layers; these functions run alternately."""
    seconds: list[float] = []
    for turn in range(rounds + 1):
        if sum(seconds) > MAX_SECONDS:
            break
        started = time.perf_counter()
        for call in calls:
            call()
        if turn:
            seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds) * LAYERS / len(calls)


def report(found: dict[str, Any], counts: Sequence[int]) -> str:
    """Markdown: milliseconds, and how many times as fast as float."""
    titles = ["keys", "attention", "products ms", "of float", "whole ms", "of float"]
    lines = []
    for count in map(str, counts):
        products, whole = found[count]["products"], found[count]["whole"]
        for name in whole:
            own = [f"{products[name]:.1f}", f"{products['float'] / products[name]:.1f}x"] if name in products else []
            own = own or ["", ""]
            lines.append([count, name, *own, f"{whole[name]:.1f}", f"{whole['float'] / whole[name]:.1f}x"])
    return f"{found['set']}:\n\n" + table(titles, lines, left={"attention"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="multiples of 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="measure this process's instructions alone, as JSON")
    arguments = parser.parse_args()
    if any(count % SPAN for count in arguments.keys):
        parser.error(f"--keys must be multiples of {SPAN}")
    if arguments.json:
        print(json.dumps(measure(arguments.keys, arguments.rounds)))
        return
    print(report(measure(arguments.keys, arguments.rounds), arguments.keys), flush=True)
    for name in SETS if platform.machine() in ("x86_64", "AMD64") else ():
        command = [sys.executable, "-m", "benchmarks.attention", "--json", "--rounds", str(arguments.rounds)]
        command += ["--keys", *map(str, arguments.keys)]
        environment = {**os.environ, "ONDEVICE_KERNELS": name}
        answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(f"\n{report(json.loads(answer), arguments.keys)}", flush=True)
    print(f"\n{machine.processor_name()}, 1 thread; {versions_line({'versions': versions(PACKAGES)})}")


if __name__ == "__main__":
    main()
