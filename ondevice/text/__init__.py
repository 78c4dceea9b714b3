"""Text in and out of token ids: tokenizer, chat template, incremental detokenising, stop strings."""
