"""The format of a bundle, shared by the exporter, which writes it, and the engines, which read it.

In: `bundle.json` and the sizes of a bundle's files. Out: dataclasses of which every field was checked. Read `manifest`
first: all of `bundle.json`.

    model_config   the configuration of target, drafter and heads
    decoder        the layers of target and drafter: blocks, dimensions, rotary embeddings, sharing
    vision, audio  the towers: configuration, tensors
    tensor_table   name, shape, format and place of every tensor, checked against the configuration
    weight_format  bits, block length and bytes of quantised matrices
    graph_io       names and meaning of the inputs and outputs of the ONNX graphs
    interfaces     their types and shapes, as they follow from the configuration
    checks         the errors of fields that are out of range
"""
