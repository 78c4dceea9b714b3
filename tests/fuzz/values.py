"""Bundles and saved prefixes of right sizes and hashes that hold hostile numbers, with every engine, cache and kind of
attention.

Each must end in one of our errors or in tokens, without a warning; on `simd` in the same ones with every drafter. Where
weights are infinite, ONNX Runtime's row may be NaN alone and a number among others.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

import ondevice
from ondevice.bundle import MANIFEST
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import DRAFTER_ORDERING, DRAFTER_TOKENS, ORDERING, Tensor
from ondevice.engines.protocol import ATTENTION_TYPES, KVCacheType
from tests.fixtures.hostile import KINDS, Change, hostile_bundle, hostile_session, numbers, patterns, token_ids
from tests.fuzz import child
from tests.fuzz.bundles import ENGINES, IDS

SECONDS = 120.0
"""Limit of a child: it generates several times, after up to 2,600 tokens."""

NEW_TOKENS = 6

SHORT, LONG = IDS * 3, IDS * 430
"""Prompts. Lookups begin after 2,560 tokens."""


class Values:
    """Makes mutants of one bundle and of its saved prefixes, and runs them."""

    def __init__(self, bundle: Path, room: Path) -> None:
        """
        Args:
            bundle: a valid bundle.
            room: a directory for mutants on the same disk, because unchanged files are hard links.
        """
        self._bundle, self._room = bundle, room
        manifest = Manifest.from_json((bundle / MANIFEST).read_text())
        self._names = sorted({_ending(name) for table in manifest.tensors.values() for name in table.tensors})
        for options in ({"attention": "lookup", "kv_cache": "int8"}, {"attention": "lookup"}, {"kv_cache": "int8"}):
            with ondevice.load(bundle, engine="simd", threads=1, **options) as model:  # type: ignore[arg-type]
                model.generate(IDS, max_new_tokens=2)  # loads the kernels, which children inherit

    def try_one(self, rng: random.Random) -> tuple[str, str, list[str]]:
        """See `Mutants.try_one`."""
        loading: dict[str, Any] = {"engine": rng.choice(ENGINES), "threads": 1}
        if loading["engine"] == "simd":
            loading |= {"attention": rng.choice(ATTENTION_TYPES), "kv_cache": rng.choice(get_args(KVCacheType))}
        looks_up = loading.get("attention", "exact") != "exact"
        prompt = LONG if looks_up and rng.random() < 0.8 else SHORT
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": rng.choice((0.0, 0.0, 0.7)), "seed": 1}
        if rng.random() < 0.3:
            kind, dtype = rng.choice((*KINDS, "random")), "float32"
            if loading.get("kv_cache") == "fp16":
                dtype = "float16"
            change = patterns(kind, dtype, rng.randrange(1 << 30))
            work = partial(_continue, self._bundle, self._room / "prefix", change, loading, prompt, options)
            said = f"rows of {kind}"
        else:
            changes, said = self._changes(rng)
            path = hostile_bundle(self._bundle, self._room / "hostile", changes)
            work = partial(_generate, path, loading, prompt, options)
        outcome = child.run(work, SECONDS)
        faults = [f"{outcome.kind}: {outcome.text}"] if outcome.is_fault else []
        if outcome.kind == "ok" and loading["engine"] == "simd" and len({found for _, found in outcome.value}) > 1:
            faults.append(f"drafts change what comes: {outcome.value}")
        return "values", f"{said}; {loading!r:.200} {len(prompt)} tokens {options!r:.200}", faults

    def _changes(self, rng: random.Random) -> tuple[dict[str, Change], str]:
        """Changes of one to three kinds of tensors, and their description."""
        changes: dict[str, Change] = {}
        for name in rng.sample(self._names, rng.choice((1, 1, 2, 3))):
            kind, share, seed = rng.choice((*KINDS, "codes")), rng.choice((1.0, 0.1, 0.001)), rng.randrange(1 << 30)
            if name in (ORDERING, DRAFTER_ORDERING, DRAFTER_TOKENS):
                changes[name] = token_ids(share, seed)
            elif kind == "codes":
                changes[name] = partial(_change_codes, seed)
            else:
                changes[name] = numbers(kind, share, seed)
        return changes, ", ".join(changes)


def _ending(name: str) -> str:
    """The name of a tensor without the number of its layer, so that a change is of all layers."""
    words = name.split(".")
    return ".".join(words[words.index(next(filter(str.isdecimal, words))) + 1 :]) if "layers" in words else name


def _change_codes(seed: int, tensor: Tensor, data: NDArray[np.uint8]) -> None:
    """Random bytes: codes of weights, or random bits of float32."""
    data[tensor.offset : tensor.offset + tensor.bytes] = np.random.default_rng(seed).integers(0, 256, tensor.bytes)


def _generate(
    bundle: Path, loading: dict[str, Any], prompt: list[int], options: dict[str, Any]
) -> list[tuple[str, tuple[int, ...] | str]]:
    """The outcome of a bundle with each drafter: token ids, or the message of one of our errors."""
    warnings.simplefilter("error", RuntimeWarning)  # a user would see them
    with ondevice.load(bundle, **loading) as model:
        return _each_drafter(model, prompt, options)


def _continue(
    bundle: Path, path: Path, change: Any, loading: dict[str, Any], prompt: list[int], options: dict[str, Any]
) -> list[tuple[str, tuple[int, ...] | str]]:
    """The same of a changed prefix of the prompt."""
    warnings.simplefilter("error", RuntimeWarning)
    with ondevice.load(bundle, **loading) as model:
        model.save_prefix(prompt[:-2], path)
        hostile_session(path, change)
        found = []
        for drafter in _drafters(model):
            model.forget()
            model.load_prefix(path)
            found += _each_drafter(model, prompt, options, [drafter])
        return found


def _drafters(model: ondevice.Model) -> list[str]:
    return ["none", "mtp", "ngram", *(heads.kind for heads in model.manifest.heads if heads.kind != "exit")]


def _each_drafter(
    model: ondevice.Model, prompt: list[int], options: dict[str, Any], drafters: list[str] | None = None
) -> list[tuple[str, tuple[int, ...] | str]]:
    found: list[tuple[str, tuple[int, ...] | str]] = []
    drafting: dict[str, Any] = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    for drafter in drafters or _drafters(model):
        own = options if drafter == "none" else options | drafting
        try:
            found.append((drafter, model.generate(prompt, drafter=drafter, **own).token_ids))
        except ondevice.OndeviceError as error:
            found.append((drafter, str(error)))
    return found
