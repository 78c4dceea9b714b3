"""Engines: the same bundle's graphs, run by ONNX Runtime or by our own kernels."""
