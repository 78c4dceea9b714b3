"""A frozen target's states and samples for replies: computed once, kept on disk, read by its drafter's training.

A lesson is one conversation: its tokens, and for every position the state after the final norm, and keys and values of
the last full-attention layer. Files hold SHARD lessons each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from transformers import DynamicCache

from drafters.replies import HELD_OUT_EVERY, Written, read_replies
from drafters.states import FrozenTarget

SHARD = 48  # conversations of a file
FORWARD_TOKENS = 1024  # of one forward, padding included; with 4,096 a core did 418 tokens/s, with 1,024 528
LONGEST = 1024  # tokens of a conversation; the end of a longer one is left out

Half = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Lesson:
    """A conversation of T tokens, of which the first `prompt` are not the target's.

    tokens : int64[T]; hidden : float16[T, H]; cache : float16[2, T, heads * D]
    """

    number: int
    kind: str
    temperature: float
    prompt: int
    tokens: npt.NDArray[np.int64]
    hidden: Half
    cache: Half

    @property
    def held_out(self) -> bool:
        return self.number % HELD_OUT_EVERY == 0


def full_layer(config: Any) -> int:
    """The last layer with full attention, whose cache a drafter reads."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return max(index for index, kind in enumerate(kinds) if kind == "full_attention")


def write_lessons(target: FrozenTarget, replies: Sequence[Path]) -> None:
    """Write the lessons of all complete shards of replies next to their files; those that exist are kept."""
    for file in replies:
        known = [each for each in read_replies(file) if len(each.reply) > 1]
        for shard in range(len(known) // SHARD):
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
    tensors: dict[str, npt.NDArray[Any]] = {}
    facts: list[list[Any]] = []
    for batch in batches(rows):
        for each, (hidden, cache) in zip(batch, states(target, batch), strict=True):
            name = str(len(facts))
            ids = np.array([*each.prompt, *each.reply][:LONGEST], np.int32)
            tensors |= {f"{name}.tokens": ids, f"{name}.hidden": hidden, f"{name}.cache": cache}
            facts.append([each.number, each.kind, each.temperature, len(each.prompt)])
    partial = out.with_suffix(".partial")
    save_file(tensors, partial, {"lessons": json.dumps(facts)})
    partial.rename(out)
    return sum(len(tokens) for name, tokens in tensors.items() if name.endswith(".tokens"))


def batches(rows: Sequence[Written]) -> Iterator[list[Written]]:
    """Conversations of similar lengths that fit into a forward."""
    batch: list[Written] = []
    for each in rows:
        length = min(LONGEST, len(each.prompt) + len(each.reply))
        if batch and (len(batch) + 1) * length > FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(each)
    yield batch


@torch.no_grad()
def states(target: FrozenTarget, batch: Sequence[Written]) -> Iterator[tuple[Half, Half]]:
    """Hidden states and cache of each conversation; shorter ones are padded at their end."""
    rows = [[*each.prompt, *each.reply][:LONGEST] for each in batch]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    cache = DynamicCache(config=target.config)
    hidden = target.decoder(input_ids=ids.to(target.projection.device), past_key_values=cache).last_hidden_state
    layer = cache.layers[full_layer(target.config)]
    for index, tokens in enumerate(rows):
        count = len(tokens)
        own = hidden[index, :count]
        both = [x[index, :, :count].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)]
        yield halves(own), halves(torch.stack(both))


def halves(x: Tensor) -> Half:
    return x.half().contiguous().cpu().numpy()


class Lessons:
    """All lessons in a directory; their arrays are mapped, not read."""

    def __init__(self, directory: Path) -> None:
        self.places: list[tuple[Path, int]] = []
        self.facts: list[list[Any]] = []
        self.lengths: list[int] = []
        for file in sorted(directory.glob("replies-*.safetensors")):
            with safe_open(file, "numpy") as tensors:
                facts = json.loads(tensors.metadata()["lessons"])
                self.lengths += [tensors.get_slice(f"{n}.tokens").get_shape()[0] for n in range(len(facts))]
            self.places += [(file, index) for index in range(len(facts))]
            self.facts += facts
        self.open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Lesson:
        (file, name), (number, kind, temperature, prompt) = self.places[index], self.facts[index]
        if file not in self.open:
            self.open[file] = safe_open(file, "numpy")
        tensors = self.open[file]
        parts = {key: tensors.get_tensor(f"{name}.{key}") for key in ("tokens", "hidden", "cache")}
        return Lesson(number, kind, temperature, prompt, parts.pop("tokens").astype(np.int64), **parts)

    def split(self) -> tuple[list[int], list[int]]:
        """Indices of the lessons to train on and of those held out."""
        held = [index for index, fact in enumerate(self.facts) if fact[0] % HELD_OUT_EVERY == 0]
        return sorted(set(range(len(self))) - set(held)), held
