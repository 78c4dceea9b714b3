"""The command line, `ondevice COMMAND`: parses options, calls the public API, prints. Only this layer prints.

Read `main.py` first: the table of commands, and the exit codes: 0; 1 a check failed or a batch has errors; 2 a mistake,
which one line on stderr explains; 130 Ctrl-C; 141 broken pipe. Modules with `add_arguments(parser)` and `run(args)`:
`generate.py`, `chat.py`, `run.py`, `serve.py`, `check.py` (with `quality.py`), `tune.py`, `info.py`, `completion.py`;
`bundles.py` has pull, list, remove and prepare; `batch/` answers a file of prompts, `bench/` measures; export is
`ondevice_export.command`.

Shared: `options.py` (model, sampling and drafting options), `prompts.py` (prompts from arguments, stdin and files;
pictures and sounds), `origins.py` (what bundles were made of), `terminal/` (colours and aligned text, bars and Ctrl-C,
a reply while it is generated).
"""
