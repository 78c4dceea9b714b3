"""Checkpoints whose weights are quantised already: their codes, scales and zeros, read as one tensor `X.weight`.

Read `methods` first: by `quant_method` it joins the tensors of a matrix to one entry.

    methods         which `quant_method` is read by which module
    grouped         integers with a scale, and perhaps a zero, for each group: what the next two have in common
    compressed      compressed-tensors, format pack-quantized: codes packed along the rows
    columns         gptq (AutoGPTQ, GPTQModel) and awq (AutoAWQ): matrices stored by columns
    mxfp4           blocks of 32 codes of the type E2M1, as gpt-oss has its experts
    gemma           Gemma's checkpoints that were trained quantised: bits by module; `gemma_modules` reads the codes
"""
