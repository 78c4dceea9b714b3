"""Mutants of a bundle's files. Sizes and hashes in bundle.json are corrected, so that later checks are reached."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ondevice
from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, MANIFEST, TOKENIZER
from ondevice.bundle_format.manifest import Manifest
from ondevice.errors import OndeviceError
from tests.fuzz import child
from tests.fuzz.child import Outcome
from tests.fuzz.mutations import (
    change_bytes,
    change_configuration,
    change_graph,
    change_json,
    change_table,
    change_text,
    change_values,
)

Engine = Literal["simd", "ort"]
ENGINES: tuple[Engine, ...] = ("simd", "ort")

IDS = [2, 300, 301, 17, 99, 420]
NEW_TOKENS = 10

Change = Callable[[bytes, random.Random], tuple[bytes, str]]


def _of_text(change: Callable[[str, random.Random], tuple[str, str]]) -> Change:
    """Turn a change of text into a change of bytes."""

    def changed(content: bytes, rng: random.Random) -> tuple[bytes, str]:
        text, said = change(content.decode(), rng)
        return text.encode(), said

    return changed


_json = _of_text(change_json)


CONFIGURATION, TABLE = "bundle.json: configuration", "bundle.json: tensors"
"""Parts of bundle.json that are changed more often than their share of the file."""

HEADS = ("medusa", "blockwise", "exit")

CHANGES: dict[str, tuple[Change, ...]] = {
    MANIFEST: (_json, change_bytes),
    CONFIGURATION: (_of_text(change_configuration),),
    TABLE: (_of_text(change_table),),
    "target.onnx": (change_graph, change_graph, change_graph, change_bytes),
    "drafter.onnx": (change_graph, change_graph, change_graph, change_bytes),
    **{f"heads.{kind}.onnx": (change_graph, change_bytes) for kind in HEADS},
    **{f"heads.{kind}.onnx.data": (change_values,) for kind in HEADS},
    "target.onnx.data": (change_values,),
    "drafter.onnx.data": (change_values,),
    TOKENIZER: (_json, change_bytes),
    CHAT_TEMPLATE: (change_text, change_text, change_bytes),
    GENERATION_CONFIG: (_json, _json, change_bytes),
}

SAME_TOKENS = (
    "drafter.onnx", "drafter.onnx.data", *(f"heads.{kind}.onnx{end}" for kind in HEADS for end in ("", ".data")),
    TOKENIZER, CHAT_TEMPLATE, GENERATION_CONFIG,
)  # fmt: skip
"""Files that do not affect greedy generation from token ids."""


def use(bundle: Path, engine: Engine) -> dict[str, Any]:
    """Load a bundle and generate from ids, with each drafter, from text and from a message.

    Returns:
        The generated token ids by way, or the message of the error that was raised for a text or a message.
    """
    with ondevice.load(bundle, engine=engine, threads=1, context_length=64) as model:
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}
        ids = [token % model.engine.target.vocab_size for token in IDS]
        found: dict[str, tuple[int, ...] | str] = {"ids": model.generate(ids, drafter="auto", **options).token_ids}
        drafting: dict[str, Any] = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
        drafters = ["ngram"] if model.manifest.drafter is None else ["mtp"]
        for drafter in (*drafters, *(heads.kind for heads in model.manifest.heads if heads.kind != "exit")):
            found[f"drafted by {drafter}"] = model.generate(ids, drafter=drafter, **drafting, **options).token_ids
        for name, prompt in (("text", "def f(x):"), ("chat", [{"role": "user", "content": "hi <eos>"}])):
            try:
                found[name] = model.generate(prompt, max_new_tokens=4, seed=1).token_ids
            except ondevice.OndeviceError as error:
                found[name] = str(error)
        return found


class Mutants:
    """Makes mutants of one bundle, runs them and checks the outcomes."""

    def __init__(self, bundle: Path, room: Path) -> None:
        """
        Args:
            bundle: a valid bundle.
            room: a directory for mutants on the same disk, because unchanged files are hard links.
        """
        self._bundle = bundle
        self._room = room
        self._contents = {path.name: path.read_bytes() for path in bundle.iterdir()}
        self._manifest = Manifest.from_json(self._contents[MANIFEST].decode())
        outcomes = {engine: child.run(partial(use, bundle, engine), 300) for engine in ENGINES}
        assert all(outcome.kind == "ok" for outcome in outcomes.values()), outcomes
        self._expected = {engine: outcome.value for engine, outcome in outcomes.items()}

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """Make a mutant and run it on both engines.

        Returns:
            The name of the changed file, the change in words, and the faults that were found.
        """
        name = rng.choice([each for each in CHANGES if each in self._contents or each in (CONFIGURATION, TABLE)])
        file = MANIFEST if name in (CONFIGURATION, TABLE) else name
        content, said = rng.choice(CHANGES[name])(self._contents[file], rng)
        path = self._write(file, content, mend=rng.random() < 0.95)
        faults = []
        for engine in ENGINES:
            outcome = child.run(partial(use, path, engine))
            if fault := self._judge(file, engine, outcome, path):
                faults.append(f"{engine}: {fault}")
        return name, said, faults

    def _write(self, name: str, content: bytes, *, mend: bool) -> Path:
        path = self._room / "mutant"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for other in self._contents:
            if other not in (name, MANIFEST):
                os.link(self._bundle / other, path / other)
        manifest = self._contents[MANIFEST]
        if name == MANIFEST:
            manifest = content
        else:
            (path / name).write_bytes(content)
            if mend:
                manifest = _mended(manifest, name, content)
        (path / MANIFEST).write_bytes(manifest)
        return path

    def _judge(self, name: str, engine: Engine, outcome: Outcome, path: Path) -> str | None:
        """The fault in an outcome; None for one of our errors, or for output that the change explains."""
        if outcome.is_fault:
            return f"{outcome.kind}: {outcome.text}"
        if outcome.kind == "refused":
            return None
        found, expected = outcome.value, self._expected[engine]
        if any(found[way] != found["ids"] for way in found if way.startswith("drafted")):
            return f"drafts change the tokens: {found}"
        if name in SAME_TOKENS and not _begins(expected["ids"], found["ids"]):
            return f"other tokens than the change explains: {found}"
        same = _begins(expected["ids"], found["ids"]) or _begins(found["ids"], expected["ids"])
        if name == MANIFEST and not same and not self._computes_otherwise(path, engine):
            return f"other tokens than the change explains: {found}"
        return None

    def _computes_otherwise(self, path: Path, engine: Engine) -> bool:
        """Whether a mutant's bundle.json changes the results.

        The sliding window does on both engines; other numbers and the target's tensor table on simd only.
        """
        old, new = self._manifest, Manifest.from_json((path / MANIFEST).read_text())
        on_simd = ("norm_eps", "softcap", "rotary", "embedding_factor", "per_layer", "layers")
        fields = ("window", *(on_simd if engine == "simd" else ()))
        if any(getattr(old.target, field) != getattr(new.target, field) for field in fields):
            return True
        return engine == "simd" and old.tensors[old.target.graph] != new.tensors[new.target.graph]


def _mended(manifest: bytes, name: str, content: bytes) -> bytes:
    data = json.loads(manifest)
    data["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    try:
        return Manifest.from_json(json.dumps(data)).to_json().encode()
    except OndeviceError:  # an empty file
        return json.dumps(data).encode()


def _begins(whole: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    """Whether `whole` starts with the non-empty `beginning`; a changed end token may end a reply sooner."""
    return len(beginning) > 0 and whole[: len(beginning)] == beginning
