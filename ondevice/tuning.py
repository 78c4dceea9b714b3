"""`ondevice tune`: finds the attention and MLP blocks that drafts of the model itself can leave out on this machine.

`Tuning.run` searches over the model's own replies to some prompts (`generate.drafters.skip_search`) and writes what it
found into the bundle's directory, where the `self` drafter reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from time import perf_counter
from typing import Any

from ondevice.engines.layer_path import PathMemory, SkipRecord, free_sub_layers
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import UsageError
from ondevice.generate.drafters.registry import no_partial_forwards
from ondevice.generate.drafters.skip_search import SkipSample, SkipSearch, costs_of, survival_on
from ondevice.model import Model
from ondevice.text.codec import Prompt

SAMPLE_TOKENS = 32
"""Tokens of each prompt's reply on which sets of sub-layers are tested; Draft & Verify takes as many of 8 texts."""

REPEATS = 15
"""Timings of a path, of which the median is used."""

MIN_SAMPLE_TOKENS = 4
"""Replies with fewer tokens are not used."""

SAVE_INTERVAL_S = 5.0
"""Seconds between two writes of what was found."""

Facts = dict[str, Any]
"""The result of a search, for users: see `facts_of`."""

OnTune = Callable[[Facts, float], None]
"""Called before each set is measured, with the result so far and the seconds spent."""


class Tuning:
    """A search for one model. It continues where the last one for this bundle ended."""

    def __init__(self, model: Model) -> None:
        """
        Raises:
            UsageError: the engine has no partial forwards, or the model has too few layers to leave any out.
        """
        if (obstacle := no_partial_forwards(model.engine)) is not None:
            raise UsageError(obstacle)
        assert model.engine.paths is not None
        self._model = model
        self._memory: PathMemory = model.engine.paths
        self._free = free_sub_layers(model.engine.target)

    def run(self, prompts: Sequence[Prompt], seconds: float, on_tune: OnTune) -> Facts:
        """Search until no better set is in reach or the time is up, and save the result, even if interrupted.

        Args:
            prompts: the search uses the beginning of the model's greedy reply to each.
            seconds: time limit; at least one set is measured in any case.
            on_tune: called before each set.

        Returns:
            The result.

        Raises:
            UsageError: no reply is long enough, or the result cannot be saved.
        """
        started = perf_counter()
        known = self._memory.read(self._memory.tuned_files) or SkipRecord()
        with ExitStack() as opened:
            samples = self._samples(prompts, opened)
            free = frozenset(self._free)
            costs = costs_of([timing() for timing in samples[0].timings(free, REPEATS)], free)
            search = SkipSearch(self._free, costs, known.tried)
            self._search(search, samples, started, seconds, on_tune)
        return facts_of(search.record())

    def where(self) -> str:
        """The path of the file with the result."""
        return str(next((path for path in self._memory.tuned_files if path.exists()), self._memory.tuned_files[0]))

    def _search(
        self, search: SkipSearch, samples: Sequence[SkipSample], started: float, seconds: float, on_tune: OnTune
    ) -> None:
        saved = started
        try:
            while (skips := search.propose()) is not None:  # at least one set, or a short search would never begin
                on_tune(facts_of(search.record()), perf_counter() - started)
                search.learn(skips, survival_on(samples, skips))
                if (now := perf_counter()) >= started + seconds:
                    break
                if now >= saved + SAVE_INTERVAL_S:
                    self._memory.write(self._memory.tuned_files, search.record())
                    saved = now
        finally:
            self._memory.write(self._memory.tuned_files, search.record())

    def _samples(self, prompts: Sequence[Prompt], opened: ExitStack) -> list[SkipSample]:
        """For each prompt, a sample with the beginning of the model's greedy reply to it. `opened` closes them."""
        engine, samples = self._model.engine, []
        for prompt in prompts:
            ids = self._model.encode(prompt)
            reply = self._model.generate(prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.0)
            session = opened.enter_context(closing(engine.open_session()))
            while session.length < len(ids):
                chunk = ids[session.length : session.length + session.max_rows()]
                engine.forward([Rows(session, TokenTree.chain(chunk), [len(chunk) - 1])])
                session.commit(range(len(chunk)))
            tokens = list(reply.token_ids)[: session.max_rows()]
            if len(tokens) >= MIN_SAMPLE_TOKENS:
                samples.append(SkipSample(engine, session, tokens))
        if not samples:
            raise UsageError(
                f"no reply has {MIN_SAMPLE_TOKENS} tokens to compare drafts with: give other prompts with --prompts"
            )
        return samples


def facts_of(record: SkipRecord) -> Facts:
    """A record as plain values, for output."""
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
