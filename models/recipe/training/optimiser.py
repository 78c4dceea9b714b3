"""Muon for the matrices inside the layers, AdamW for tables and norms."""

import torch
from torch import nn

from training.muon import Muon

MATRIX_RATE, OTHER_RATE = 5e-3, 3e-3  # peak learning rates


def optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimisers of a target or drafter."""
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        group = norms if weight.ndim < 2 else tables if "embed" in name else matrices
        group.append(weight)
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}],
        lr=OTHER_RATE,
        betas=(0.9, 0.95),
        fused=True,
    )
    return [Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, momentum=0.95), adam]


def apply(stack: list[torch.optim.Optimizer], factor: float) -> None:
    """One update at `factor` times the peak rates; clears the gradients."""
    for optimiser, peak in zip(stack, (MATRIX_RATE, OTHER_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = peak * factor
        optimiser.step()
        optimiser.zero_grad()
