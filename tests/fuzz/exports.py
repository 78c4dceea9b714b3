"""Exports of checkpoints with changed safetensors headers and configurations."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from ondevice.bundle import Bundle
from ondevice_export import export
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

        outcome = child.run(work)
        faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
        made = self._room / "made"
        left = [path.name for path in made.iterdir()] if made.exists() else []
        if outcome.kind == "refused" and left:
            faults.append(f"it was refused ({outcome.text}) and left {left}")
        return f"export {half}/{path.name}", said, faults


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
