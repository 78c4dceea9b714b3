"""`ondevice bench`: decoding speed of every drafter and draft length, compared with plain decoding.

Read `command.py` first: the options and two modes. By default `measure.py` runs each prompt in each configuration and
sums up `Row`s, which `tables.py` prints or draws. With `--scenarios`, `scenarios.py` runs the texts of `prompts/`
several times on one or more backends into `ScenarioRow`s, which `scenario_report.py` prints or draws.
"""
