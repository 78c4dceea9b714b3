"""Lessons: a target's replies with its states, kept on disk, which its drafter's training reads.

A lesson is one conversation: its tokens, keys and values of the last full-attention layer, and, for the positions at
which draft rounds start, the state after the final norm. `Shards` writes finished lessons, SHARD to a file; `Lessons`
reads all of a directory. On a CPU a lesson is read when it is needed; an accelerator has all of them in its memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD = 32  # lessons of a file: what a process loses at most if it is killed
LEAST = 5  # tokens of a reply: with fewer there is no round of four drafts
HELD_OUT_EVERY = 32  # lessons whose number is a multiple are never trained on


@dataclass(frozen=True)
class Lesson:
    """A conversation of T tokens, of which the first `prompt` are not the target's.

    number : of its message; kind : of its prompt
    tokens : int32[T]; hidden : float16[T, H], from position `prompt - 1` on; cache : float16[2, T, heads * D]. The last
        token's state and cache may be zeros: no round reads them
    """

    number: int
    kind: str
    temperature: float
    prompt: int
    tokens: Tensor
    hidden: Tensor
    cache: Tensor


class Shards:
    """The lessons in a directory, to which one of several writers adds.

    rank : of the writer, in the names of its files; files : number of these
    numbers : those of the lessons of all writers; tokens : of their replies
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.directory, self.rank = directory, rank
        self.numbers: set[int] = set()
        self.tokens = self.files = 0
        self._open: list[Lesson] = []
        for file in sorted(directory.glob("replies-*.safetensors")):
            self._count(*contents(safe_open(file, "pt")))
            self.files += file.name.startswith(f"replies-{rank}-")

    def add(self, lesson: Lesson) -> None:
        """Keep a lesson that has rounds, and write a file once there are SHARD."""
        if len(lesson.tokens) < lesson.prompt + LEAST:
            return
        self._open.append(lesson)
        self._count([facts_of(lesson)], [len(lesson.tokens)])
        if len(self._open) == SHARD:
            self.finish()

    def finish(self) -> None:
        """Write the lessons that no file has yet. A file appears when it is complete."""
        if not self._open:
            return
        tensors = {
            f"{index}.{part}": getattr(lesson, part).contiguous()
            for index, lesson in enumerate(self._open)
            for part in ("tokens", "hidden", "cache")
        }
        file = self.directory / f"replies-{self.rank}-{self.files:04d}.safetensors"
        save_file(tensors, file.with_suffix(".partial"), {"lessons": json.dumps(list(map(facts_of, self._open)))})
        file.with_suffix(".partial").rename(file)
        self.files += 1
        self._open = []

    def _count(self, facts: list[list[Any]], lengths: list[int]) -> None:
        self.numbers |= {number for number, *_ in facts}
        self.tokens += sum(length - prompt for length, (*_, prompt) in zip(lengths, facts, strict=True))


def facts_of(lesson: Lesson) -> list[Any]:
    """The fields of a lesson that are no tensors, as a file's metadata has them."""
    return [lesson.number, lesson.kind, lesson.temperature, lesson.prompt]


def contents(file: Any) -> tuple[list[list[Any]], list[int]]:
    """`facts_of` the lessons of an open file, and the tokens of each."""
    facts = json.loads(file.metadata()["lessons"])
    return facts, [file.get_slice(f"{index}.tokens").get_shape()[0] for index in range(len(facts))]


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
            facts, lengths = contents(tensors)
            self.lengths += lengths
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
