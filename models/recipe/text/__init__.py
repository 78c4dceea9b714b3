"""The texts of the recipe: source files, conversations and prompts made from them, the tokenizer, and token blocks.

Read `corpus` first, then `dataset`. `prompts` is for targets that write the replies themselves.
"""
