"""Muon with one product for all matrices of a shape.

The update is that of `torch.optim.Muon` (nesterov, `adjust_lr_fn="match_rms_adamw"`), and so is the state.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from training.precision import PRODUCTS

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic whose iteration drives singular values to one
ITERATIONS = 5
RMS = 0.2  # of an update's entries, as AdamW's have it


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised matrices, for weights with two axes."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of all weights that have a gradient."""
        for group in self.param_groups:
            shapes = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[tuple(weight.shape)].append(weight)
            for (rows, columns), weights in shapes.items():
                directions = [self.direction(weight, weight.grad, group["momentum"]) for weight in weights]
                updates = orthogonal(torch.stack(directions))
                rate = group["lr"] * RMS * max(rows, columns) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def direction(self, weight: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum of a weight."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).to(PRODUCTS)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [N, rows, columns] with singular values near one, by Newton and Schulz's iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
