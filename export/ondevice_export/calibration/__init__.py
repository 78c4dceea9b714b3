"""Calibrated rounding: the second moments of every matrix's inputs, and scales and codes that make use of them.

Start with `source.py`, which finds the moments: of a text that the engine `simd` runs, or in a GGUF importance matrix.
`rounding.py` rounds a matrix with them, by the kernel in `round_block.py`. `unfinished.py` keeps what was computed, so
that an export that was ended goes on.
"""
