"""Reads ONNX files for both engines, without the onnx package: protobuf, then nodes and tensors."""
