"""`ondevice bench`: the tests of llama-bench, and drafters on text, compared with plain decoding.

Read `command.py` first: the options, and the tests, which `speed.py` runs (with `energy.py`) and `speed_report.py`
prints. Three options choose another measurement: `--mtp-bench` nine prompts (`mtp_list.py`), `--drafts` one set of
prompts and `--scenarios` the texts of `prompts/` (`drafters.py`). `measure.py` runs prompts in every variant into one
`Row` each, which `tables.py` prints and draws, or `scenario_report.py` for scenarios.
"""
