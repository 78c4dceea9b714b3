"""Draft rounds over lessons: batches for training, and how many tokens a round brings on held-out replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafters.lessons import Lesson
from drafters.states import FrozenTarget
from drafters.target_drafter import TargetDrafter

LENGTH = 1024  # positions of a block: whole conversations
ROUNDS = 512  # of a block that enter the loss
STEPS = 3  # draft steps unrolled in training
MEASURED_STEPS = 4  # drafts of a round when it is measured


@dataclass(frozen=True)
class Block:
    """Conversations one after the other, and rounds in them.

    tokens : int64[T + pad]; hidden : PRODUCTS[T + pad, H]; cache : K and V, PRODUCTS[1, heads, T, D]
    begins : int64[T], the position at which each position's conversation begins
    rounds : int64[R], the positions t of rounds
    """

    tokens: Tensor
    hidden: Tensor
    cache: tuple[Tensor, Tensor]
    begins: Tensor
    rounds: Tensor

    @property
    def positions(self) -> Tensor:
        """int64[1, R]: where the newest token of each round stands in its conversation."""
        return (self.rounds + 1 - self.begins[self.rounds])[None]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[1, 1, R, T]: a round sees its conversation's positions up to its own."""
        place = torch.arange(len(self.begins), device=self.begins.device)
        seen = (place <= self.rounds[:, None]) & (place >= self.begins[self.rounds][:, None])
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)[None, None]


def pack(lengths: Sequence[int], order: Iterable[int]) -> list[list[int]]:
    """Conversations in blocks: the next one begins a new block if it does not fit."""
    blocks: list[list[int]] = [[]]
    room = LENGTH
    for index in order:
        if lengths[index] > room:
            blocks.append([])
            room = LENGTH
        blocks[-1].append(index)
        room -= lengths[index]
    return [block for block in blocks if block]


def make_block(
    lessons: Sequence[Lesson], target: FrozenTarget, rounds: Tensor, dtype: torch.dtype, length: int = LENGTH
) -> Block:
    """A block of lessons, padded to `length`."""
    device, config = target.projection.device, target.config
    spare = length + MEASURED_STEPS + 1 - sum(len(each.tokens) for each in lessons)

    def joined(parts: list[npt.NDArray[Any]], kind: torch.dtype) -> Tensor:
        whole = np.concatenate(parts)
        padded = np.concatenate([whole, np.zeros((spare, *whole.shape[1:]), whole.dtype)])
        return torch.from_numpy(padded).to(device, kind)

    starts = np.cumsum([0, *(len(each.tokens) for each in lessons)])[:-1]
    begins = np.concatenate([np.full(len(each.tokens), start) for each, start in zip(lessons, starts, strict=True)])
    cache = joined([each.cache.transpose(1, 0, 2) for each in lessons], dtype)[:length]
    keys, values = (
        cache[:, part].view(1, length, config.num_key_value_heads, -1).transpose(1, 2).contiguous() for part in (0, 1)
    )
    return Block(
        joined([each.tokens for each in lessons], torch.int64),
        joined([each.hidden for each in lessons], dtype),
        (keys, values),
        torch.from_numpy(np.resize(np.concatenate([begins, np.arange(len(begins), length)]), length)).to(device),
        rounds.to(device),
    )


def rounds_of(lessons: Sequence[Lesson], steps: int) -> npt.NDArray[np.int64]:
    """The positions in a block of lessons from which `steps` drafts are of the target's tokens."""
    found, start = [], 0
    for each in lessons:
        found.append(np.arange(start + each.prompt - 1, start + len(each.tokens) - 1 - steps))
        start += len(each.tokens)
    return np.concatenate(found)


def measure(
    drafter: TargetDrafter, target: FrozenTarget, lessons: Iterable[Lesson], head: Tensor, head_tokens: Tensor
) -> dict[str, Any]:
    """Figures by temperature and kind.

    `accepted` is the share of positions from which all drafts up to a step are accepted, `tokens` what rounds of
    MEASURED_STEPS drafts bring, one after the other. Only replies at temperature 0 and 1 are counted. At 1 drafts are
    chosen under the target's noise, as the engine does it; the noise is drawn given the tokens that were chosen.
    """
    runs: dict[tuple[float, str], list[npt.NDArray[np.int64]]] = {}
    for lesson in lessons:
        if lesson.temperature in (0.0, 1.0) and len(rounds_of([lesson], MEASURED_STEPS)) > 0:
            accepted = accepted_runs(drafter, target, lesson, head, head_tokens)
            runs.setdefault((lesson.temperature, lesson.kind), []).append(accepted)
    figures: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        groups = {kind: found for (t, kind), found in sorted(runs.items()) if t == temperature}
        everything = [run for found in groups.values() for run in found]
        if everything:
            figures[f"{temperature:g}"] = {
                kind: summary(found) for kind, found in (("all", everything), *groups.items())
            }
    return figures


def summary(runs: list[npt.NDArray[np.int64]]) -> dict[str, Any]:
    """Figures of replies, each with the number of accepted drafts of a round at every position.

    `each` has the tokens and rounds of every reply, for errors and for comparisons of two drafters on the same replies.
    """
    each = [rounds_in_turn(run) for run in runs]
    whole = np.concatenate(runs)
    return {
        "tokens": sum(tokens for tokens, _ in each) / sum(rounds for _, rounds in each),
        "accepted": [float((whole >= step).mean()) for step in range(1, MEASURED_STEPS + 1)],
        "positions": len(whole),
        "replies": len(runs),
        "each": each,
    }


def rounds_in_turn(run: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The tokens of a reply, and the rounds that bring them one after the other."""
    rounds = place = 0
    while place < len(run):
        rounds, place = rounds + 1, place + int(run[place]) + 1
    return place, rounds


@torch.no_grad()
def accepted_runs(
    drafter: TargetDrafter, target: FrozenTarget, lesson: Lesson, head: Tensor, head_tokens: Tensor
) -> npt.NDArray[np.int64]:
    """int64[R]: how many drafts of the round at each position of a reply are accepted."""
    rounds = torch.from_numpy(rounds_of([lesson], MEASURED_STEPS))
    block = make_block([lesson], target, rounds, head.dtype, len(lesson.tokens))
    generator = torch.Generator(head.device).manual_seed(lesson.number)
    states, alive = block.hidden[rounds][None], torch.ones(len(rounds), dtype=torch.bool)
    accepted = torch.zeros(len(rounds), dtype=torch.int64)
    table, mask = target.model.get_input_embeddings(), block.mask(head.dtype)
    if lesson.temperature:
        likely = target.logits(block.hidden[: len(lesson.tokens) - 1]).log_softmax(dim=-1)[:, head_tokens]
        places = torch.full((len(target.projection),), -1).scatter_(0, head_tokens, torch.arange(len(head_tokens)))
        noise = posterior_noise(likely, places[block.tokens[1 : len(lesson.tokens)]], generator)
    for step in range(1, MEASURED_STEPS + 1):
        embeddings = table(block.tokens[rounds + step])[None].to(head.dtype)
        with torch.autocast(head.device.type, head.dtype, enabled=head.dtype != torch.float32):
            states = drafter(embeddings, states, block.cache, mask, block.positions)
        logits = (states[0].to(head.dtype) @ head.T).float()
        if lesson.temperature:
            logits = logits + noise[rounds + step]
        drafts = head_tokens[logits.argmax(dim=-1)]
        alive &= drafts == block.tokens[rounds + step + 1]
        accepted += alive
    return accepted.numpy()


def posterior_noise(likely: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise of some tokens under which the target chooses as it did: float32[N, S].

    likely : float32[N, S], the tokens' log probabilities
    chosen : int64[N], the place of the chosen one among them, -1 for another token

    The maximum of all noisy log probabilities has a Gumbel distribution of its own, independent of which one it is; the
    others are below it (Maddison, Tarlow and Minka, 2014).
    """
    most = -torch.empty(len(likely), 1).exponential_(generator=generator).log()
    others = likely - torch.empty(likely.shape).exponential_(generator=generator).log()
    noisy = -torch.logaddexp(-most, -others)
    known = chosen >= 0
    noisy[known] = noisy[known].scatter(1, chosen[known, None], most[known])
    return noisy - likely


class Order:
    """Blocks of lessons without end: in each epoch all lessons, in another order."""

    def __init__(self, lengths: Sequence[int], indices: Sequence[int]) -> None:
        self.lengths, self.indices = lengths, np.asarray(indices)
        self.first, self.epoch, self.blocks = 0, -1, list[list[int]]()

    def block(self, number: int) -> list[int]:
        """The lessons of a block; numbers are asked for in ascending order."""
        while number >= self.first + len(self.blocks):
            self.first, self.epoch = self.first + len(self.blocks), self.epoch + 1
            order = np.random.default_rng([self.epoch]).permutation(self.indices)
            self.blocks = pack(self.lengths, order.tolist())
        return self.blocks[number - self.first]
