"""Under what conditions a table was measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ondevice import __version__, machine
from ondevice.terminal.bench.row import Row
from ondevice.terminal.versions import version_of

if TYPE_CHECKING:
    from ondevice.manifest import Manifest
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

PACKAGES = ("onnxruntime", "numba", "numpy")


def setup(manifest: Manifest, engine: str, threads: int) -> dict[str, Any]:
    """What ran, and on what."""
    return {
        "bundle": manifest.name,
        "weights": manifest.quantization.weights,
        "engine": engine,
        "threads": threads,
        "processor": machine.processor_name(),
        "system": machine.os_name(),
        "versions": versions(PACKAGES),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of this program, of Python and of `packages`."""
    own = {"ondevice": __version__, "python": platform.python_version()}
    return {**own, **{package: version_of(package) for package in packages}}


def conditions(model: Model, plain: Row, prompt_tokens: int, options: GenerationKeywords) -> dict[str, Any]:
    """Everything that another person needs to measure the same."""
    return {
        **setup(model.manifest, model.engine.name, model.threads),
        "kv_cache": model.engine.kv_cache,
        "prompts": plain.prompts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": plain.new_tokens,
        "temperature": options["temperature"],
        "seed": options["seed"],
        "load_s": model.load_s,
    }


def footer(facts: dict[str, Any]) -> str:
    """The same in three lines."""
    mean_prompt = facts["prompt_tokens"] / facts["prompts"]
    mean_reply = facts["new_tokens"] / facts["prompts"]
    return "\n".join(
        [
            setup_line(facts),
            f"{facts['prompts']} prompts of {mean_prompt:.0f} tokens, {mean_reply:.0f} new tokens each on average; "
            f"temperature {facts['temperature']:g}, seed {facts['seed']}; {facts['kv_cache']} KV cache; "
            f"loaded in {facts['load_s']:.1f} s",
            versions_line(facts),
        ]
    )


def setup_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['bundle']} ({facts['weights']}), engine {facts['engine']}, {facts['threads']} threads, "
        f"{facts['processor']}, {facts['system']}"
    )


def versions_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{package} {number}" for package, number in facts["versions"].items())
