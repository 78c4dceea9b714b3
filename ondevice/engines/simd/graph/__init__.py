"""Reads a bundle's ONNX graphs: from nodes and tensors to layers, as `model` describes them."""
