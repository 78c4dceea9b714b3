"""How much do drafts bring: on real text, by acceptance, by drafter; and how much they cost.

Read `real_text.py` first: every drafter on real text, and llama.cpp's. `speculate.py` simulates the acceptance; the
others look at one kind of drafts each.
"""
