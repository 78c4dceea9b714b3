"""Engines: run a bundle's target and drafter on this machine's CPU.

In: rows of token ids, each following committed tokens or another row (`protocol.Rows`). Out: logits and hidden states
of the rows that are wanted (`protocol.Outputs`). Read `protocol` first.

    protocol      Engine, Session, Rows, Outputs: all that the layers above see
    choice        opens the engine for a bundle
    layer_path    which layers a row passes, and the file of layers that drafts may skip
    sequence      what the sessions of both engines share, on `kv_cache`, `states` and `session_file`
    ort           the engine on ONNX Runtime; `graph_check` checks a graph before it is opened
    simd/         the engine on kernels of our own
"""
