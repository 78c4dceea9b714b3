"""Draft rounds over lessons: batches for training, and how many tokens a round brings on held-out replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lesson
from drafters.target_drafter import TargetDrafter

LENGTH = 1024  # positions of a block: whole conversations
ROUNDS = 512  # of a block that enter the loss
MEASURED_STEPS = 4  # drafts of a round when it is measured


@dataclass(frozen=True)
class Blocks:
    """A batch of B rows. A row has several conversations, one after the other, and R draft rounds in them.

    tokens : int64[B, T + pad]; hidden : PRODUCTS[B, T + pad, H]; cache : K and V, PRODUCTS[B, heads, T, D]
    begins : int64[B, T], for each position the position at which its conversation begins
    rounds : int64[B, R], the positions at which rounds start (`t` in `target_drafter.py`)
    """

    tokens: Tensor
    hidden: Tensor
    cache: tuple[Tensor, Tensor]
    begins: Tensor
    rounds: Tensor

    @property
    def positions(self) -> Tensor:
        """int64[B, R]: where the newest token of each round stands in its conversation."""
        return self.rounds + 1 - self.begins.gather(1, self.rounds)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, R, T]: a round sees its conversation's positions up to its own."""
        place = torch.arange(self.begins.shape[1], device=self.begins.device)
        first = self.begins.gather(1, self.rounds)
        seen = (place <= self.rounds[..., None]) & (place >= first[..., None])
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)[:, None]

    def tokens_after(self, count: int) -> Tensor:
        """int64[B, R]: the tokens `count` positions after those of the rounds."""
        return self.tokens.gather(1, self.rounds + count)

    def hidden_after(self, count: int) -> Tensor:
        """PRODUCTS[B, R, H]: the states `count` positions after those of the rounds."""
        return self.hidden[torch.arange(len(self.hidden), device=self.hidden.device)[:, None], self.rounds + count]


def pack(lengths: Sequence[int], order: Iterable[int]) -> list[list[int]]:
    """Conversations divided into blocks of LENGTH tokens at most: one that does not fit begins the next block."""
    blocks: list[list[int]] = [[]]
    room = LENGTH
    for index in order:
        if lengths[index] > room:
            blocks.append([])
            room = LENGTH
        blocks[-1].append(index)
        room -= lengths[index]
    return [block for block in blocks if block]


def make_blocks(
    rows: Sequence[Sequence[Lesson]], target: FrozenTarget, rounds: Tensor, dtype: torch.dtype, length: int = LENGTH
) -> Blocks:
    """Rows of lessons, each padded to `length`. rounds : int64[B, R]"""
    device = target.projection.device
    padded = length + MEASURED_STEPS + 1

    def joined(rows: list[list[Tensor]], kind: torch.dtype) -> Tensor:
        whole = torch.zeros(len(rows), padded, *rows[0][0].shape[1:], dtype=kind, device=device)
        for row, parts in zip(whole, rows, strict=True):
            tokens = sum(map(len, parts))
            row[:tokens] = torch.cat(parts)
        return whole

    begins = torch.arange(length).repeat(len(rows), 1)
    for row, lessons in zip(begins, rows, strict=True):
        start = 0
        for each in lessons:
            row[start : start + len(each.tokens)] = start
            start += len(each.tokens)
    cache = joined([[each.cache.transpose(0, 1) for each in row] for row in rows], dtype)[:, :length]
    by_head = cache.unflatten(-1, (target.attention.kv_heads, -1)).transpose(1, 3)  # [B, heads, 2, T, D]
    keys, values = by_head[:, :, 0].contiguous(), by_head[:, :, 1].contiguous()
    return Blocks(
        joined([[each.tokens for each in row] for row in rows], torch.int64),
        joined([[each.hidden for each in row] for row in rows], dtype),
        (keys, values),
        begins.to(device),
        rounds.to(device),
    )


def rounds_of(lessons: Sequence[Lesson], steps: int) -> npt.NDArray[np.int64]:
    """The positions in a block of lessons at which a round of `steps` drafts can start: the target wrote the tokens
    that it drafts.
    """
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
    rounds = torch.from_numpy(rounds_of([lesson], MEASURED_STEPS))[None]
    blocks = make_blocks([[lesson]], target, rounds, head.dtype, len(lesson.tokens))
    states, mask = blocks.hidden_after(0), blocks.mask(head.dtype)
    alive = torch.ones_like(blocks.rounds[0], dtype=torch.bool)
    accepted = torch.zeros_like(blocks.rounds[0])
    if lesson.temperature:
        generator = torch.Generator(head.device).manual_seed(lesson.number)
        likely = target.logits(blocks.hidden[0, : len(lesson.tokens) - 1]).log_softmax(dim=-1)[:, head_tokens]
        places = places_of(head_tokens, len(target.projection))
        noise = posterior_noise(likely, places[blocks.tokens[0, 1 : len(lesson.tokens)]], generator)
    for step in range(1, MEASURED_STEPS + 1):
        embeddings = target.embed(blocks.tokens_after(step)).to(head.dtype)
        with torch.autocast(head.device.type, head.dtype, enabled=head.dtype != torch.float32):
            states = drafter(embeddings, states, blocks.cache, mask, blocks.positions)
        logits = (states[0].to(head.dtype) @ head.T).float()
        if lesson.temperature:
            logits = logits + noise[blocks.rounds[0] + step]
        drafts = head_tokens[logits.argmax(dim=-1)]
        alive &= drafts == blocks.tokens_after(step + 1)[0]
        accepted += alive
    return accepted.cpu().numpy()


def places_of(tokens: Tensor, vocabulary: int) -> Tensor:
    """int64[V]: the place of each token of the vocabulary in a list of some, -1 for the others."""
    places = torch.full((vocabulary,), -1, device=tokens.device)
    return places.scatter_(0, tokens, torch.arange(len(tokens), device=tokens.device))


def posterior_noise(likely: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise of some tokens under which the target chooses as it did: float32[N, S].

    likely : float32[N, S], the tokens' log probabilities
    chosen : int64[N], the place of the chosen one among them, -1 for another token

    The maximum of all noisy log probabilities has a Gumbel distribution of its own, independent of which one it is; the
    others are below it (Maddison, Tarlow and Minka, 2014).
    """
    most = -torch.empty_like(likely[:, :1]).exponential_(generator=generator).log()
    others = likely - torch.empty_like(likely).exponential_(generator=generator).log()
    noisy = -torch.logaddexp(-most, -others)
    known = chosen >= 0
    noisy[known] = noisy[known].scatter(1, chosen[known, None], most[known])
    return noisy - likely


class Order:
    """An endless series of blocks. Each epoch has all lessons once, in an order of its own."""

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
