"""Packs: the weights of a bundle in the layout of the kernels, kept in a file between processes."""
