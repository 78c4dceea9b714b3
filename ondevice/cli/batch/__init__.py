"""`ondevice batch`: answer a file of prompts, several at once; run again, it continues where the answers end.

A line of the prompts file becomes a `Request` (`requests.py`), a model answers it with an `Answer` (`answers.py`), and
`AnswerFile` appends that as a line of JSON. `workers.py` answers several requests at once, on one model in this process
or on a Ray cluster with a model per machine. Imports go from `command.py` to these, and never back.

Read `command.py` first. A request that cannot be answered gets a line with an error, and the exit code is 1.
"""
