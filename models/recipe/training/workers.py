"""Training on several CPU cores as several one-thread processes.

Threads of one process synchronise at every operator, so one busy core slows all of them to a third (measured on 2
cores); processes synchronise once per step.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

PATIENCE = timedelta(days=30)  # a run may be stopped (SIGSTOP) for a long time
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": str(4 * 10**9)}
"""For glibc, bytes: memory that a forward frees is kept for the next one. Otherwise every forward requests its
megabytes from the system again: of a forward and backward of 2,048 tokens, 0.09 of 0.51 s on a core of an EPYC, and
40,000 page faults.
"""


def launch(work: Callable[..., None], count: int, store_file: Path, *arguments: object) -> None:
    """Run `work(*arguments)` in `count` processes that share gradients through a file at `store_file`."""
    if count == 1:
        work(*arguments)
        return
    store_file.unlink(missing_ok=True)
    os.environ.update(KEPT_MEMORY)
    spawn(enter, (count, store_file, work, arguments), nprocs=count)


def enter(rank: int, count: int, store_file: Path, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """The main function of one process."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(store_file), count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
    work(*arguments)
    dist.destroy_process_group()


def rank() -> int:
    """The process's number; 0 writes files and draws the progress bar."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def orphaned() -> bool:
    """Whether the process that started this one was killed, and this one should end."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def share(model: nn.Module) -> None:
    """Sum the gradients of all processes."""
    if count() == 1:
        return
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total)
    for gradient, summed in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def total(value: float) -> float:
    """The sum of `value` over all processes."""
    if count() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()
