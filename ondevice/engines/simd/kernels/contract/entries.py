"""The kernels that Python calls: their declarations. The kernels themselves are in modules that need numba."""

from __future__ import annotations

from typing import Any

from ondevice.arrays import Float32Array, Float64Array, Int64Array
from ondevice.native.functions import entry

_HERE = "ondevice.engines.simd.kernels"

LINE = 64
"""Bytes of a cache line."""
ARRIVALS, SLEEPERS, THREADS = 0, 1, 2
"""Lines of the counters of `run`, a cache line each: 0, arrivals at the barrier; 1, threads that sleep there; from 2
on, one for each thread."""
RUN_TICKS, WAIT_TICKS, SPINS, CLAIMS = 0, 1, 2, 3
"""Places in a thread's line, in int64: 0 and 1, the ticks that it ran and the ticks that it waited, summed over all
runs; 2, how often it reads the arrivals before it sleeps; 3 and 4, counters of claimed work, zeros before a run, whose
steps use them in turn, so that one can be reset while the other is in use."""


@entry("forward", "i64[,] i64[] i64[,] i64[] i64 i64 i64 i64 i64", f"{_HERE}.forward")
def run(
    plan: Int64Array, state: Int64Array, draft_plan: Int64Array, draft_state: Int64Array,
    thread: int, threads: int, counters: int, before: int, scratch: int,
) -> Any:  # fmt: skip
    """Run one thread's share of every step of a plan, once or several times; returns the number of arrivals at the
    barrier then.
    """


@entry("forward", "i64 i64", f"{_HERE}.isa.memory")
def spin_for_next(counter: int, beyond: int) -> None:
    """Spin, 0.5 ms at most, until there are more than `beyond` arrivals at the barrier."""


@entry("packing", "i64 i64 i64 i64 i64", f"{_HERE}.formats")
def pack_tile(bits: int, codes: int, rows: int, blocks: int, out: int) -> None:
    """Pack up to 16 rows of weights."""


@entry("packing", "i64 f64 i64 i64", f"{_HERE}.formats")
def pack_epilogue(factors: int, step: float, rows: int, out: int) -> None:
    """Write the epilogue of a tile."""


@entry("packing", "i64 i64 i64 i64 i64 i64", f"{_HERE}.formats")
def pack_scales(scales: int, rows: int, blocks: int, out: int, stride: int, scratch: int) -> None:
    """Write the scales or minimums of a tile, as fp16[blocks, 16]."""


@entry("forward", "i64 i64 i64 i64[] i64 i64 i64", f"{_HERE}.attention.query_key_value")
def move_rows(bits: int, keys: int, values: int, source: Int64Array, first: int, kv_heads: int, head_dim: int) -> None:
    """Copy row `source[i]` of a layer's cache, of 16 or 8 bits, to row `first + i`."""


@entry("forward", "f32[,,] f32[,,,] i64 i64 i64", f"{_HERE}.attention.key_codes")
def encode(keys: Float32Array, codebooks: Float32Array, first: int, out: int, stride: int) -> None:
    """Write the 4-bit codes of keys with positions from `first` on."""


@entry("forward", "f32[,] f32[,,] i64 f64[,] i64[]", f"{_HERE}.attention.key_codes")
def learn(keys: Float32Array, codebook: Float32Array, steps: int, sums: Float64Array, members: Int64Array) -> None:
    """Learn the codebook of a KV head from keys."""


@entry("export", "i64 i64 f32[,]", f"{_HERE}.activations")
def read_groups(activations: int, blocks: int, out: Float32Array) -> None:
    """Write the numbers that rows of activations in the form GROUPS stand for to float32[rows, 32 * blocks]."""


@entry("export", "i64 i64 i64 i64 i64", f"{_HERE}.rows")
def subtract_product(out: int, left: int, right: int, stride: int, rows: int) -> None:
    """out[rows, 32] -= left[rows, 32] @ right[32, 32], all float32, with `stride` bytes from row to row."""


CHAINS, VECTORS = 12, 8
"""Number of independent sums of `dots`, more than any CPU has dot products in flight; and of vectors of weights whose
products are added to each in a turn, as many as a block has."""


@entry("roofline", "i64 i64 i64 i64 i64", f"{_HERE}.roofline")
def read(data: int, size: int, far: int, near: int, out: int) -> None:
    """Read `size` bytes of memory."""


@entry("roofline", "i64 i64", f"{_HERE}.roofline")
def dots(count: int, out: int) -> None:
    """Compute `count` times VECTORS dot products in each of CHAINS sums."""
