"""The kernels that the simd engine calls. Importing this module imports no compiler; their modules need numba."""

from __future__ import annotations

from ondevice.native.functions import Entry

_HERE = "ondevice.engines.simd.kernels"

ARRIVALS, CLAIMS, TICKS = 0, 1, 3
"""Lines of the counters of `run`, a cache line each: 0, arrivals at the barrier; 1 and 2, claims of work; from 3 on,
the ticks that each thread ran and the ticks that it waited, summed over all runs."""

run = Entry("run", f"{_HERE}.forward", "forward", "i64[,] i64[] i64 i64 i64 i64 i64")
spin_for_next = Entry("spin_for_next", f"{_HERE}.isa.memory", "forward", "i64 i64")

pack_tile = Entry("pack_tile", f"{_HERE}.matmul.formats", "packing", "i64 i64 i64 i64 i64")
pack_epilogue = Entry("pack_epilogue", f"{_HERE}.matmul.formats", "packing", "i64 f64 i64 i64")
pack_scales = Entry("pack_scales", f"{_HERE}.matmul.formats", "packing", "i64 i64 i64 i64 i64 i64")

move_keys = Entry("move_keys", f"{_HERE}.attention.integer_tile", "forward+int8", "i64 i64[] i64 i64 i64")
move_values = Entry("move_values", f"{_HERE}.attention.integer_tile", "forward+int8", "i64 i64[] i64 i64 i64")
encode = Entry("encode", f"{_HERE}.attention.key_codes", "forward+lookup", "f32[,,] f32[,,,] i64 i64 i64")
learn = Entry("learn", f"{_HERE}.attention.key_codes", "forward+lookup", "f32[,] f32[,,] i64 f64[,] i64[]")

CHAINS = 12
"""Number of independent sums: more than any CPU has dot products in flight."""

read = Entry("read", f"{_HERE}.roofline", "roofline", "i64 i64 i64")
dots = Entry("dots", f"{_HERE}.roofline", "roofline", "i64 i64")
