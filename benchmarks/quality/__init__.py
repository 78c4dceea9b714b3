"""How much of a model's predictions do formats, caches, lookups and int8 towers change.

Read `formats.py` first: every format of weights on a published model, beside llama.cpp's.
"""
