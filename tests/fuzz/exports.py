"""Exports of checkpoints with changed safetensors headers and configurations, and of changed GGUF files."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bundles.gguf_files import write_drafter, write_target
from ondevice.bundle import Bundle
from ondevice_export import export
from ondevice_export.checkpoint.models import open_drafter, open_target
from ondevice_export.checkpoint.source import locate
from ondevice_export.gguf.file import GgufFile
from tests.fuzz import child
from tests.fuzz.mutations import change_bytes, change_json

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "header", "header", "config.json")


class Exports:
    def __init__(self, pair: Path, room: Path) -> None:
        """
        Args:
            pair: a directory with a target and a drafter.
            room: a directory for mutants and their exports.
        """
        self._pair = pair
        self._room = room

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        shutil.rmtree(self._room / "source", ignore_errors=True)
        shutil.rmtree(self._room / "made", ignore_errors=True)
        shutil.copytree(self._pair, self._room / "source")
        half, name = rng.choice(("target", "drafter")), rng.choice(FILES)
        path = self._room / "source" / half / ("model.safetensors" if name == "header" else name)
        if not path.exists():
            path = self._room / "source" / half / "config.json"
        said = _change(path, rng)

        def work() -> None:
            made = export(self._room / "source" / "target", self._room / "made" / "bundle")
            Bundle.open(made, verify_hashes=True)

        return f"export {half}/{path.name}", said, _faults(child.run(work), self._room / "made")


class GgufExports:
    """A GGUF file of the pair's target or drafter with changed bytes before its weights."""

    def __init__(self, pair: Path, room: Path) -> None:
        """
        Args:
            pair: a directory with a target and a drafter.
            room: a directory for mutants and their exports.
        """
        self._room = room
        with ExitStack() as stack:
            target = stack.enter_context(open_target(locate(str(pair / "target")), print, text_only=True))
            drafter = stack.enter_context(open_drafter(locate(str(pair / "drafter")), target))
            write_target(room / "target.gguf", target, 8)
            write_drafter(room / "drafter.gguf", drafter, target, 8)
        self._whole = {name: (room / f"{name}.gguf").read_bytes() for name in ("target", "drafter")}
        self._headers = {name: self._header(name) for name in self._whole}

    def _header(self, name: str) -> tuple[int, int]:
        """Where the weights begin, and where the descriptions of tensors do, in bytes."""
        file = GgufFile(self._room / f"{name}.gguf")
        file.close()
        first = next(iter(file.entries)).encode()
        return min(entry.offset for entry in file.entries.values()), self._whole[name].index(first) - 8

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        shutil.rmtree(self._room / "made", ignore_errors=True)
        name = rng.choice(("target", "target", "drafter"))
        content, (weights, tensors) = self._whole[name], self._headers[name]
        # most of a header are tokens and merges, and most fields stand before them
        start, stop = rng.choice(((0, 1500), (0, 1500), (1500, tensors), (tensors, weights), (tensors, weights)))
        changed, said = change_bytes(content[start:stop], rng)
        path = self._room / "changed.gguf"
        path.write_bytes(content[:start] + changed + content[stop:])
        sources = {"target": self._room / "target.gguf", "drafter": self._room / "drafter.gguf", name: path}

        def work() -> None:
            made = export(sources["target"], self._room / "made" / "bundle", drafter=str(sources["drafter"]))
            Bundle.open(made, verify_hashes=True)

        return f"export {name}.gguf", f"from {start}: {said}", _faults(child.run(work), self._room / "made")


def _faults(outcome: child.Outcome, made: Path) -> list[str]:
    """The faults of an export to the directory `made`."""
    faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
    left = [path.name for path in made.iterdir()] if made.exists() else []
    if outcome.kind == "refused" and left:
        faults.append(f"it was refused ({outcome.text}) and left {left}")
    return faults


def _change(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        text, said = change_json(content.decode(), rng)
        path.write_text(text, "utf-8", errors="surrogatepass")
        return said
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    if rng.random() < 0.8:
        text, said = change_json(json.dumps(json.loads(header)), rng)
        changed = text.encode()
    else:
        changed, said = change_bytes(header, rng)
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    return said
