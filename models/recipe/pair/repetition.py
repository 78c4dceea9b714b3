"""Unlikelihood training: the target unlearns repetition, which greedy text of small models falls into.

Welleck et al., "Neural Text Generation with Unlikelihood Training" (2020), sequence level: of text that the target
generated, tokens that continue a repetition are made less likely; usual training continues, to keep everything else.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from text.dataset import TokenBlocks, Tokens
from torch import Tensor
from training.schedule import Budget

from pair.target import SHORT, NextTokenRun, softcapped, target_after_corpus

MAX_PERIOD = 64  # tokens
SHORTEST = 8  # tokens that must equal those one period before; always more than a period
WEIGHT = 2.0  # relative to the corpus's loss
RAW_TEXT = "raw.npy"  # the target's text before this training: uint16[N]


def circling(ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Which tokens belong to a repetition, except its first period: bool[T]; ids : int[T].

    In a repetition, a sequence of up to MAX_PERIOD tokens occurs at least twice and then a third time in part.
    """
    marked = np.zeros(len(ids), bool)
    for period in range(1, min(MAX_PERIOD, len(ids) - 1) + 1):
        same = ids[period:] == ids[:-period]
        run = np.cumsum(~same)  # a number for each run of tokens that equal those a period before
        lengths = np.bincount(run[same], minlength=run[-1] + 1)
        marked[period:] |= same & (lengths[run] > max(period, SHORTEST))
    return marked


class UnlikelihoodRun(NextTokenRun):
    """Alternates forwards over the corpus and over the target's own text.

    A short run with a falling learning rate: of 50 greedy texts of the int4 export 23 had a loop before it
    and 10 after, for 0.01 nats of held-out loss. A million tokens at a flat rate that fell in the last quarter, with a
    quarter of the weight: 16, for 0.16 nats. Four times the weight at two thirds of the rate: 18, for 0.005.
    """

    peak = 0.08

    def __init__(self, work: Path, device: torch.device, budget: Budget) -> None:
        streams: list[Tokens] = [np.load(work / "train.npy", mmap_mode="r")]
        self.own = TokenBlocks(np.load(work / RAW_TEXT), SHORT, seed=5)
        model = target_after_corpus(work).requires_grad_(True)
        file = work / "unlikelihood.pt"
        super().__init__(model, streams, file=file, device=device, budget=budget, lengths=(SHORT, SHORT), seed=7)

    @property
    def rate(self) -> float:
        """Falls linearly from the fourth step on; the rate of the last step is above zero."""
        warm = (self.budget.spent_tokens + self.step_tokens) / (4 * self.step_tokens)
        return min(1.0, warm, max(0.0, 1.02 - self.budget.progress))

    def part(self, length: int, rows: int, parts: int, part: int) -> float:
        """A forward over the corpus and one over own text; returns the first one's share of the mean loss."""
        ids, labels = (x.to(self.device) for x in self.own.batch(self.step * parts + part, rows))
        (self.unlikelihood(ids, labels, length) / parts).backward()
        return super().part(length, rows, parts, part)

    def unlikelihood(self, ids: Tensor, labels: Tensor, length: int) -> Tensor:
        """WEIGHT times the mean over all tokens of -log(1 - p) for tokens that continue a repetition, 0 for others.

        ids, labels : int64[B, T]
        """
        marked = torch.from_numpy(np.stack([circling(row) for row in labels.cpu().numpy()])).to(self.device)
        hidden = self.forward(self.model, ids, self.places[length])[marked]
        logits = softcapped(hidden @ self.model.lm_head.weight.T, self.model.config.final_logit_softcapping)
        likely = logits.softmax(dim=-1).gather(1, labels[marked][:, None])
        return -WEIGHT * torch.log1p(-likely.clamp(max=1 - 1e-4)).sum() / labels.numel()
