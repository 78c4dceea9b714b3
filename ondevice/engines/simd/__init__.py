"""The `simd` engine: runs a bundle's models as flat plans that kernels run, with the same bits on every CPU.

In: a bundle, then rows of token ids. Out: logits and hidden states. Read `engine` first, for kernels `kernels/`.

    engine          SimdEngine and SimdSession
    program         a bundle made ready: layers from configuration and tensor table (`model`, `tensor_files`), weights
                    packed (`pack_layout`, `pack_file`, `pack_cache`), plans made (`plan/`)
    target_forward  runs a forward's rows through the target, in one pass or two
    layer_inputs    runs a text layer by layer, for calibrated exports
    forward_state   the arrays in which kernels read a forward's rows and a sequence's caches
    threads         the thread pool that runs plans; how many threads take part is learnt
    kernels/        the kernels, and the layouts of what they read and write
    buffers, caches memory for plans, outputs and attention; cache formats and the key index of lookup attention
    roofline        measures this machine's memory bandwidth and peak of 8-bit arithmetic
"""
