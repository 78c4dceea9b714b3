"""`ondevice bench`: decoding speed of every drafter and draft length, compared with plain decoding.

Read `command.py` first: the options and two modes, one set of prompts, or `--scenarios` with the texts of `prompts/`.
`measure.py` runs them in every variant into one `Row` each, which `tables.py` prints and draws, or `scenario_report.py`
for scenarios.
"""
