"""Kernels on raw addresses, compiled by numba before they run, for x86-64 (AVX2 to AVX-512 VNNI) and ARM NEON.

In: a plan int64[steps, WIDTH] and a forward's slots, both full of addresses. Out: what the steps write to memory.
Kernels check nothing: `ondevice.engines.simd.plan` makes every address from arrays whose shapes were checked. But
weights and caches may hold any numbers: an index that follows from a comparison of numbers, such as the largest of some
lanes, is within its range whatever they are, and NaN and infinity stay what they are where numbers are quantised. Each
output element is summed in one fixed order, whatever the number of rows, the thread or the instruction set.

    entries.py  the functions that Python calls; `ondevice.native` builds, loads and calls them
    forward.py  runs all steps of a plan, with a barrier after each: read this first
    steps/      the layout of every kind of step, what changes between forwards (`slots`), and steps on rows and
                matrices
    matmul/     products of quantised matrices with int8 activations
    attention/  exact attention over fp16 and int8 caches, lookup attention, and the steps that run them
    isa/        16 float32 lanes, 8-bit dot products, loads, stores and barriers: one meaning on every instruction set

To understand one matrix product: `matmul/project`, `matmul/tiles`, `matmul/formats`, `matmul/activations`, `isa/dot`.

Words: a *row* is one new token of a forward. A *block* is 32 neighbouring numbers of a row, or of a row of weights. A
*tile* is 16 output rows of a matrix. A *unit* is the piece of a step's work that a thread claims. Addresses are int64,
in bytes; strides are in bytes; `float32[a, b]` at an address is contiguous, the last index fastest.
"""
