"""The `simd` engine: a bundle's graphs compiled to a flat plan that numba kernels run, bit for bit alike on every CPU.

From the file to the arithmetic: `onnx_file` reads a graph, `target_graph` and `drafter_graph` recognise what the
exporter emits, `pack` lays the weights out for the kernels, `target_plan` and `drafter_plan` list the steps of a
forward, `crew` runs them on its threads with what `kernels` holds.
"""
