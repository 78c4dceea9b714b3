"""The contract between the engine's Python code and its kernels. Both sides import it, so it imports no compiler.

    entries           the kernels that Python calls
    steps             a plan is int64[steps, WIDTH], and each row is a step, whose fields are addresses and sizes
    slots             what changes between forwards while the plan stays the same: slots, and records of sequences
    matrices          sizes of matrices and activations, and the kinds of their products
    attention_memory  sizes of attention and of lookups, and their working memory
    instruction_sets  the sets for which kernels are compiled

Read `steps` first, then `slots`.
"""
