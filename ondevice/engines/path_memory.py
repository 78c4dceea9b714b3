"""Which sub-layers of a bundle's target a draft may leave out, found by measuring and kept on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ondevice import machine
from ondevice.bundle import Bundle
from ondevice.engines.layer_path import LayerPath
from ondevice.errors import UsageError
from ondevice.json_file import replace_json
from ondevice.manifest import Target

SCHEMA = 1
FILE = "skipped-layers.json"
MOST_BYTES = 1 << 22
MOST_DRAFTED = 8
"""Tokens up to which acceptance is kept."""

SubLayer = tuple[Literal["attention", "mlp"], int]
Skips = frozenset[SubLayer]
Survival = tuple[float, ...]
"""The chance that the first 1, 2, ... tokens of a draft are all right, as measured; never rising."""


@dataclass(frozen=True)
class SkipRecord:
    """What a search for sub-layers to skip has come to.

    skips : the best that was found, which `speed_up` tells the worth of
    speed_up : predicted times as fast as plain decoding; not over 1 where nothing pays
    draft_share : of a plain row's time, what a drafted token takes
    processor : on which this was measured
    tried : all that was measured, for a search that goes on
    finished : whether nothing better is in reach
    """

    skips: Skips = frozenset()
    speed_up: float = 0.0
    draft_share: float = 1.0
    processor: str = ""
    tried: Mapping[Skips, Survival] = field(default_factory=dict)
    finished: bool = False

    @property
    def pays(self) -> bool:
        return self.speed_up > 1.0

    @property
    def survival(self) -> Survival:
        return self.tried.get(self.skips, ())


def path_of(skips: Skips) -> LayerPath:
    """The way of a row that these are left out of."""
    attention = frozenset(layer for kind, layer in skips if kind == "attention")
    return LayerPath(attention, frozenset(layer for kind, layer in skips if kind == "mlp"))


def free_sub_layers(target: Target) -> list[SubLayer]:
    """What may be left out. Where layers share caches, those without their own: they write no keys and values, so that
    drafted rows have those of a whole forward. Elsewhere all but the first and the last layer, as SWIFT has it.
    """
    shared = [index for index, layer in enumerate(target.layers) if layer.kv_source != index]
    layers = shared or range(1, len(target.layers) - 1)
    return [sub for index in layers for sub in (("attention", index), ("mlp", index))]


class PathMemory:
    """The files of one bundle: what `ondevice tune` found, beside it, or in the cache directory where that cannot be
    written; and what `swift` did, in the cache directory. A file of another bundle, or a damaged one, is none.

    Attributes:
        swift_seconds: that `swift` may search for, in all.
    """

    swift_seconds = 10.0

    def __init__(self, bundle: Bundle) -> None:
        self._content = bundle.content
        self._target = bundle.manifest.target
        self._beside = bundle.path / FILE
        self._read: dict[Path, SkipRecord] = {}

    @property
    def tuned_files(self) -> tuple[Path, ...]:
        """Where `ondevice tune` may have left what it found; none of them may be there."""
        return self._beside, *self._cached("tuned")

    @property
    def swift_files(self) -> tuple[Path, ...]:
        return self._cached("swift")

    def read(self, files: tuple[Path, ...]) -> SkipRecord | None:
        """The record of the first of these files that has one of this bundle."""
        for path in files:
            if path in self._read:
                return self._read[path]
            if (record := self._parsed(path)) is not None:
                self._read[path] = record
                return record
        return None

    def write(self, files: tuple[Path, ...], record: SkipRecord) -> Path:
        """Replace the first of these files that can be written; which one that was.

        Raises:
            UsageError: none can.
        """
        failure = "there is no cache directory"
        for path in files:
            try:
                replace_json(path, self._entry(record))
            except OSError as error:
                failure = str(error)
                continue
            self._read = {path: record}
            return path
        raise UsageError(f"what was found cannot be kept ({failure}): make {files[-1].parent} writable")

    def keep(self, files: tuple[Path, ...], record: SkipRecord) -> None:
        """`write`, where it can be."""
        with suppress(UsageError):
            self.write(files, record)

    def _cached(self, name: str) -> tuple[Path, ...]:
        return (machine.cache_directory() / "skips" / f"{name}-{self._content[:32]}.json",)

    def _entry(self, record: SkipRecord) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "content": self._content,
            "skips": _words(record.skips),
            "speed_up": record.speed_up,
            "draft_share": record.draft_share,
            "processor": record.processor,
            "finished": record.finished,
            "tried": [[_words(skips), list(survival)] for skips, survival in record.tried.items()],
        }

    def _parsed(self, path: Path) -> SkipRecord | None:
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            entry = json.loads(content) if len(content) <= MOST_BYTES else {}
            if entry["schema"] != SCHEMA or entry["content"] != self._content:
                return None
            tried = {self._skips(words): _survival(numbers) for words, numbers in entry["tried"]}
            speed_up, share = float(entry["speed_up"]), float(entry["draft_share"])
            if not (0.0 <= speed_up < 100.0 and 0.0 < share < 100.0):
                return None
            finished, processor = entry["finished"] is True, str(entry["processor"])
            record = SkipRecord(self._skips(entry["skips"]), speed_up, share, processor, tried, finished)
            return record if record.skips in tried else replace(record, speed_up=0.0)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _skips(self, words: list[str]) -> Skips:
        """Raises ValueError for what this target cannot leave out."""
        free = {f"{kind} {layer}": (kind, layer) for kind, layer in free_sub_layers(self._target)}
        if not all(word in free for word in words):
            raise ValueError("not sub-layers")
        return frozenset(free[word] for word in words)


def _words(skips: Skips) -> list[str]:
    return [f"{kind} {layer}" for layer, kind in sorted((layer, kind) for kind, layer in skips)]


def _survival(numbers: list[float]) -> Survival:
    survival = tuple(float(number) for number in numbers)
    falling = all(1.0 >= one >= other >= 0.0 for one, other in zip((1.0, *survival), survival, strict=False))
    if not survival or len(survival) > MOST_DRAFTED or not falling:
        raise ValueError("not chances")
    return survival
