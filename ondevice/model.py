"""`Model`: a bundle that is loaded and answers. The text layer around the loop."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Generator
from contextlib import closing
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Unpack

from ondevice import __version__, machine
from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, Bundle
from ondevice.decoding import loop
from ondevice.decoding.costs_file import CostsFile
from ondevice.decoding.processors import SuppressTokens
from ondevice.decoding.record import FinishReason, Reply, Round, Stats, Step
from ondevice.decoding.runner import Drafting, Runner, Task
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.draft_bundles import DraftBundles, OpenEngine, find
from ondevice.drafters import registry
from ondevice.drafters.draft_model import DraftSampling
from ondevice.drafters.protocol import Drafter
from ondevice.engines.choice import EngineName, open_engine
from ondevice.engines.process import Process
from ondevice.engines.protocol import Engine, KVCacheType
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.generation import Cancellation, Generation
from ondevice.options import GenerationDefaults, GenerationKeywords, GenerationOptions
from ondevice.preparation import Preparation
from ondevice.progress import OnPrepare, silent
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.prompt import Prompt, encode_prompt
from ondevice.text.stream import TextStream
from ondevice.text.tokenizer import Tokenizer

MAX_SEQUENCES = 4
"""Generations of a model at the same time, where nobody says how many."""

CACHE_BYTES = 1 << 29
"""Of finished sequences, where nobody says how many: eight chats of 4,096 tokens at Gemma 4 E2B's shape."""

MOST_THREADS = 256
"""More would only wait for one another, where there are not as many processors."""

_log = logging.getLogger("ondevice")


class Model:
    """One bundle, one engine, and the sequences that it generates, side by side up to `max_sequences`.

    Several threads may use a model at once. What was learnt about the machine's costs and the drafters' luck stays from
    one generation to the next, and so do finished sequences: a prompt that begins like one is not computed again.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        threads: int,
        load_s: float = 0.0,
        *,
        max_sequences: int = MAX_SEQUENCES,
        cache_bytes: int = CACHE_BYTES,
        costs_file: CostsFile | None = None,
        open_draft: OpenEngine | None = None,
    ) -> None:
        """`load` makes one.

        Args:
            open_draft: opens a draft bundle; None where there can be none.
        """
        self.manifest = bundle.manifest
        self.engine = engine
        self.threads = threads
        self.load_s = load_s
        self.context_length = engine.context_length
        self.last_stats = Stats()
        """Of the generation that began last."""
        self.tokenizer, self._template = _text_side(bundle)
        self.defaults = GenerationDefaults.read(bundle.file(GENERATION_CONFIG), self.manifest.target.vocab_size)
        self._stop_ids = frozenset(self.manifest.eos_token_ids + self.defaults.eos_token_ids)
        self._runner = Runner(engine, max_sequences, cache_bytes, costs_file)
        self._draft_bundles: DraftBundles | None = None
        if open_draft is not None:
            self._draft_bundles = DraftBundles(bundle, open_draft, cache_bytes, self._runner.draft_models)
        self._drafter = registry.AUTO
        self._lock = threading.Lock()
        self._process = Process()
        self._cancellations: list[weakref.ref[Cancellation]] = []

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the engine's memory back. A closed model generates nothing more; running generations are cancelled, and
        the memory comes back when the last one has ended.
        """
        if self._process.is_this_one:
            self._runner.close()
            self.cancel()

    def forget(self) -> None:
        """Drop every text seen so far, from the cache and from what drafters remember; what was learnt about this
        machine's costs and the drafters' luck stays. For privacy, and for benchmarks that repeat a prompt.

        Raises:
            UsageError: a generation is running, or the model is closed.
        """
        self._check_open()
        self._runner.forget()

    def cancel(self) -> None:
        """Stop all generations within one forward, those included that wait for their turn; from any thread. They end
        with finish_reason `cancelled`.
        """
        if not self._process.is_this_one:
            return
        for reference in self._cancellations:
            if (cancellation := reference()) is not None:
                cancellation.requested = True
        self._runner.batch.wake()

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Reply:
        """The whole reply at once. Takes and raises what `stream` does."""
        text: list[str] = []
        token_ids: list[int] = []
        reason: FinishReason = "cancelled"
        with self.stream(prompt, **options) as generation:
            for step in generation:
                text.append(step.text)
                token_ids += step.token_ids
                reason = step.finish_reason or reason
        return Reply("".join(text), tuple(token_ids), reason, generation.stats)

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Generate, a `Step` per round; the last one has a finish_reason.

        Several may run at once, read by several threads or in turn by one: their rows share forwards. Beyond
        `max_sequences` they wait, in the order in which their first steps are asked for.

        Args:
            prompt: text, token ids, or messages (`{"role": ..., "content": ...}`) for the bundle's chat template.
            options: the fields of `GenerationOptions`.

        Raises:
            UsageError: an option that does not exist or fit.
            PromptError: an empty prompt, one with token ids out of range, or one longer than the context.
        """
        cancellation, runner = self._cancellation(), self._runner
        chosen = GenerationOptions.of(options)
        prompt_ids = self.encode(prompt)
        suppressed = self.defaults.suppress_tokens
        own = [SuppressTokens(suppressed)] if suppressed else []
        sampler = Sampler(chosen.sampling(self.defaults), [*own, *(chosen.logits_processors or ())])
        text_stream = self._text_stream(chosen)
        drafting = self._drafting(chosen)

        def cancelled() -> bool:
            return cancellation.requested or runner.closed

        limits = loop.Limits(chosen.max_new_tokens, self._stop_ids, cancelled, chosen.on_prefill or silent)
        stats = Stats(prompt_tokens=len(prompt_ids), load_s=self.load_s, engine=self.engine.name, threads=self.threads)
        rounds = self._runner.rounds(Task(prompt_ids, sampler, limits, drafting, stats))
        self.last_stats = stats
        return Generation(_steps(rounds, text_stream, self._process), stats, cancellation, runner.batch.wake)

    def save_prefix(self, prompt: Prompt, path: str | PathLike[str]) -> int:
        """Read a prompt once and keep what was computed in a file: a system prompt on a small machine, say.

        Messages are saved with the beginning of a reply after them; prompts that go on otherwise share all but that.

        Returns:
            How many tokens were saved.

        Raises:
            PromptError: as `stream` does.
            OSError: the file cannot be written.
        """
        prompt_ids = self.encode(prompt)
        limits = loop.Limits(1, cancelled=lambda: self._runner.closed)
        greedy = Sampler(SamplingOptions(temperature=0.0))
        self._runner.save_prefix(Task(prompt_ids, greedy, limits, Drafting(None, "auto", None), Stats()), path)
        return len(prompt_ids)

    def load_prefix(self, path: str | PathLike[str]) -> int:
        """Take what `save_prefix` wrote: prompts that begin like it are then computed from there on.

        Returns:
            How many tokens it has.

        Raises:
            OSError: the file cannot be read.
            SessionFileError: it is damaged, or belongs to another bundle, engine, KV cache type or version.
        """
        self._check_open()
        return self._runner.load_prefix(path)

    def draft_with(self, drafter: str | PathLike[str], on_prepare: OnPrepare | None = None) -> None:
        """Who drafts from now on where a generation does not say; a draft model is made ready now.

        Args:
            drafter: what `GenerationOptions.drafter` takes, but for an application's own.
            on_prepare: as `load` takes it.

        Raises:
            UsageError: nobody of that name, or no bundle with this model's vocabulary.
            BundleError: a bundle that cannot be trusted.
        """
        self._check_open()
        name = fspath(drafter)
        self._entry(name, on_prepare=on_prepare)
        self._drafter = name

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against vocabulary and context."""
        self._check_open()
        token_ids = encode_prompt(prompt, self.tokenizer, self._template, self.context_length)
        vocab_size = self.manifest.target.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise PromptError(f"token id {token} is out of range: this model has ids 0 to {vocab_size - 1}")
        if len(token_ids) >= self.context_length:
            raise ContextOverflowError(len(token_ids), self.context_length)
        return token_ids

    def _check_open(self) -> None:
        self._process.check()
        if self._runner.closed:
            raise UsageError("this model is closed: load it again")

    def _cancellation(self) -> Cancellation:
        """Of a generation that begins, which `cancel` knows from its first moment on."""
        made = Cancellation()
        with self._lock:
            alive = [reference for reference in self._cancellations if reference() is not None]
            self._cancellations = [*alive, weakref.ref(made)]
        return made

    def _text_stream(self, chosen: GenerationOptions) -> TextStream | None:
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, chosen.stop)
        if chosen.stop:
            raise UsageError("stop strings need a tokenizer, and this bundle has none")
        return None

    def _drafting(self, chosen: GenerationOptions) -> Drafting:
        name, count = chosen.num_assistant_tokens_schedule, chosen.num_assistant_tokens
        drafter = self._drafter if chosen.drafter is None else chosen.drafter
        if isinstance(drafter, PathLike):
            drafter = fspath(drafter)
        shipped = self.manifest.drafter
        if count is None and name != "auto" and shipped is not None and not _is_draft_model(drafter):
            count = shipped.num_assistant_tokens
        if not isinstance(drafter, str):
            return Drafting(drafter, name, count)
        return Drafting(self._entry(drafter, chosen.draft_sampling), name, count)

    def _entry(
        self, drafter: str, sampling: DraftSampling = "coupled", on_prepare: OnPrepare | None = None
    ) -> registry.DrafterEntry | None:
        """Who that is; None for nobody."""
        if self._draft_bundles is not None:
            entry = self._draft_bundles.entry(drafter, sampling, on_prepare)
            if entry is not None:
                return entry
        return None if drafter == registry.NONE else registry.entry(drafter, self.engine)


def _is_draft_model(drafter: str | Drafter) -> bool:
    return isinstance(drafter, str) and registry.draft_bundle(drafter) == drafter


def _steps(
    rounds: Generator[Round, None, None], text_stream: TextStream | None, process: Process
) -> Generator[Step, None, None]:
    """Rounds as text, ended at a stop string.

    A token whose text may be the beginning of a stop string waits with it, so that the ids of a reply do not depend on
    how drafts divide it into rounds.
    """
    waiting: list[int] = []
    given = 0
    with closing(rounds):
        for this in rounds:
            waiting += this.token_ids
            text, reason, final = "", this.finish_reason, given + len(waiting)
            if text_stream is not None:
                text = text_stream.feed(this.token_ids)
                if reason and not text_stream.stopped:
                    text += text_stream.finish()
                if text_stream.stopped:
                    reason = "stop"
                if text_stream.stopped or not reason:
                    final = text_stream.final_tokens
            token_ids, waiting = tuple(waiting[: final - given]), waiting[final - given :]
            given = final
            yield Step(text, token_ids, this.drafted, this.accepted, this.source, this.seconds, reason)
            if reason:
                return
            process.check()


def load(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    context_length: int | None = None,
    kv_cache: KVCacheType = "fp16",
    max_sequences: int = MAX_SEQUENCES,
    cache_bytes: int = CACHE_BYTES,
    drafter: str | PathLike[str] | None = None,
    verify_hashes: bool = False,
    on_prepare: OnPrepare | None = None,
) -> Model:
    """Open a bundle and make it ready to generate.

    Args:
        bundle: a directory, or a name under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`).
        engine: `auto` takes the fastest that runs here.
        threads: most compute threads; None takes the physical cores that this process may use.
        context_length: most tokens of a sequence; None takes the model's own.
        kv_cache: `int8` halves the memory of a long context, on the `simd` engine; `fp16` there is float32 on `ort`.
        max_sequences: generations at the same time, 1 to 16; more wait for their turn.
        cache_bytes: keys and values of finished sequences that are kept for prompts that begin like them; the newest
            stays even where it alone is larger. 0 keeps none. A draft model may keep as much of its own.
        drafter: who drafts where a generation does not say; None is `auto`. A draft bundle's path, or `auto+` and that,
            is opened now, with the same engine and as many threads.
        verify_hashes: compare every file's sha256 first.
        on_prepare: called while kernels are compiled and weights packed, which happens once and takes seconds, with
            what is going on and the share of all that is done, 0 to 1. An exception from it ends the loading.

    Raises:
        BundleError: nothing there, or nothing to trust.
        UsageError: an engine, thread count, context, cache or drafter that does not exist, or a draft bundle with
            another vocabulary.
    """
    started = perf_counter()
    if threads is not None:
        _check_number("threads", threads, 1, max(MOST_THREADS, machine.processors()))
    if context_length is not None:
        _check_number("context_length", context_length, 2)
    _check_number("max_sequences", max_sequences, 1)
    _check_number("cache_bytes", cache_bytes, 0)
    if on_prepare is not None and not callable(on_prepare):
        raise UsageError(f"on_prepare must be a function, not {on_prepare!r:.99}")
    if drafter is not None and not isinstance(drafter, (str, PathLike)):
        raise UsageError(f"drafter must be a name or a path, not {drafter!r:.99}: give your own to a generation")
    opened = Bundle.open(bundle, verify_hashes=verify_hashes)
    if drafter is not None and (location := registry.draft_bundle(fspath(drafter))) is not None:
        find(location, opened)  # before minutes are spent on the model
    count = threads or machine.default_threads()
    if count > (most := machine.processors()):
        _log.warning("more threads (%d) than processors (%d): they will wait for one another", count, most)

    def open_one(which: Bundle, tell: OnPrepare | None, context: int | None) -> Engine:
        with Preparation(tell) as preparation:
            running = open_engine(engine, which, count, context, kv_cache=kv_cache, preparation=preparation)
            try:
                preparation.finish()
            except BaseException:
                running.close()
                raise
        return running

    def open_draft(which: Bundle, tell: OnPrepare | None) -> Engine:
        return open_one(which, tell, min(running.context_length, which.manifest.target.context_length))

    running = open_one(opened, on_prepare, context_length)
    model = Model(
        opened,
        running,
        count,
        perf_counter() - started,
        max_sequences=max_sequences,
        cache_bytes=cache_bytes,
        costs_file=_costs_file(opened, running, count),
        open_draft=open_draft,
    )
    try:
        if drafter is not None:
            model.draft_with(drafter, on_prepare)
    except BaseException:
        model.close()
        raise
    model.load_s = perf_counter() - started
    return model


def _costs_file(bundle: Bundle, engine: Engine, threads: int) -> CostsFile:
    """Where the costs of this bundle stay, on this machine, with this engine and so many threads."""
    weights = hashlib.sha256(repr(sorted(bundle.manifest.files.items())).encode()).hexdigest()
    key = [__version__, machine.processor_name(), weights, engine.name, engine.kv_cache, str(threads)]
    return CostsFile(machine.cache_directory() / "costs", key)


def prepare(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    on_prepare: OnPrepare | None = None,
) -> None:
    """Do now what the first `load` of a bundle on this machine would: compile kernels, pack weights.

    Takes and raises what `load` does.
    """
    load(bundle, engine=engine, threads=threads, on_prepare=on_prepare).close()


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        upper = "on" if most is None else f"to {most}"
        raise UsageError(f"{name} must be a whole number from {least} {upper}, not {value!r:.99}")


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
