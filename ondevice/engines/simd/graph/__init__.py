"""From ONNX files to typed layers: protobuf, tensors, and the matching of what the exporter emits."""
