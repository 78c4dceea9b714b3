"""`Model`: a bundle that is loaded and answers. The text layer around the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from ondevice import machine
from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, Bundle
from ondevice.decoding import loop
from ondevice.decoding.costs import Costs
from ondevice.decoding.processors import SuppressTokens
from ondevice.decoding.record import FinishReason, Reply, Round, Stats, Step
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.schedule import Schedule, make_schedule
from ondevice.drafters.fallback import Fallback
from ondevice.drafters.mtp import MtpDrafter
from ondevice.drafters.ngram import NgramDrafter
from ondevice.drafters.protocol import Drafter
from ondevice.engines.choice import EngineName, open_engine
from ondevice.engines.protocol import Engine, KVCacheType
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.options import GenerationDefaults, GenerationOptions
from ondevice.progress import Progress, silent
from ondevice.step_stream import StepStream
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.prompt import Prompt, encode_prompt
from ondevice.text.stream import TextStream
from ondevice.text.tokenizer import Tokenizer

_log = logging.getLogger("ondevice")


class Model:
    """One bundle, one engine, one sequence's cache. Generations of one model come one after another.

    What was learnt about the machine's costs and the drafters' luck stays from one generation to the next, and so does
    the cache: a prompt that begins like the last sequence is not computed again.
    """

    def __init__(self, bundle: Bundle, engine: Engine, threads: int, load_s: float = 0.0) -> None:
        self.manifest = bundle.manifest
        self.engine = engine
        self.threads = threads
        self.load_s = load_s
        self.last_stats = Stats()
        self.tokenizer, self._template = _text_side(bundle)
        self._defaults = GenerationDefaults.read(bundle.file(GENERATION_CONFIG))
        self._stop_ids = frozenset(self.manifest.eos_token_ids + self._defaults.eos_token_ids)
        self._drafters: dict[str, Drafter] = {}
        self._schedules: dict[tuple[str, int | None], Schedule] = {}
        self._costs = Costs()
        self._cached: list[int] = []
        self._cancelled = threading.Event()
        self._busy = threading.Lock()
        self._closed = False

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    def close(self) -> None:
        """Give the engine's memory back. A closed model generates nothing more; a running generation is cancelled, and
        the memory comes back when that has ended.
        """
        self._closed = True
        self._close_engine()

    def forget(self) -> None:
        """Drop every text seen so far, from the cache and from what drafters remember; what was learnt about this
        machine's costs and the drafters' luck stays. For privacy, and for benchmarks that repeat a prompt.

        Raises:
            UsageError: a generation is running, or the model is closed.
        """
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise UsageError("this model is generating: wait for it or cancel it before it can forget")
        try:
            self.engine.rewind(0)
            self._cached = []
            for drafter in self._drafters.values():
                drafter.forget()
        finally:
            self._release()

    def cancel(self) -> None:
        """Stop the running generation within one forward, from any thread; it ends with finish_reason `cancelled`."""
        self._cancelled.set()

    def generate(self, prompt: Prompt, **options: Any) -> Reply:
        """The whole reply at once. Takes and raises what `stream` does."""
        text: list[str] = []
        token_ids: list[int] = []
        reason: FinishReason = "cancelled"
        for step in self.stream(prompt, **options):
            text.append(step.text)
            token_ids += step.token_ids
            reason = step.finish_reason or reason
        return Reply("".join(text), tuple(token_ids), reason, self.last_stats)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Step]:
        """Generate, a `Step` per round; the last one has a finish_reason.

        Args:
            prompt: text, token ids, or messages (`{"role": ..., "content": ...}`) for the bundle's chat template.
            options: the fields of `GenerationOptions`.

        Raises:
            UsageError: an option that does not exist or fit, or a generation is running already.
            PromptError: an empty prompt, one with token ids out of range, or one longer than the context.
        """
        self._check_open()
        chosen = GenerationOptions.of(options)
        token_ids = self.encode(prompt)
        suppressed = self._defaults.suppress_tokens
        own = [SuppressTokens(suppressed)] if suppressed else []
        sampler = Sampler(chosen.sampling(self._defaults), [*own, *chosen.logits_processors])
        text_stream = self._text_stream(chosen)
        drafter = self._drafter(chosen.drafter)
        schedule = None if drafter is None else self._schedule(chosen)
        if not self._busy.acquire(blocking=False):
            raise UsageError("this model is generating already: wait for it, cancel it, or load a second one")
        self._cancelled.clear()
        limits = loop.Limits(chosen.max_new_tokens, self._stop_ids, self._stopped, chosen.on_prefill)
        rounds = self._rounds(token_ids, sampler, limits, drafter, schedule)
        return StepStream(self._steps(rounds, text_stream), self._release)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against vocabulary and context."""
        token_ids = encode_prompt(prompt, self.tokenizer, self._template)
        vocab_size = self.manifest.target.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise PromptError(f"token id {token} is out of range: this model has ids 0 to {vocab_size - 1}")
        if len(token_ids) >= self.context_length:
            raise ContextOverflowError(len(token_ids), self.context_length)
        return token_ids

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this model is closed: load it again")

    def _stopped(self) -> bool:
        return self._closed or self._cancelled.is_set()  # a generation that begins clears the latter

    def _release(self) -> None:
        self._busy.release()
        if self._closed:
            self._close_engine()

    def _close_engine(self) -> None:
        """Close it once, and not under a generation: a closed model stays busy."""
        if self._busy.acquire(blocking=False):
            self.engine.close()

    def _text_stream(self, chosen: GenerationOptions) -> TextStream | None:
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, chosen.stop)
        if chosen.stop:
            raise UsageError("stop strings need a tokenizer, and this bundle has none")
        return None

    def _drafter(self, name: str) -> Drafter | None:
        if name == "none":
            return None
        if name == "mtp" and not self.engine.has_drafter:
            raise UsageError("this bundle has no MTP drafter: use --drafter ngram, or export with --drafter SOURCE")
        if name == "auto" and not self.engine.has_drafter:
            name = "ngram"
        if name not in self._drafters:
            self._drafters[name] = self._make_drafter(name)
        return self._drafters[name]

    def _make_drafter(self, name: str) -> Drafter:
        if name == "mtp":
            return MtpDrafter(self.engine)
        if name == "ngram":
            return NgramDrafter()
        return Fallback(MtpDrafter(self.engine), NgramDrafter(), self._costs.price)

    def _schedule(self, chosen: GenerationOptions) -> Schedule:
        """Kept for later generations with the same options: what it learnt holds for them too."""
        name, count = chosen.num_assistant_tokens_schedule, chosen.num_assistant_tokens
        if count is None and name != "auto" and self.manifest.drafter is not None:
            count = self.manifest.drafter.num_assistant_tokens
        if (name, count) not in self._schedules:
            self._schedules[name, count] = make_schedule(name, count, self._costs)
        return self._schedules[name, count]

    def _rounds(
        self,
        prompt_ids: list[int],
        sampler: Sampler,
        limits: loop.Limits,
        drafter: Drafter | None,
        schedule: Schedule | None,
    ) -> Iterator[Round]:
        """The loop over this model's cache, with the statistics kept."""
        tokens = list(prompt_ids)
        stats = self.last_stats = Stats(prompt_tokens=len(prompt_ids), load_s=self.load_s, engine=self.engine.name)
        stats.drafter = drafter.name if drafter else "none"
        self.engine.rewind(min(_shared(self._cached, prompt_ids), self.engine.length))
        self._cached = []
        try:
            for this in loop.generate(self.engine, prompt_ids, sampler, limits, drafter=drafter, schedule=schedule):
                tokens += this.token_ids
                if not stats.new_tokens:
                    stats.prefill_s, stats.new_tokens = this.seconds, len(this.token_ids)
                elif this.rows:
                    stats.add(this)
                yield this
        finally:
            stats.peak_rss_bytes = machine.peak_rss_bytes()
            # an interrupt may come between a commit and its round
            self.engine.rewind(min(self.engine.length, len(tokens)))
            self._cached = tokens[: self.engine.length]

    def _steps(self, rounds: Iterator[Round], text_stream: TextStream | None) -> Iterator[Step]:
        """Rounds as text, ended at a stop string."""
        seen = 0
        for this in rounds:
            text, token_ids, reason = "", this.token_ids, this.finish_reason
            if text_stream is not None:
                text = text_stream.feed(token_ids)
                if text_stream.stopped:
                    reason = "stop"
                elif reason:
                    text += text_stream.finish()
                if text_stream.stopped:
                    token_ids = token_ids[: max(0, text_stream.kept_tokens - seen)]
            seen += len(this.token_ids)
            yield Step(text, token_ids, this.drafted, this.accepted, this.source, this.seconds, reason)
            if reason:
                return


def load(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    context_length: int | None = None,
    kv_cache: KVCacheType = "fp16",
    verify_hashes: bool = False,
    on_pack: Progress = silent,
) -> Model:
    """Open a bundle and make it ready to generate.

    Args:
        bundle: a directory, or a name under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`).
        engine: `auto` takes the fastest that runs here.
        threads: compute threads; None takes the physical cores that this process may use.
        context_length: most tokens of a sequence; None takes the model's own.
        kv_cache: `int8` halves the memory of a long context, on the `simd` engine; `fp16` there is float32 on `ort`.
        verify_hashes: compare every file's sha256 first.
        on_pack: called while weights are packed for the `simd` engine, which happens once per bundle and takes seconds,
            with the bytes done and their number.

    Raises:
        BundleError: nothing there, or nothing to trust.
        UsageError: an engine, thread count, context or cache that does not exist.
    """
    started = perf_counter()
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be a whole number from 1 on, not {threads}")
    opened = Bundle.open(bundle, verify_hashes=verify_hashes)
    count = threads or machine.default_threads()
    if count > (most := machine.processors()):
        _log.warning("more threads (%d) than processors (%d): they will wait for one another", count, most)
    running = open_engine(engine, opened, count, context_length, kv_cache=kv_cache, on_pack=on_pack)
    return Model(opened, running, count, perf_counter() - started)


def _text_side(bundle: Bundle) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template, as far as the bundle has them."""
    path, template = bundle.file(TOKENIZER), bundle.file(CHAT_TEMPLATE)
    if path is None:
        return None, None
    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(path, manifest.bos_token_id)
    eos = manifest.eos_token_ids[0] if manifest.eos_token_ids else None
    names = {"bos_token": manifest.bos_token_id, "eos_token": eos, "pad_token": manifest.pad_token_id}
    special = {name: tokenizer.text_of(token) for name, token in names.items()}
    return tokenizer, None if template is None else ChatTemplate.from_file(template, special)


def _shared(cached: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Length of the common beginning; the prompt's last token is always computed, for its outputs."""
    most = min(len(cached), len(prompt_ids) - 1)
    for index in range(most):
        if cached[index] != prompt_ids[index]:
            return index
    return most
