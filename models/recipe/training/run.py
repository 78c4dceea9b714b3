"""A resumable training run: weights, optimisers and the spent budget, saved every two minutes of computing."""

import json
import os
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from training import workers
from training.optimiser import apply, optimisers
from training.schedule import Budget

SAVE_SECONDS = 120  # of CPU time
LOG_STEPS = 20


def hardware(device: torch.device) -> str:
    """The hardware of a run, for its card."""
    if device.type == "cuda":
        return f"a process with one {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores"


def spent_budget(file: Path, tokens: int) -> Budget:
    """The budget of the run saved in `file`: `tokens`, or less if it was ordered to finish early."""
    if not file.exists():
        return Budget(tokens)
    saved = Budget(**torch.load(file, map_location="cpu", weights_only=True)["budget"])
    if not saved.finishing:
        saved.tokens = tokens
    return saved


def other_options(file: Path, options: dict[str, Any]) -> str:
    """The options of which `file` keeps other values, in words for a message; empty if none or no file.

    options : values of JSON by the names of a command's options
    """
    known = json.loads(file.read_text()) if file.exists() else options
    differing = [name for name, value in options.items() if known[name] != value]
    return ", ".join(f"--{name} {_shown(known[name])}, not {_shown(options[name])}" for name in differing)


def keep_options(work: Path, options: dict[str, Any]) -> None:
    """Keep the options with which the files in a directory are made.

    Raises:
        SystemExit: they were made with others.
    """
    file = work / "options.json"
    if others := other_options(file, options):
        raise SystemExit(f"{work} was begun with {others}: name another --work")
    file.write_text(json.dumps(options))


def _shown(value: Any) -> str:
    return "default" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


class Run(ABC):
    """The training loop of target and drafter; a subclass defines one step.

    A file with the ending `.finish` next to the saved state starts the decay: see `Budget.finish`.
    """

    step_tokens: int  # tokens of one update
    peak = 1.0  # of the optimisers' learning rates

    def __init__(self, model: nn.Module, file: Path, budget: Budget) -> None:
        self.model: Any = model
        self.file = file
        self.budget = budget
        self.optimisers = optimisers(model)
        self.step = 0
        self.losses: list[float] = []
        if file.exists():
            self.load()

    @property
    def rate(self) -> float:
        """Factor on the peak learning rates."""
        return self.budget.rate

    @abstractmethod
    def accumulate(self) -> float:
        """Add this process's share of one step's gradients; returns its share of the mean loss."""

    def train(self) -> None:
        """Train until the budget is spent, or the process that started this one was killed."""
        self.model.train()
        bar = tqdm(total=100, desc=self.file.stem, disable=None if workers.rank() == 0 else True)
        clock = time.process_time()
        saved = self.budget.core_seconds
        while self.budget.progress < 1 and not workers.total(workers.orphaned()):
            self.losses.append(self.update())
            now = time.process_time()
            self.budget.spend(self.step_tokens, workers.total(now - clock))
            clock = now
            bar.n = round(100 * self.budget.progress, 2)
            bar.set_postfix(tokens=f"{self.budget.spent_tokens / 1e6:.2f}M", loss=f"{np.mean(self.losses[-20:]):.3f}")
            if self.step % LOG_STEPS == 0 and workers.rank() == 0:
                self.log()
            if self.budget.core_seconds - saved > SAVE_SECONDS * workers.count() or self.budget.progress >= 1:
                if workers.total(self.file.with_suffix(".finish").exists()):
                    self.budget.finish()
                saved = self.budget.core_seconds
                if workers.rank() == 0:
                    self.save()
        bar.close()

    def update(self) -> float:
        """One optimiser step; returns its mean loss."""
        loss = workers.total(self.accumulate())
        workers.share(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        apply(self.optimisers, self.peak * self.rate)
        self.step += 1
        return loss

    def log(self) -> None:
        """Append a line to the file ending in `.log`: time of day, tokens, loss, rate, tokens per CPU second."""
        loss = np.mean(self.losses[-LOG_STEPS:])
        speed = self.budget.spent_tokens / self.budget.core_seconds
        with self.file.with_suffix(".log").open("a") as log:
            log.write(
                f"{time.strftime('%m-%d %H:%M:%S')} step {self.step} tokens {self.budget.spent_tokens} "
                f"of {self.budget.tokens} loss {loss:.4f} rate {self.rate:.3f} tokens/core-s {speed:.0f}\n"
            )

    def save(self) -> None:
        """Write the whole state; the file is replaced only when it is complete."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "losses": self.losses,
            "budget": asdict(self.budget),
        }
        temporary = self.file.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.file)

    def load(self) -> None:
        """Continue from the saved state; `spent_budget` has read the budget."""
        device = next(self.model.parameters()).device
        state = torch.load(self.file, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.losses = state["step"], state["losses"]
