"""Kernels on raw addresses, compiled by numba before they run, for x86-64 (AVX2 to AVX-512 VBMI) and ARM NEON.

In: a plan int64[steps, WIDTH] and a forward's slots, both full of addresses. Out: what the steps write to memory.
Kernels check nothing: `ondevice.engines.simd.plan` makes every address from arrays whose shapes were checked. But
weights and caches may hold any numbers: an index that follows from a comparison of numbers, such as the largest of some
lanes, is within its range whatever they are, and NaN and infinity stay what they are where numbers are quantised. Each
output element is summed in one fixed order, whatever the number of rows, the thread or the instruction set.

    contract/    all that Python and kernels agree on: functions, steps, slots, sizes. The engine imports nothing else
    forward      runs all steps of a plan, with a barrier after each: read this first
    project      products of a whole matrix, 80 % of a forward's time: a thread's share of its tiles, times all rows
    tiles        one tile: the code emitted for 16 output rows times a group of rows, with the arithmetic of a block;
                 `epilogue_tiles` for weights with one scale per output row
    formats      the layout of weights in a tile, for each width, and how they get there
    activations  the layout of activations, how they are quantised, and the norms that come before
    rows         steps on whole rows, and shortlists of tokens; `tables` reads single rows of embedding tables
    experts      steps of a layer's experts
    attention/   exact attention over fp16 and int8 caches, lookup attention, and the steps that run them
    isa/         16 float32 lanes, 8-bit dot products, loads, stores and barriers, the same on every instruction set
    roofline     measures the machine's limits

Words: a *row* is one new token of a forward. A *block* is 32 neighbouring numbers of a row, or of a row of weights. A
*tile* is 16 output rows of a matrix. A *unit* is the piece of a step's work that a thread claims. Addresses are int64,
in bytes; strides are in bytes; `float32[a, b]` at an address is contiguous, the last index fastest.
"""
