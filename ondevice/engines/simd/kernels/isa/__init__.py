"""The operations that all kernels are written with, each with one meaning on every instruction set.

`vector` has 16 float32 lanes, `dot` dot products of four 8-bit numbers per 32-bit lane, `shuffle` look-ups of bytes in
tables, `memory` scalars, prefetches, barriers and shares of work. `jit` has the decorator of functions that emit LLVM
code, and reads a step of a plan. The instruction sets are listed in `contract.instruction_sets`. Read `vector` first.
"""
