"""The data type of training's matrix products."""

import time

import torch

REPEATS = 8


def seconds(kind: torch.dtype) -> float:
    """The fastest of some products of the target's size, [2048, 192] times [192, 768], on one thread."""
    rows, weights = torch.ones(2048, 192, dtype=kind), torch.ones(768, 192, dtype=kind)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.nn.functional.linear(rows, weights)
        times.append(time.perf_counter() - start)
    return min(times)


def products() -> torch.dtype:
    """bfloat16, unless this CPU multiplies faster in float32.

    This is measured, because the instruction sets do not tell it: of two CPUs with AVX512_BF16 and without AMX, one
    core of a Xeon ran at 83 GFLOP/s in bfloat16 and 122 in float32, one of an EPYC of Zen 5 at 407 and 62.
    """
    if torch.cuda.is_available():
        return torch.bfloat16
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = {kind: seconds(kind) for kind in (torch.bfloat16, torch.float32)}
    torch.set_num_threads(threads)
    return min(times, key=times.__getitem__)


PRODUCTS = products()
