"""GGUF files as checkpoints: their weights and vocabulary, without the packages of llama.cpp or transformers.

Read `checkpoint` first: it offers what a directory of safetensors files offers.

    checkpoint      configuration and tensors by the hub's names; which blocks a bundle stores as they are
    architectures   metadata as a `config.json`; names of tensors
    file            metadata and tensors of one file, checked
    blocks          the types of tensors: codes, scales and minimums
    tokenizer       `tokenizer.json` from the vocabulary
"""
