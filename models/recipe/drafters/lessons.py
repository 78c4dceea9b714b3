"""A frozen target's states and samples for replies: computed once, kept on disk, read by its drafter's training.

A lesson is one conversation: its tokens, and for every position the state after the final norm, and keys and values of
the last full-attention layer. Files hold SHARD lessons each. On a CPU lessons are read when they are needed; an
accelerator has all of them in its memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from drafters.replies import HELD_OUT_EVERY, Written, read_replies
from drafters.states import FrozenTarget

SHARD = 96  # conversations of a file
FORWARD_TOKENS = {"cpu": 1024, "cuda": 1 << 16}
"""Tokens of one forward, padding included. With 4,096 a CPU core did 418 tokens/s, with 1,024 528."""
LONGEST = 1024  # tokens of a conversation; the end of a longer one is left out


@dataclass(frozen=True)
class Lesson:
    """A conversation of T tokens, of which the first `prompt` are not the target's.

    tokens : int32[T]; hidden : float16[T, H]; cache : float16[2, T, heads * D]
    """

    number: int
    kind: str
    temperature: float
    prompt: int
    tokens: Tensor
    hidden: Tensor
    cache: Tensor

    @property
    def held_out(self) -> bool:
        return self.number % HELD_OUT_EVERY == 0


def full_layer(config: Any) -> int:
    """The last layer with full attention, whose cache a drafter reads."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return max(index for index, kind in enumerate(kinds) if kind == "full_attention")


def head_dim(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def write_lessons(target: FrozenTarget, file: Path, *, finished: bool) -> None:
    """Write the lessons of a file of replies next to it, those of an incomplete shard only if the file is finished.
    Shards that exist are kept.
    """
    known = [each for each in read_replies(file) if len(each.reply) > 1]
    for shard in range(-(-len(known) // SHARD) if finished else len(known) // SHARD):
        out = shard_file(file, shard)
        if not out.exists():
            started = time.process_time()
            tokens = write_shard(target, known[shard * SHARD : (shard + 1) * SHARD], out)
            speed = tokens / (time.process_time() - started)
            print(f"{time.strftime('%H:%M:%S')} {out.name}: {speed:.0f} tokens per CPU second", flush=True)


def shard_file(file: Path, shard: int) -> Path:
    return file.with_name(f"{file.stem}-{shard:04d}.safetensors")


def write_shard(target: FrozenTarget, written: Sequence[Written], out: Path) -> int:
    """Run the target over conversations and write their lessons to a file, which appears when it is complete; returns
    the number of tokens.
    """
    rows = sorted(written, key=lambda each: len(each.prompt) + len(each.reply))
    tensors: dict[str, Tensor] = {}
    facts: list[list[Any]] = []
    for batch in batches(rows, FORWARD_TOKENS[target.projection.device.type]):
        for each, (hidden, cache) in zip(batch, states(target, batch), strict=True):
            name = str(len(facts))
            ids = torch.tensor([*each.prompt, *each.reply][:LONGEST], dtype=torch.int32)
            tensors |= {f"{name}.tokens": ids, f"{name}.hidden": hidden, f"{name}.cache": cache}
            facts.append([each.number, each.kind, each.temperature, len(each.prompt)])
    partial = out.with_suffix(".partial")
    save_file(tensors, partial, {"lessons": json.dumps(facts)})
    partial.rename(out)
    return sum(len(tokens) for name, tokens in tensors.items() if name.endswith(".tokens"))


def batches(rows: Sequence[Written], most: int) -> Iterator[list[Written]]:
    """Conversations of similar lengths that fit into a forward of `most` tokens."""
    batch: list[Written] = []
    for each in rows:
        length = min(LONGEST, len(each.prompt) + len(each.reply))
        if batch and (len(batch) + 1) * length > most:
            yield batch
            batch = []
        batch.append(each)
    yield batch


@torch.no_grad()
def states(target: FrozenTarget, batch: Sequence[Written]) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states and cache of each conversation; shorter ones are padded at their end."""
    rows = [[*each.prompt, *each.reply][:LONGEST] for each in batch]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    cache = DynamicCache(config=target.config)
    hidden = target.decoder(input_ids=ids.to(target.projection.device), past_key_values=cache).last_hidden_state
    layer = cache.layers[full_layer(target.config)]
    both = torch.stack([layer.keys, layer.values]).half().transpose(2, 3).flatten(3).cpu()  # [2, rows, T, heads * D]
    for index, (tokens, own) in enumerate(zip(rows, hidden.half().cpu(), strict=True)):
        yield own[: len(tokens)].clone(), both[:, index, : len(tokens)].clone()


class Lessons:
    """All lessons in a directory: in files on a CPU, in the memory of another device."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.places: list[tuple[Path, int]] = []
        self.facts: list[list[Any]] = []
        self.lengths: list[int] = []
        self.read: dict[Path, Callable[[str], Tensor]] = {}
        for file in sorted(directory.glob("replies-*.safetensors")):
            tensors: Any = safe_open(file, "pt")
            self.read[file] = tensors.get_tensor if device.type == "cpu" else load_file(file, str(device)).__getitem__
            facts = json.loads(tensors.metadata()["lessons"])
            self.lengths += [tensors.get_slice(f"{n}.tokens").get_shape()[0] for n in range(len(facts))]
            self.places += [(file, index) for index in range(len(facts))]
            self.facts += facts

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Lesson:
        (file, name), (number, kind, temperature, prompt) = self.places[index], self.facts[index]
        parts = {key: self.read[file](f"{name}.{key}") for key in ("tokens", "hidden", "cache")}
        return Lesson(number, kind, temperature, prompt, **parts)

    def split(self) -> tuple[list[int], list[int]]:
        """Indices of the lessons to train on and of those held out."""
        held = [index for index, fact in enumerate(self.facts) if fact[0] % HELD_OUT_EVERY == 0]
        return sorted(set(range(len(self))) - set(held)), held
