"""The `simd` engine: a bundle's graphs compiled to a flat plan that numba kernels run, bit for bit alike on every CPU.

The way of a bundle: `graph` reads the ONNX files and recognises what the exporter emits, `pack` lays the weights out
for the kernels, `plan` lists the steps of a forward, `thread_pool` runs them with what `kernels` holds.
"""
