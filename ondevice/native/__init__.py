"""The kernel library: all compiled functions as one module of C functions, called with ctypes.

In: functions that are marked as kernels and entries, here and in other packages. Out: machine code, shipped for a
platform or built once on this machine. numba is the compiler; where nothing is built, nothing imports it. Read
`functions` first.

    features    the features of this CPU; `sets` the instruction sets, platforms and parts that libraries are built for
    library     the files of libraries: finds the one for this machine, checks it, and loads it
    building    builds parts on this machine, in processes that run `builder`; frozen applications
    functions   `kernel` and `entry`, the decorators; an entry calls its C function
    builder     compiles the library for a set; `linking` makes one block of memory of it
    code_block  loads such a block at any address
    shipping    builds the shared libraries of a platform for its wheel
"""
