"""Measurements of ondevice, each a command that prints a Markdown table; `python -m benchmarks` lists them.

The tables are in RESULTS.md and results/, each below the command that printed it. Folders: `speed`, `drafts`, `memory`
and `quality` answer questions; `bundles` writes the models that they run, `peers` runs other engines, and `publish`
puts results into pages and pictures. Read `speed/rows.py` first: the other measurements follow its form.
"""
