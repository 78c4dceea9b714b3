"""Output of the commands on a terminal. In a pipe or a file the same text is plain, and bars are left out.

Read `style.py` first: colours, width, aligned text. `progress.py` has bars on stderr, and the signals and keys of a
command that runs; `reply_view.py` shows a reply while it is generated.
"""
