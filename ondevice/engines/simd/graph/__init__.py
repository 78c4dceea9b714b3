"""Reads a bundle's ONNX graphs: protobuf, nodes and tensors, then layers, as `model` describes them."""
