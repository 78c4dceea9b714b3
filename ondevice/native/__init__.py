"""The kernel library: all compiled functions as one module of C functions, called with ctypes.

In: functions that are marked as kernels and entries, here and in other packages. Out: machine code, shipped for a
platform or built once on this machine. numba is the compiler; where a library is shipped, nothing imports it. Read
`functions` first.

    functions   `kernel` and `entry`, the decorators; an entry calls its C function
    library     finds the library for this machine, checks it, and loads its functions
    features    the features of this CPU; `sets` the instruction sets and platforms that libraries are built for
    builder     compiles the library for a set
    building    runs the builder on this machine, in processes; frozen applications
    shipping    builds the shared libraries of a platform for its wheel
"""
