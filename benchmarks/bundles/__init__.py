"""Models to measure where the published weights cannot be had: random bundles of their shapes, and wide ones with text.

Read `shape.py` first: it writes a random bundle of any Gemma 4 from the shapes in `gemma4.py` and the checkpoints in
`random_checkpoints.py`. `widened.py` writes one of E2B's cost that says real text, `gguf_files.py` the same for
llama.cpp.
"""
