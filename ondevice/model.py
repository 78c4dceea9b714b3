"""`load` opens a bundle and returns a `Model`, which generates text.

The model joins the layers: the text layer encodes a prompt, the scheduler of the tokens layer runs the draft/verify
loop on an engine, and `generation.py` turns its rounds into steps of text. Order of this file: `load` and `prepare`,
`Model`, the draft models that a model opens.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Unpack, cast

from ondevice import __version__, machine
from ondevice.bundle import GENERATION_CONFIG, Bundle
from ondevice.engines.choice import EngineName, open_engine
from ondevice.engines.protocol import MAX_SESSIONS, AttentionOptions, AttentionType, Engine, KVCacheType
from ondevice.errors import BundleNotFoundError, PromptError, UsageError, shown
from ondevice.forks import ForkGuard
from ondevice.generate.costs import CostsFile
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.draft_model import DraftModel, DraftSampling
from ondevice.generate.drafters.protocol import Drafter
from ondevice.generate.drafters.registry import RegisteredDrafter
from ondevice.generate.request import Limits, SamplingOptions, SoftTokens
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.scheduler import Drafting, GenerationRequest, Scheduler
from ondevice.generate.stats import Stats
from ondevice.generation import AsyncGeneration, Cancellation, Generation, Reply, steps
from ondevice.grammar.matcher import Compiler
from ondevice.native import library
from ondevice.options import GenerationDefaults, GenerationKeywords, GenerationOptions, PromptKeywords, check_whole
from ondevice.preparation import Preparation
from ondevice.progress import OnPrepare, silent
from ondevice.text.codec import Prompt, TextCodec, is_chat, vocabulary_difference
from ondevice.text.media_parts import Audio, Media, media_in, take_media
from ondevice.text.messages import ChatOptions, Message, begun_answer

if TYPE_CHECKING:
    from ondevice.bundle_format.manifest import Manifest
    from ondevice.media.prompt import MediaEncoder
    from ondevice.text.tokenizer import Tokenizer

MAX_SEQUENCES = 4
"""Default number of generations that run at the same time."""

CACHE_BYTES = 1 << 29
"""Default KV-cache budget for finished sequences, in bytes: eight chats of 4,096 tokens at Gemma 4 E2B's shape."""

MEDIA_CACHE_BYTES = 1 << 26
"""Default budget for encoded pictures, in bytes: 39 pictures of 280 tokens at Gemma 4 E2B's shape."""

MAX_THREADS = 256
"""Upper limit of `threads` on machines with fewer processors: more threads would only wait for each other."""

OpenEngine = Callable[[Bundle, OnPrepare | None], Engine]
"""Opens a draft bundle with the engine, threads, context and cache options that the model was loaded with."""

_log = logging.getLogger("ondevice")


def load(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    context_length: int | None = None,
    kv_cache: KVCacheType = "fp16",
    attention: AttentionType = "exact",
    attention_keys: int | None = None,
    attention_width: int = 4,
    max_sequences: int = MAX_SEQUENCES,
    cache_bytes: int = CACHE_BYTES,
    media_cache_bytes: int = MEDIA_CACHE_BYTES,
    drafter: str | PathLike[str] | None = None,
    verify_hashes: bool = False,
    on_prepare: OnPrepare | None = None,
) -> Model:
    """Open a bundle and make it ready to generate.

    Args:
        bundle: a directory, or a name under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`).
        engine: `auto` takes the fastest one that runs this bundle here.
        threads: compute threads at most; None takes the physical cores that this process may use.
        context_length: tokens of a sequence at most; None takes the model's own limit.
        kv_cache: `int8` halves the memory of a long context, on the `simd` engine. On `ort`, `fp16` means float32.
        attention: `lookup` makes long contexts faster, on the `simd` engine: beyond 2,560 tokens, layers of full
            attention attend to the first 32 positions, the newest 512, and those between that table lookups choose.
            The text may differ from that of exact attention; drafts still change nothing. With `lookup-drafts` only the
            drafter looks up and the target is exact, so the text stays the same. `nomad` takes the scores of all
            positions from lookups, for comparison.
        attention_keys: positions to choose, a multiple of 32; None chooses 256 to 2,048, as many as leave out 2 % of a
            row's attention weights, as estimated by the lookups.
        attention_width: numbers of a key that share a code of 4 bits: 1, 2 or 4. With 4, codes take 1/16 of the memory
            of int8 keys; with 1 they are four times as large and more accurate, which `nomad` needs.
        max_sequences: generations at the same time, 1 to 16; more wait for their turn.
        cache_bytes: memory for keys and values of finished sequences, which prompts that begin alike reuse. The newest
            sequence is kept even if it is larger; 0 keeps none. Each draft model gets the same budget of its own.
        media_cache_bytes: memory for encoded pictures, which are not encoded again in another conversation; 0 keeps
            none.
        drafter: drafter of generations that do not name one; None is `auto`. The path of a draft bundle, or `auto+` and
            a path, opens that bundle now, with the same engine and number of threads.
        verify_hashes: compare the sha256 of every file first.
        on_prepare: called while kernels are compiled and weights packed, which happens once and takes seconds, with
            the current stage and the share of all work that is done, 0 to 1. An exception from it ends the loading.

    Raises:
        BundleError: no bundle there, or one that is damaged or not supported.
        UsageError: an engine, thread count, context, cache or drafter that does not exist, or a draft bundle with
            another vocabulary.
    """
    started = perf_counter()
    if threads is not None:
        threads = check_whole("threads", threads, 1, max(MAX_THREADS, machine.processors()))
    if context_length is not None:
        context_length = check_whole("context_length", context_length, 2)
    max_sequences = check_whole("max_sequences", max_sequences, 1, MAX_SESSIONS)
    cache_bytes = check_whole("cache_bytes", cache_bytes, 0)
    media_cache_bytes = check_whole("media_cache_bytes", media_cache_bytes, 0)
    if on_prepare is not None and not callable(on_prepare):
        raise UsageError(f"on_prepare must be a function, not {on_prepare!r:.99}")
    drafter_name = None if drafter is None else _named(drafter)
    attends = AttentionOptions(attention, attention_keys, attention_width)
    opened = Bundle.open(bundle, verify_hashes=verify_hashes)
    if drafter_name is not None and (location := registry.draft_bundle(drafter_name)) is not None:
        find_draft_bundle(location, opened)  # report a wrong one before minutes are spent on the model
    count = threads or machine.default_threads()
    if count > (most := machine.processors()):
        _log.warning("more threads (%d) than processors (%d): they will wait for each other", count, most)

    if (warning := machine.memory_warning(opened.manifest.weight_bytes)) is not None:
        _log.warning("%s: %s", opened.manifest.name, warning)

    def open_one(which: Bundle, on_prepare: OnPrepare | None, context: int | None) -> Engine:
        with Preparation(on_prepare) as preparation:
            made = open_engine(
                engine, which, count, context, kv_cache=kv_cache, attention=attends, preparation=preparation
            )
            try:
                preparation.finish()
            except BaseException:
                made.close()
                raise
        which.mark_used()
        return made

    def open_draft(which: Bundle, on_prepare: OnPrepare | None) -> Engine:
        return open_one(which, on_prepare, min(target.context_length, which.manifest.target.context_length))

    codec = TextCodec(opened)  # before the weights: parsing a tokenizer of 33 MB takes 0.3 GB for a moment
    target = open_one(opened, on_prepare, context_length)
    with ExitStack() as undone:
        undone.callback(target.close)
        model = Model(
            opened,
            target,
            count,
            max_sequences=max_sequences,
            cache_bytes=cache_bytes,
            media_cache_bytes=media_cache_bytes,
            costs_file=_costs_file(opened, target, attention, count),
            open_draft=open_draft,
            codec=codec,
        )
        undone.callback(model.close)
        if drafter_name is not None:
            model.draft_with(drafter_name, on_prepare)
        undone.pop_all()
    model.load_s = perf_counter() - started
    return model


def prepare(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    on_prepare: OnPrepare | None = None,
) -> None:
    """Do now what the first `load` of a bundle on this machine would do: compile kernels and pack weights. Then measure
    what rows and drafts cost here, so that the first reply drafts as well as later ones.

    The arguments and errors are those of `load`.
    """
    with load(bundle, engine=engine, threads=threads, on_prepare=on_prepare) as model:
        model._scheduler.measure_costs()


def _named(drafter: object) -> str:
    """The name or path of a drafter for all generations. Raises UsageError for anything else."""
    name = fspath(drafter) if isinstance(drafter, PathLike) else drafter
    if not isinstance(name, str):
        raise UsageError(f"drafter must be a name or a path, not {shown(drafter)}: pass your own drafter to stream()")
    return name


def _costs_file(bundle: Bundle, engine: Engine, attention: str, threads: int) -> CostsFile:
    """File of the measured costs of this bundle on this machine, with this engine, attention and number of threads, and
    with the instruction set of the kernels, which `$ONDEVICE_KERNELS` may choose.
    """
    weights = hashlib.sha256(repr(sorted(bundle.manifest.files.items())).encode()).hexdigest()
    here = [__version__, machine.processor_name(), library.choice().set]
    key = [*here, weights, engine.name, engine.kv_cache, attention, str(threads)]
    return CostsFile(machine.cache_directory() / "costs", key)


class Model:
    """A loaded bundle. It generates up to `max_sequences` sequences at the same time, for any number of threads.

    Measured costs and the drafters' acceptance rates stay from one generation to the next. Finished sequences stay too:
    the part of a prompt that a kept sequence begins with is not computed again.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        threads: int,
        *,
        max_sequences: int = MAX_SEQUENCES,
        cache_bytes: int = CACHE_BYTES,
        media_cache_bytes: int = MEDIA_CACHE_BYTES,
        costs_file: CostsFile | None = None,
        open_draft: OpenEngine | None = None,
        codec: TextCodec | None = None,
    ) -> None:
        """Called by `load`.

        Args:
            bundle: the target's bundle.
            engine: runs the bundle; the model closes it.
            threads: the engine's compute threads, for statistics.
            max_sequences: generations at the same time.
            cache_bytes: KV-cache budget for finished sequences.
            media_cache_bytes: budget for encoded pictures.
            costs_file: keeps measured costs between processes; None keeps them in this one.
            open_draft: opens a draft bundle; None refuses draft models.
            codec: the bundle's text side; None reads it.
        """
        self.manifest: Manifest = bundle.manifest
        self._bundle = bundle
        self._media: MediaEncoder | None = None
        self._media_cache_bytes = media_cache_bytes
        self.engine = engine
        self.threads = threads
        self.load_s = 0.0  # seconds that loading took, for statistics: `load` measures them
        self.context_length: int = engine.context_length
        self.last_stats: Stats = Stats()
        """Statistics of the generation that began last."""
        self._codec = codec or TextCodec(bundle)
        self.tokenizer: Tokenizer | None = self._codec.tokenizer
        self.defaults: GenerationDefaults = GenerationDefaults.read(
            bundle.file(GENERATION_CONFIG), self.manifest.target.vocab_size
        )
        self._stop_ids = frozenset(self.manifest.eos_token_ids + self.defaults.eos_token_ids)
        self._compiler = Compiler(
            self.tokenizer, self.manifest.target.vocab_size, self._stop_ids, tags=self._codec.tags
        )
        self._scheduler = Scheduler(engine, max_sequences, cache_bytes, costs_file)
        self._draft_bundles: DraftBundles | None = None
        if open_draft is not None:
            self._draft_bundles = DraftBundles(bundle, open_draft, cache_bytes, self._scheduler.draft_models)
        self._drafter = registry.AUTO
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard()
        self._cancellations: list[weakref.ref[Cancellation]] = []

    def __repr__(self) -> str:
        """Name, weights, engine and context: `<ondevice.Model e2b: int4 weights, simd engine, context of 32768>`."""
        manifest = self.manifest
        weights, engine = manifest.weights, self.engine.name
        closed = ", closed" if self._scheduler.closed else ""
        return (
            f"<ondevice.Model {manifest.name}: {weights} weights, {engine} engine, "
            f"context of {self.context_length}{closed}>"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError("a model cannot be pickled: give the bundle's path to the other process, and load it there")

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine's memory. A closed model generates nothing more. Running generations are cancelled, and the
        memory is freed when the last one has ended.
        """
        if self._fork_guard.in_own_process:
            self._scheduler.close()
            self._compiler.close()
            self.cancel()

    def forget(self) -> None:
        """Drop every text and picture seen so far, from the caches and from the drafters' memory. Measured costs and
        acceptance rates stay. For privacy, and for benchmarks that repeat a prompt.

        Raises:
            UsageError: if a generation is running, or the model is closed.
        """
        self._check_open()
        self._scheduler.forget()
        if self._media is not None:
            self._media.forget()

    def cancel(self) -> None:
        """Stop all generations within one forward, waiting ones included. They end with the finish_reason `cancelled`.
        Callable from any thread.
        """
        if not self._fork_guard.in_own_process:
            return
        for reference in self._cancellations:
            if (cancellation := reference()) is not None:
                cancellation.requested = True
        self._scheduler.batch.wake()

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Reply:
        """Generate the whole reply. The arguments and errors are those of `stream`."""
        with self.stream(prompt, **options) as generation:
            return Reply.of(generation, generation.stats)

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Generate one `Step` per round; the last step has a finish_reason.

        Several generations can run at the same time, read by several threads or alternately by one: their rows share
        forwards. Beyond `max_sequences` they wait, in the order in which their first steps are asked for.

        Args:
            prompt: text, token ids, or messages (`{"role": ..., "content": ...}`) for the bundle's chat template.
            options: the fields of `GenerationOptions`.

        Returns:
            The generation to iterate over. Nothing is computed before its first step is asked for.

        Raises:
            UsageError: an option that does not exist, or does not fit another one.
            PromptError: an empty prompt, one with token ids out of range, one longer than the context, or a picture
                or sound that cannot be read.
            GrammarError: a `response_format` or `tool_choice` that cannot be compiled.
            MissingDependencyError: a `response_format` or `tool_choice` without the extra `[grammar]` installed, a
                picture without `[images]`, or a sound that is no WAV file without `[audio]`.
            BundleCorruptError: from the generation's steps: the model computes NaN or infinity in place of logits.
        """
        cancellation, scheduler = self._cancellation(), self._scheduler
        chosen = GenerationOptions.of(options)
        prompt_ids, soft = self._encode(prompt, chosen.chat, chosen.image_tokens)
        if soft and chosen.prompt_logprobs:
            raise UsageError("prompt_logprobs is for text: the tokens of pictures and sounds have no probability")
        begun = begun_answer(cast("Sequence[Message]", prompt)) if chosen.continue_final else ""
        constraint = self._compiler.constraint(chosen.answer, chosen.choice, chosen.chat.thinks, prompt_ids, begun)
        if chosen.ignore_eos and constraint is not None:
            raise UsageError("ignore_eos excludes the tokens that end an answer of this form: leave one of them out")
        sampling = chosen.sampling(self.defaults)
        sampling.check_tokens(self.manifest.target.vocab_size)
        sampler = Sampler(
            sampling,
            chosen.logits_processors or (),
            suppressed=[
                *self.defaults.suppress_tokens,
                *self._compiler.forbidden(chosen.choice),
                *(self._placeholders() if soft else ()),
                *(self._stop_ids if chosen.ignore_eos else ()),
            ],
            begins=len(prompt_ids),
            constraint=constraint,
        )
        reply_stream = self._codec.reply_stream(
            prompt_ids,
            chosen.stop,
            is_chat=is_chat(prompt),
            single_call=not chosen.parallel_tool_calls,
            continues=chosen.continue_final,
            calls=chosen.answer is None or chosen.choice.allows_calls,
            tools=chosen.tools or (),
        )
        drafting = self._drafting(chosen, constrained=constraint is not None)

        def cancelled() -> bool:
            return cancellation.requested or scheduler.closed

        limits = Limits(chosen.max_new_tokens, self._stop_ids, cancelled, chosen.on_prefill or silent)
        stats = Stats(prompt_tokens=len(prompt_ids), load_s=self.load_s, engine=self.engine.name, threads=self.threads)
        request = GenerationRequest(
            prompt_ids,
            sampler,
            limits,
            drafting,
            stats,
            chosen.wanted_logprobs,
            chosen.wanted_prompt_logprobs,
            chosen.copies,
            soft,
        )
        rounds = self._scheduler.rounds(request)
        self.last_stats = stats
        return Generation(
            steps(rounds, reply_stream, stats, self._fork_guard.check), stats, cancellation, scheduler.batch.wake
        )

    def astream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> AsyncGeneration:
        """`stream` for `async for`. The arguments are the same, and errors are raised by the call itself."""
        return AsyncGeneration(self.stream(prompt, **options))

    def save_prefix(
        self,
        prompt: Prompt,
        path: str | PathLike[str],
        **options: Unpack[PromptKeywords],
    ) -> int:
        """Compute a prompt's keys and values and save them in a file, for example of a long system prompt.

        For messages, the tokens that begin a reply are saved too. A prompt that continues differently reuses everything
        before them.

        Args:
            prompt: text, token ids, or messages.
            path: the file to write.
            options: as in `encode`.

        Returns:
            The number of saved tokens.

        Raises:
            UsageError, PromptError: as `encode` does.
            OSError: the file cannot be written.
        """
        chosen = GenerationOptions.of(options, PromptKeywords.__annotations__)
        prompt_ids, soft = self._encode(prompt, chosen.chat, chosen.image_tokens)
        limits = Limits(1, cancelled=lambda: self._scheduler.closed)
        greedy = Sampler(SamplingOptions(temperature=0.0))
        self._scheduler.save_prefix(
            GenerationRequest(prompt_ids, greedy, limits, Drafting(None, "auto", None), Stats(), soft=soft), path
        )
        return len(prompt_ids)

    def load_prefix(self, path: str | PathLike[str]) -> int:
        """Load a file that `save_prefix` wrote. Prompts that begin with its tokens are then computed from there on.

        Returns:
            The number of tokens in it.

        Raises:
            OSError: the file cannot be read.
            SessionFileError: a damaged file, or one of another bundle, engine, KV cache type or version.
        """
        self._check_open()
        return self._scheduler.load_prefix(path)

    def draft_with(self, drafter: str | PathLike[str], on_prepare: OnPrepare | None = None) -> None:
        """Set the drafter of later generations that do not name one. A draft model is opened now.

        Args:
            drafter: a name or path, as in `GenerationOptions.drafter`; not an application's own drafter.
            on_prepare: reports the preparation of a draft model, as in `load`.

        Raises:
            UsageError: an unknown name, or a path without a bundle of this model's vocabulary.
            BundleError: a draft bundle that is damaged or not supported.
        """
        self._check_open()
        name = _named(drafter)
        self._entry(name, on_prepare=on_prepare)
        self._drafter = name

    def encode(self, prompt: Prompt, **options: Unpack[PromptKeywords]) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context length.

        A picture's soft tokens, which have no ids, are the token that stands for a picture, once for each. Pictures are
        not decoded.

        Args:
            prompt: text, token ids, or messages.
            options: `tools`, `thinking`, `template_options` and `continue_final` for a prompt of messages, and
                `image_tokens`; see `GenerationOptions`.

        Raises:
            UsageError: invalid options, or options of a chat for a prompt that is not messages.
            PromptError: as `stream` does.
        """
        chosen = GenerationOptions.of(options, PromptKeywords.__annotations__)
        ids, media, encoder = self._encode_text(prompt, chosen.chat)
        return ids if encoder is None else encoder.counted(ids, media, chosen.image_tokens, self.context_length)

    def _encode(
        self, prompt: Prompt, chat: ChatOptions, image_tokens: int | None
    ) -> tuple[list[int], Sequence[SoftTokens]]:
        """The ids of a prompt, and the soft tokens among them."""
        ids, media, encoder = self._encode_text(prompt, chat)
        return (ids, ()) if encoder is None else encoder.insert(ids, media, image_tokens, self.context_length)

    def _encode_text(self, prompt: Prompt, chat: ChatOptions) -> tuple[list[int], list[Media], MediaEncoder | None]:
        """The ids of a prompt with a placeholder for each picture and sound, these, and what encodes them; None where
        the prompt has neither.
        """
        self._check_open()
        media: list[Media] = []
        if is_chat(prompt):
            if not self.manifest.reads_media and any(map(media_in, prompt)):
                raise PromptError(
                    "this bundle reads text only: export it again, without --text-only, if its checkpoint is a Gemma 4 "
                    "with towers for pictures or sounds"
                )
            prompt, media = take_media(prompt)
            self._check_towers(media)
        ids = self._codec.encode(prompt, self.context_length, chat)
        if not media and not set(self._placeholders()).intersection(ids):
            return ids, [], None
        with self._lock:
            if self._media is None:
                from ondevice.media.prompt import MediaEncoder

                self._media = MediaEncoder(
                    self._bundle, self.threads, self._media_cache_bytes, self.engine.most_rows, self.tokenizer
                )
        return ids, media, self._media

    def _check_towers(self, media: Sequence[Media]) -> None:
        """Check that this bundle has the towers that pictures and sounds need."""
        heard = [isinstance(medium, Audio) for medium in media]
        for name, needed, tower in (
            ("audio", any(heard), self.manifest.audio),
            ("vision", not all(heard), self.manifest.vision),
        ):
            if needed and tower is None:
                raise PromptError(
                    f"this bundle has no {name} tower: export it again, without --text-only, if its checkpoint has one"
                )

    def _placeholders(self) -> list[int]:
        """The tokens that stand for pictures, sounds and videos. A reply must not contain them."""
        vision, audio = self.manifest.vision, self.manifest.audio
        found = [None if vision is None else vision.image_token_id, None if audio is None else audio.audio_token_id]
        return [token for token in found if token is not None]

    def _check_open(self) -> None:
        self._fork_guard.check()
        if self._scheduler.closed:
            raise UsageError("this model is closed: load it again")

    def _cancellation(self) -> Cancellation:
        """Register a new generation's cancellation, before the generation is made, so that `cancel` always sees it."""
        made = Cancellation()
        with self._lock:
            alive = [reference for reference in self._cancellations if reference() is not None]
            self._cancellations = [*alive, weakref.ref(made)]
        return made

    def _drafting(self, chosen: GenerationOptions, *, constrained: bool) -> Drafting:
        schedule, count = chosen.num_assistant_tokens_schedule, chosen.num_assistant_tokens
        drafter = self._drafter if chosen.drafter is None else chosen.drafter
        assert not isinstance(drafter, PathLike)  # the options have made a string of a path
        has_draft_model = isinstance(drafter, str) and registry.draft_bundle(drafter) is not None
        if chosen.draft_sampling != "coupled" and not has_draft_model:
            raise UsageError("draft_sampling is for a draft model: leave it out, or give a draft bundle as drafter")
        shipped = self.manifest.drafter
        if count is None and schedule != "auto" and shipped is not None and not _is_draft_model(drafter):
            count = shipped.num_assistant_tokens
        if not isinstance(drafter, str):
            return Drafting(drafter, schedule, count)
        entry = self._entry(drafter, chosen.draft_sampling)
        if entry is not None and constrained:
            entry = registry.with_grammar(entry)
        elif entry is not None and entry.needs_grammar:
            raise UsageError(f"the drafter {entry.name} drafts what a grammar forces: give a response_format as well")
        return Drafting(entry, schedule, count)

    def _entry(
        self, drafter: str, sampling: DraftSampling = "coupled", on_prepare: OnPrepare | None = None
    ) -> RegisteredDrafter | None:
        """The registry entry of a drafter's name or path; None for `none`."""
        if self._draft_bundles is not None:
            entry = self._draft_bundles.entry(drafter, sampling, on_prepare)
            if entry is not None:
                return entry
        return None if drafter == registry.NONE else registry.entry(drafter, self.engine)


# Draft models: second bundles with the target's vocabulary, opened once per model.


@dataclass(frozen=True)
class DraftBundles:
    """Opens draft bundles for a target's model, each once.

    target : the bundle whose vocabulary they must share
    open_engine : opens a draft bundle
    cache_bytes : KV-cache budget for finished sequences, for each draft model
    opened : every draft model is appended here; the scheduler owns the list and closes them
    """

    target: Bundle
    open_engine: OpenEngine
    cache_bytes: int
    opened: list[DraftModel]
    _by_location: dict[str, DraftModel] = field(default_factory=dict)
    """Opened draft models by their path, as it was given."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a bundle is opened, so that two generations that ask for the same one share it."""

    def entry(
        self, drafter: str, sampling: DraftSampling = "coupled", on_prepare: OnPrepare | None = None
    ) -> RegisteredDrafter | None:
        """The registry entry for a value of `--drafter` with a draft bundle in it; None if it names no bundle.

        Raises:
            UsageError: no bundle there, another vocabulary, or `ratio` sampling beside other drafters.
            BundleError: a bundle that is damaged or not supported.
        """
        if (location := registry.draft_bundle(drafter)) is None:
            return None
        return registry.with_draft_model(drafter, self._model(location, on_prepare), sampling)

    def _model(self, location: str, on_prepare: OnPrepare | None) -> DraftModel:
        with self._lock:
            if location not in self._by_location:
                bundle = find_draft_bundle(location, self.target)
                name = f"draft:{bundle.path.resolve().name}"
                share = max(_graph_bytes(bundle), 1) / max(_graph_bytes(self.target), 1)
                model = DraftModel(self.open_engine(bundle, on_prepare), name, self.cache_bytes, share)
                self.opened.append(model)
                self._by_location[location] = model
            return self._by_location[location]


def find_draft_bundle(location: str, target: Bundle) -> Bundle:
    """Open the bundle at a path or under a name, and compare its vocabulary with the target's.

    Raises:
        UsageError: no bundle there, as after a misspelt drafter name; or token ids that mean something else.
        BundleError: a bundle that is damaged or not supported.
    """
    try:
        bundle = Bundle.open(location)
    except BundleNotFoundError as error:
        names = ", ".join(registry.names())
        raise UsageError(
            f"drafter must be one of {names}, a draft bundle's directory, or auto+ and that: "
            f"there is no bundle at {location!r:.199}"
        ) from error
    if (difference := vocabulary_difference(bundle, target)) is not None:
        raise UsageError(f"{location} cannot draft for this model: {difference}")
    return bundle


def _is_draft_model(drafter: str | Drafter) -> bool:
    return isinstance(drafter, str) and registry.draft_bundle(drafter) == drafter


def _graph_bytes(bundle: Bundle) -> int:
    """Size of the target's graph and weights."""
    graph = bundle.manifest.target.graph
    return sum(file.size for name, file in bundle.manifest.files.items() if name.startswith(graph))
