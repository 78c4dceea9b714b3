"""The draft models of a model: bundles with the same vocabulary, each opened once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ondevice.bundle import TOKENIZER, Bundle
from ondevice.drafters import registry
from ondevice.drafters.draft_model import DraftModel, DraftSampling
from ondevice.drafters.registry import DrafterEntry
from ondevice.engines.protocol import Engine
from ondevice.errors import BundleNotFoundError, UsageError
from ondevice.progress import OnPrepare
from ondevice.text.tokenizer import Tokenizer

OpenEngine = Callable[[Bundle, OnPrepare | None], Engine]
"""Opens a bundle with the engine, threads, context and cache that a model was loaded with."""


@dataclass(frozen=True)
class DraftBundles:
    """
    target : whose vocabulary they share
    open_engine : for draft bundles
    cache_bytes : of keys and values of finished sequences, for each draft model
    opened : grows with every one that is asked for
    """

    target: Bundle
    open_engine: OpenEngine
    cache_bytes: int
    opened: list[DraftModel]
    _known: dict[str, DraftModel] = field(default_factory=dict)
    """By path, as it was given."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while one is opened: two generations that ask for the same one share it."""

    def entry(
        self, drafter: str, sampling: DraftSampling = "coupled", on_prepare: OnPrepare | None = None
    ) -> DrafterEntry | None:
        """Who drafts, by what `--drafter` takes; None where it names no draft bundle.

        Raises:
            UsageError: no bundle there, another vocabulary, or the ratio rule where it cannot be.
            BundleError: a bundle that cannot be trusted.
        """
        if (location := registry.draft_bundle(drafter)) is None:
            if sampling != "coupled":
                raise UsageError("draft_sampling is for a draft model: leave it out, or give a draft bundle as drafter")
            return None
        return registry.with_draft_model(drafter, self._model(location, on_prepare), sampling)

    def _model(self, location: str, on_prepare: OnPrepare | None) -> DraftModel:
        with self._lock:
            if location not in self._known:
                bundle = find(location, self.target)
                name = f"draft:{bundle.path.resolve().name}"
                share = max(_bytes(bundle), 1) / max(_bytes(self.target), 1)
                model = DraftModel(self.open_engine(bundle, on_prepare), name, self.cache_bytes, share)
                self.opened.append(model)
                self._known[location] = model
            return self._known[location]


def find(location: str, target: Bundle) -> Bundle:
    """The draft bundle of that path or name.

    Raises:
        UsageError: there is none, as after a mistyped name of a drafter; or the target's token ids mean something else
            in it.
        BundleError: it cannot be trusted.
    """
    try:
        bundle = Bundle.open(location)
    except BundleNotFoundError as error:
        names = ", ".join(registry.names())
        raise UsageError(
            f"drafter must be one of {names}, a draft bundle's directory, or auto+ and that: "
            f"there is no bundle at {location!r:.199}"
        ) from error
    own, its = target.manifest.target.vocab_size, bundle.manifest.target.vocab_size
    if own != its:
        raise UsageError(f"{location} cannot draft for this model: it has {its} tokens, and this model {own}")
    ours, theirs = target.manifest.files.get(TOKENIZER), bundle.manifest.files.get(TOKENIZER)
    if ours and theirs and ours.sha256 != theirs.sha256 and _vocabulary(target) != _vocabulary(bundle):
        raise UsageError(f"{location} cannot draft for this model: the tokens of its tokenizer.json are others")
    return bundle


def _bytes(bundle: Bundle) -> int:
    """Of the target's graph and weights."""
    graph = bundle.manifest.target.graph
    return sum(file.size for name, file in bundle.manifest.files.items() if name.startswith(graph))


def _vocabulary(bundle: Bundle) -> dict[str, int]:
    return Tokenizer.from_file(bundle.path / TOKENIZER).vocabulary
