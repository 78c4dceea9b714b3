"""A resumable training run: weights, optimisers and what has been spent, saved every two minutes."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch
import workers
from optimiser import apply, optimisers
from schedule import Budget, warmup_stable_decay
from torch import nn
from tqdm import tqdm

SAVE_SECONDS = 120


def finished(file: Path, budget: Budget) -> bool:
    """Whether the run saved in `file` has spent all of `budget`."""
    if not file.exists():
        return False
    state = torch.load(file, map_location="cpu", weights_only=True)
    return Budget(budget.tokens, budget.minutes, **state["budget"]).progress >= 1


class Run(ABC):
    """The loop that target and drafter share; a subclass says what one step computes."""

    step_tokens: int  # tokens of one update

    def __init__(self, model: nn.Module, file: Path, budget: Budget) -> None:
        self.model = model
        self.file = file
        self.budget = budget
        self.optimisers = optimisers(model)
        self.step = 0
        self.losses: list[float] = []
        if file.exists():
            self.load()

    @abstractmethod
    def accumulate(self) -> float:
        """Add this process's share of one step's gradients; returns its share of the mean loss."""

    def train(self) -> None:
        """Train until the budget is spent."""
        self.model.train()
        self.budget.start()
        bar = tqdm(
            total=100,
            desc=self.file.stem,
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
            disable=workers.rank() > 0,
        )
        saved = self.budget.spent_seconds
        while self.budget.progress < 1:
            self.losses.append(self.update())
            self.budget.spend(self.step_tokens)
            bar.n = round(100 * self.budget.progress, 2)
            bar.set_postfix(tokens=f"{self.budget.spent_tokens / 1e6:.2f}M", loss=f"{np.mean(self.losses[-20:]):.3f}")
            due = self.budget.spent_seconds - saved > SAVE_SECONDS or self.budget.progress >= 1
            if due and workers.rank() == 0:
                self.save()
            if due:
                saved = self.budget.spent_seconds
        bar.close()

    def update(self) -> float:
        """One optimiser step; returns its mean loss."""
        loss = workers.total(self.accumulate())
        workers.share(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        apply(self.optimisers, warmup_stable_decay(self.budget.progress))
        self.step += 1
        return loss

    def save(self) -> None:
        """Write the whole state, replacing the file only when complete."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "losses": self.losses,
            "budget": self.budget.spent(),
        }
        temporary = self.file.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.file)

    def load(self) -> None:
        """Continue from the saved state; the budget's limits stay those of this run."""
        device = next(self.model.parameters()).device
        state = torch.load(self.file, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.losses = state["step"], state["losses"]
        self.budget = Budget(self.budget.tokens, self.budget.minutes, **state["budget"])
