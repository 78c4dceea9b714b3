"""In what type training multiplies."""

import torch

PRODUCTS = (
    torch.bfloat16
    if torch.cuda.is_available() or torch.cpu.get_capabilities().get("amx_bf16", False)
    else torch.float32
)
"""Where a CPU has no AMX, bfloat16 is slower: [2048, 192] times [192, 768] on one core of a Xeon with AVX512_BF16 alone
ran at 83 GFLOP/s, in float32 at 122."""
