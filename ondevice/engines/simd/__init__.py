"""The `simd` engine: a bundle's graphs compiled to a flat plan that numba kernels run, bit for bit the same on every CPU.

From the file to the arithmetic: `onnx_file` reads the graph, `graph` recognises what the exporter emits, `pack` lays
the weights out for the kernels, `plan` lists the steps of a forward, `kernels` runs them.
"""
