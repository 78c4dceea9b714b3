"""How much memory and disk do models need, and how long does it take to start or export one.

Read `start.py` first: a process from its start to its first token.
"""
