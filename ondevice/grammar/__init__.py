"""Structured output: grammars that constrain a reply, through llguidance (the extra `[grammar]`).

In: `response_format` and `tool_choice` of a request, the tools' schemas, and the tokenizer. Out: the loop's
`Constraint` (allowed tokens after a path, and forced ones), which knows token ids only.

Read `reply_grammar.py` first: it writes the grammar of a whole reply. `response_format.py` checks the caller's options
and `limits.py` what a grammar may cost, `complaints.py` asks llguidance about a grammar or a pattern, `call_forms.py`
writes the grammars of tool calls, with `call_rules.py` those that are no JSON (`gemma_calls.py`, `python_calls.py`,
`tagged_calls.py`), `vocabulary.py` gives llguidance the model's tokens, `matcher.py` compiles a grammar and follows it
token by token.
"""
