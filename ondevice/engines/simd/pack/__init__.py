"""Weights in the layout of the kernels, and the file that keeps them between processes."""
