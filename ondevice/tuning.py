"""`ondevice tune`: which attention and MLP blocks a draft of the model itself can do without on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from ondevice import machine
from ondevice.drafters.skip_sample import SkipSample, costs_of, survival_on
from ondevice.drafters.skip_search import SkipSearch
from ondevice.engines.path_memory import PathMemory, SkipRecord, free_sub_layers
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import UsageError
from ondevice.model import Model
from ondevice.text.prompt import Prompt

SAMPLE = 32
"""Tokens of each prompt's reply that sets of sub-layers are judged by; Draft & Verify takes as many of 8 texts."""

REPEATS = 15
"""Timings of a path of which the median counts."""

LEAST = 4
"""Tokens of a reply that are worth comparing."""

KEPT_EVERY = 5.0
"""Seconds between two writes of what was found."""

Facts = dict[str, Any]
"""What a search has come to, for readers: `facts_of`."""

OnTune = Callable[[Facts, float], None]
"""Hears of what was found so far, and of the seconds spent, before every set that is measured."""


class Tuning:
    """A search over some prompts. It goes on where the last one for this bundle ended."""

    def __init__(self, model: Model) -> None:
        """
        Raises:
            UsageError: the engine has no partial forwards, or the model no layers to leave out.
        """
        memory = model.engine.paths
        if memory is None:
            raise UsageError(f"the {model.engine.name} engine runs all layers or none: use --engine simd")
        self._model = model
        self._memory: PathMemory = memory
        self._free = free_sub_layers(model.engine.target)
        if not self._free:
            raise UsageError("this model has too few layers to leave any out")

    def run(self, prompts: Sequence[Prompt], seconds: float, on_tune: OnTune) -> Facts:
        """Search for so long, or until nothing better is in reach; what was found is kept, also where this is
        interrupted.

        Raises:
            UsageError: no reply is long enough, or what was found cannot be kept.
        """
        started = perf_counter()
        known = self._memory.read(self._memory.tuned_files) or SkipRecord()
        samples = self._samples(prompts)
        try:
            free = frozenset(self._free)
            costs = costs_of([timing() for timing in samples[0].timings(free, REPEATS)], free)
            search = SkipSearch(self._free, costs, known.tried)
            self._search(search, samples, started, seconds, on_tune)
        finally:
            for sample in samples:
                sample.close()
        return facts_of(self._record(search))

    def where(self) -> str:
        """The file that has what was found."""
        return str(next((path for path in self._memory.tuned_files if path.exists()), self._memory.tuned_files[0]))

    def _search(
        self, search: SkipSearch, samples: Sequence[SkipSample], started: float, seconds: float, on_tune: OnTune
    ) -> None:
        kept = started
        try:
            while (skips := search.propose()) is not None:  # one of them at least, or a short search would never begin
                on_tune(facts_of(self._record(search)), perf_counter() - started)
                search.learn(skips, survival_on(samples, skips))
                if (now := perf_counter()) >= started + seconds:
                    break
                if now >= kept + KEPT_EVERY:
                    self._memory.write(self._memory.tuned_files, self._record(search))
                    kept = now
        finally:
            self._memory.write(self._memory.tuned_files, self._record(search))

    def _record(self, search: SkipSearch) -> SkipRecord:
        best, finished = search.best, search.propose() is None
        name = machine.processor_name()
        return SkipRecord(best, search.speed_up(best), search.token(best), name, dict(search.tried), finished)

    def _samples(self, prompts: Sequence[Prompt]) -> list[SkipSample]:
        """The beginning of the model's own likeliest reply to each prompt, behind it."""
        engine, samples = self._model.engine, []
        for prompt in prompts:
            ids = self._model.encode(prompt)
            reply = self._model.generate(prompt, max_new_tokens=SAMPLE, temperature=0.0)
            session = engine.open_session()
            while session.length < len(ids):
                chunk = ids[session.length : session.length + session.max_rows()]
                engine.forward([Rows(session, TokenTree.chain(chunk), [len(chunk) - 1])])
                session.commit(range(len(chunk)))
            tokens = list(reply.token_ids)[: session.max_rows()]
            if len(tokens) >= LEAST:
                samples.append(SkipSample(engine, session, tokens))
        if not samples:
            raise UsageError(f"no reply has {LEAST} tokens to compare drafts with: give other prompts with --prompts")
        return samples


def facts_of(record: SkipRecord) -> Facts:
    """A record for readers."""
    return {
        "pays": record.pays,
        "predicted_speed_up": record.speed_up,
        "without_attention": sorted(layer for kind, layer in record.skips if kind == "attention"),
        "without_mlp": sorted(layer for kind, layer in record.skips if kind == "mlp"),
        "draft_share": record.draft_share,
        "survival": list(record.survival),
        "tried": len(record.tried),
        "finished": record.finished,
        "processor": record.processor,
    }
