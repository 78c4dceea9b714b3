"""The layers of the target that a row passes (`LayerPath`), and the files of sub-layers that drafts may skip.

The target can draft for itself: drafted rows skip some attention and feed-forward blocks, or end before the last layer,
and whole rows verify them. Which blocks a bundle's drafts can skip is measured (`ondevice tune`, and the drafter
`swift`) and kept on disk by `PathMemory`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ondevice import machine
from ondevice.bundle import SKIPPED_LAYERS, Bundle
from ondevice.bundle_format.model_config import Target
from ondevice.errors import UsageError
from ondevice.files import make_cache_directory, replace_json, trusted


@dataclass(frozen=True)
class LayerPath:
    """The sub-layers that a row passes between embedding and output.

    A layer's per-layer embedding and its scalar are always applied.

    without_attention, without_mlp : indices of layers whose attention or convolution, or feed-forward block, is skipped
    stop : index of the first layer that is skipped with all later ones, the final norm and the head: the output is then
        the residual stream; None runs them all
    """

    without_attention: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        return self == WHOLE

    def below(self, layer: int) -> LayerPath:
        """The part of the path before a layer. Rows of equal parts have the same residual stream at that layer."""
        attention = frozenset(index for index in self.without_attention if index < layer)
        return LayerPath(attention, frozenset(index for index in self.without_mlp if index < layer), layer)

    def check(self, target: Target) -> None:
        """Check that a target can run this path.

        Raises:
            ValueError: it names layers that the target does not have, or skips the attention of a layer whose keys and
                values other layers read.
        """
        count = len(target.layers)
        if self.stop is not None and not 0 < self.stop <= count:
            raise ValueError(f"a path ends at a layer from 1 to {count}, not {self.stop}")
        if unknown := sorted(index for index in self.without_attention | self.without_mlp if not 0 <= index < count):
            raise ValueError(f"there are layers 0 to {count - 1}, and no {unknown[0]}")
        if target.states:
            raise ValueError("the rows of a model with states pass all layers")
        read = {layer.mixer.kv_source for layer in target.layers}
        if needed := sorted(self.without_attention & read):
            raise ValueError(f"the attention of layer {needed[0]} cannot be left out: other layers read its cache")


WHOLE = LayerPath()
"""All layers, the final norm and the head."""

SCHEMA = 1
MAX_BYTES = 1 << 22
"""Largest file of skips that is read, in bytes."""
MAX_RECORDED = 8
"""Longest draft, in tokens, whose acceptance is recorded."""

SubLayer = tuple[Literal["attention", "mlp"], int]
"""A kind of block, and the index of its layer."""
Skips = frozenset[SubLayer]
Survival = tuple[float, ...]
"""Measured probability that the first 1, 2, ... tokens of a draft are all accepted; never increasing."""


@dataclass(frozen=True)
class SkipRecord:
    """The result of a search for sub-layers to skip.

    skips : the best set that was found
    speed_up : predicted speed with `skips`, as a multiple of plain decoding; at most 1 if nothing pays
    draft_share : time of a drafted token as a share of a plain row's
    processor : name of the processor that this was measured on
    tried : everything that was measured, so that a search can continue
    finished : whether the search has nothing left to try
    """

    skips: Skips = frozenset()
    speed_up: float = 0.0
    draft_share: float = 1.0
    processor: str = ""
    tried: Mapping[Skips, Survival] = field(default_factory=dict)
    finished: bool = False

    @property
    def pays(self) -> bool:
        """Whether drafts without `skips` are expected to be faster than plain decoding."""
        return self.speed_up > 1.0

    @property
    def usable(self) -> bool:
        """Whether there is a set to draft with, which pays or not."""
        return bool(self.skips and self.survival)

    @property
    def survival(self) -> Survival:
        """The survival measured for `skips`; empty where it was not."""
        return self.tried.get(self.skips, ())


def path_of(skips: Skips) -> LayerPath:
    """The path of a row that skips these sub-layers."""
    attention = frozenset(layer for kind, layer in skips if kind == "attention")
    return LayerPath(attention, frozenset(layer for kind, layer in skips if kind == "mlp"))


def free_sub_layers(target: Target) -> list[SubLayer]:
    """The sub-layers that a draft may skip.

    If layers share caches: those of layers without a cache of their own. They write no keys and values, so drafted rows
    leave the same ones as a whole forward. Otherwise: those of all layers but the first and the last, as in SWIFT; none
    of a model with states, which would include the drafted rows of such a path.
    """
    if target.states:
        return []
    shared = [index for index, layer in enumerate(target.layers) if layer.mixer.kv_source is not None]
    layers = shared or range(1, len(target.layers) - 1)
    return [sub for index in layers for sub in (("attention", index), ("mlp", index))]


class PathMemory:
    """The files of skips of one bundle.

    `ondevice tune` writes its result into the bundle's directory, or into the cache directory if that is read-only;
    `swift` writes into the cache directory. A file that is damaged or belongs to another bundle is ignored. So is one
    that another user may have written to the cache directory. The bundle's is not checked, because whoever can write to
    a bundle can change more.

    Attributes:
        swift_seconds: most seconds that `swift` may search, in total.
    """

    swift_seconds: float = 10.0

    def __init__(self, bundle: Bundle) -> None:
        self._content = bundle.content
        self._target = bundle.manifest.target
        self._in_bundle = bundle.path / SKIPPED_LAYERS
        self._read: dict[Path, SkipRecord] = {}

    @property
    def tuned_files(self) -> tuple[Path, ...]:
        """Where `ondevice tune` writes, in order of preference. The files need not exist."""
        return self._in_bundle, *self._cached("tuned")

    @property
    def swift_files(self) -> tuple[Path, ...]:
        """Where `swift` writes."""
        return self._cached("swift")

    def read(self, files: tuple[Path, ...]) -> SkipRecord | None:
        """The record in the first of these files that has one of this bundle; None if none has."""
        for path in files:
            if path in self._read:
                return self._read[path]
            if (record := self._parsed(path)) is not None:
                self._read[path] = record
                return record
        return None

    def write(self, files: tuple[Path, ...], record: SkipRecord) -> Path:
        """Replace the first of these files that can be written, and return its path.

        Raises:
            UsageError: none of them can be written.
        """
        failure = "there is no cache directory"
        for path in files:
            try:
                if path != self._in_bundle:
                    make_cache_directory(path.parent)
                replace_json(path, self._entry(record))
            except OSError as error:
                failure = str(error)
                continue
            self._read = {path: record}
            return path
        raise UsageError(f"what was found cannot be kept ({failure}): make {files[-1].parent} writable")

    def keep(self, files: tuple[Path, ...], record: SkipRecord) -> None:
        """`write`, without an error if no file can be written."""
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
        if path != self._in_bundle and not trusted(path):
            return None
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            entry = json.loads(content) if len(content) <= MAX_BYTES else {}
            if entry["schema"] != SCHEMA or entry["content"] != self._content:
                return None
            tried = {self._skips(words): _survival(numbers) for words, numbers in entry["tried"]}
            speed_up, share = float(entry["speed_up"]), float(entry["draft_share"])
            if not (0.0 <= speed_up < 100.0 and 0.0 < share < 100.0):
                return None
            finished, processor = entry["finished"] is True, str(entry["processor"])
            record = SkipRecord(self._skips(entry["skips"]), speed_up, share, processor, tried, finished)
            return record if record.skips in tried else replace(record, speed_up=0.0)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    def _skips(self, words: list[str]) -> Skips:
        """Parse the names of sub-layers; ValueError if this target cannot skip one of them."""
        free = {f"{kind} {layer}": (kind, layer) for kind, layer in free_sub_layers(self._target)}
        if not all(word in free for word in words):
            raise ValueError("not sub-layers")
        return frozenset(free[word] for word in words)


def _words(skips: Skips) -> list[str]:
    return [f"{kind} {layer}" for layer, kind in sorted((layer, kind) for kind, layer in skips)]


def _survival(numbers: list[float]) -> Survival:
    survival = tuple(float(number) for number in numbers)
    falling = all(1.0 >= one >= other >= 0.0 for one, other in zip((1.0, *survival), survival, strict=False))
    if not survival or len(survival) > MAX_RECORDED or not falling:
        raise ValueError("not chances")
    return survival
