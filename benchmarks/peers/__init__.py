"""Other engines, on the same shapes or files: llama.cpp by its programs or the package xllamacpp, and OpenVINO.

Read `llama_programs.py` first. Nothing here is a benchmark: the other folders measure these engines in turn with ours.
"""
