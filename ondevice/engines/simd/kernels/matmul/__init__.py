"""Matrix products out = activations @ weights.T, about 80 % of a forward's time.

In: weights of 2, 4 or 8 bits (or bfloat16, float32) packed in tiles, and rows of activations, quantised to int8 block
by block. Out: float32, or activations for the next product. Read in this order:

    project      a whole matrix: a thread's share of its tiles, times all rows, up to 8 at a time
    tiles        one tile: the code emitted for 16 output rows times 1 to 8 rows, with the arithmetic of a block
    formats      the layout of weights in a tile, for each width, and how they get there
    activations  the layout of activations, how they are quantised, and the norms that come before
    sizes        the forms of activations and their bytes, for Python and kernels: imports no numba
    tables       single rows of embedding tables, which are not packed
"""
