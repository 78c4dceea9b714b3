"""Numba kernels on raw addresses. Whoever calls them has checked every size: see `ondevice.engines.simd.plan`."""
