"""The ONNX graphs of target, drafter and heads, built from a `model_config` while their weights are stored.

Input: a configuration and a checkpoint's tensors. Output: a graph for ONNX Runtime, a data file and its tensor table.
`target.TargetGraph`, `drafter.DrafterGraph` and `heads.HeadsGraph` build one graph each; read `target` first.
They share `layer` (a decoder layer), `attention` (with rotary embeddings and masks), `matrix` (linear layers and tables
of every weight format), `weights` (stores and lists tensors) and `graph_builder` (nodes and initialisers).
"""
