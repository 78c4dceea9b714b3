"""Pages and pictures with results: these commands write what README, docs and the pages of results quote.

Read `pages.py` first: where the pages are, and how a measured block in them is replaced.
"""
