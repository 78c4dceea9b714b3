"""How long does it take: forwards, sequences, contexts, choosing tokens, grammars, pictures, other boards.

Read `rows.py` first: a forward by its number of rows, for which everything else was built.
"""
