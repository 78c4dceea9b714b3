"""Numba kernels on raw addresses. They check nothing: `ondevice.engines.simd.plan` has made every address and size."""
