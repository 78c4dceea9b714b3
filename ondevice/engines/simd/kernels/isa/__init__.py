"""Instruction sets: the operations that all kernels are written with, each with one meaning on every CPU.

`vector` has 16 float32 lanes, `dot` dot products of four 8-bit numbers per 32-bit lane, `memory` scalars, prefetches
and barriers. `instruction_set` chooses the instructions for this CPU; `jit` has the decorators of kernels and of what
they emit. Read `vector` first.
"""
