"""Text layer: strings and messages to token ids, and token ids of a reply to text, thoughts and tool calls.

In: a prompt (text, messages or ids) and a bundle's tokenizer, chat template and response template. Out: token ids for
the loop, and `Parsed` parts of the reply while it is generated. Nothing here imports an engine or the command line.

Read `codec.py` first. A prompt passes `media_parts.py` (takes pictures and sounds out), `messages.py` (checks),
`untrusted_text.py` (marks control tokens), `chat_template.py` (renders, within the limits of `template_sandbox.py`) and
`tokenizer.py`; a reply passes `reply_stream.py` (detokeniser, stop strings) and `reply_parser.py` (thoughts and calls,
which `call_values.py` and `tagged_calls.py` read, by the types of `declared.py`).
`prompt_file.py` reads prompts from files.
"""
