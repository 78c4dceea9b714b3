"""The ONNX graphs of target, drafter, heads and towers, built from a configuration while weights are stored.

Input: a configuration and a checkpoint's tensors. Output: a graph for ONNX Runtime, a data file and its tensor table.
`target.TargetGraph`, `drafter.DrafterGraph`, `heads.HeadsGraph`, `vision.VisionGraph` and `audio.AudioGraph` build one
graph each, and `embedders` those of towers without layers; read `target` first. `clipped_linear` is for both towers.
They share `layer` (a decoder layer), `attention` (with rotary embeddings and masks), `matrix` (linear layers and tables
of every weight format), `weights` (stores and lists tensors) and `graph_builder` (nodes and initialisers).
"""
