"""`Model`: a bundle that is loaded and answers. The text layer around the loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Unpack

from ondevice.async_generation import AsyncGeneration
from ondevice.bundle import GENERATION_CONFIG, TOKENIZER, Bundle
from ondevice.decoding.costs_file import CostsFile
from ondevice.decoding.limits import Limits
from ondevice.decoding.record import Stats
from ondevice.decoding.runner import Drafting, Runner, Task
from ondevice.decoding.sampling import Sampler
from ondevice.decoding.sampling_options import SamplingOptions
from ondevice.draft_bundles import DraftBundles, OpenEngine
from ondevice.drafters import registry
from ondevice.drafters.draft_model import DraftSampling
from ondevice.drafters.protocol import Drafter
from ondevice.engines.process import Process
from ondevice.engines.protocol import Engine
from ondevice.errors import UsageError
from ondevice.generation import Cancellation, Generation
from ondevice.grammar.compiler import Compiler
from ondevice.options import GenerationDefaults, GenerationKeywords, GenerationOptions
from ondevice.progress import OnPrepare, silent
from ondevice.reply import Reply
from ondevice.steps import steps
from ondevice.text.chat_options import ChatOptions, Tool
from ondevice.text.codec import TextCodec
from ondevice.text.prompt import Prompt

MAX_SEQUENCES = 4
"""Generations of a model at the same time, where nobody says how many."""

CACHE_BYTES = 1 << 29
"""Of finished sequences, where nobody says how many: eight chats of 4,096 tokens at Gemma 4 E2B's shape."""


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
        self._codec = TextCodec(bundle)
        self.tokenizer = self._codec.tokenizer
        self.defaults = GenerationDefaults.read(bundle.file(GENERATION_CONFIG), self.manifest.target.vocab_size)
        self._stop_ids = frozenset(self.manifest.eos_token_ids + self.defaults.eos_token_ids)
        self._compiler = Compiler(
            self.tokenizer, bundle.file(TOKENIZER), self.manifest.target.vocab_size, self._stop_ids
        )
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
            self._compiler.close()
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
        with self.stream(prompt, **options) as generation:
            return Reply.of(generation, generation.stats)

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
            GrammarError: a form of the answer that cannot be compiled.
            MissingDependencyError: the extra `[grammar]`, for an answer that has a form.
        """
        cancellation, runner = self._cancellation(), self._runner
        chosen = GenerationOptions.of(options)
        prompt_ids = self._encode(prompt, chosen.chat)
        constraint = self._compiler.constraint(chosen.answer, chosen.choice, chosen.chat.thinks, prompt_ids)
        sampling = chosen.sampling(self.defaults)
        sampling.check_tokens(self.manifest.target.vocab_size)
        sampler = Sampler(
            sampling,
            chosen.logits_processors or (),
            suppressed=[*self.defaults.suppress_tokens, *self._compiler.forbidden(chosen.choice)],
            begins=len(prompt_ids),
            constraint=constraint,
        )
        reply_stream = self._codec.reply_stream(prompt_ids, chosen.stop)
        drafting = self._drafting(chosen, constrained=constraint is not None)

        def cancelled() -> bool:
            return cancellation.requested or runner.closed

        limits = Limits(chosen.max_new_tokens, self._stop_ids, cancelled, chosen.on_prefill or silent)
        stats = Stats(prompt_tokens=len(prompt_ids), load_s=self.load_s, engine=self.engine.name, threads=self.threads)
        task = Task(prompt_ids, sampler, limits, drafting, stats, chosen.wanted_logprobs, chosen.copies)
        rounds = self._runner.rounds(task)
        self.last_stats = stats
        return Generation(steps(rounds, reply_stream, self._process.check), stats, cancellation, runner.batch.wake)

    def astream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> AsyncGeneration:
        """`stream` for `async for`: takes and raises the same, at once."""
        return AsyncGeneration(self.stream(prompt, **options))

    def save_prefix(
        self,
        prompt: Prompt,
        path: str | PathLike[str],
        *,
        tools: Sequence[Tool] | None = None,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> int:
        """Read a prompt once and keep what was computed in a file: a system prompt on a small machine, say.

        Messages are saved with the beginning of a reply after them; prompts that go on otherwise share all but that.

        Args:
            prompt: text, token ids, or messages.
            path: of the file.
            tools, thinking, template_options: as `GenerationOptions` has them.

        Returns:
            How many tokens were saved.

        Raises:
            PromptError: as `stream` does.
            OSError: the file cannot be written.
        """
        prompt_ids = self.encode(prompt, tools=tools, thinking=thinking, template_options=template_options)
        limits = Limits(1, cancelled=lambda: self._runner.closed)
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

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Tool] | None = None,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt, checked against vocabulary and context.

        Args:
            prompt: text, token ids, or messages.
            tools, thinking, template_options: as `GenerationOptions` has them.

        Raises:
            UsageError: options that make no sense, or for a prompt that is no messages.
            PromptError: as `stream` does.
        """
        return self._encode(prompt, ChatOptions(tools, thinking, template_options))

    def _encode(self, prompt: Prompt, chat: ChatOptions) -> list[int]:
        self._check_open()
        return self._codec.encode(prompt, self.context_length, chat)

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

    def _drafting(self, chosen: GenerationOptions, *, constrained: bool) -> Drafting:
        name, count = chosen.num_assistant_tokens_schedule, chosen.num_assistant_tokens
        drafter = self._drafter if chosen.drafter is None else chosen.drafter
        if isinstance(drafter, PathLike):
            drafter = fspath(drafter)
        shipped = self.manifest.drafter
        if count is None and name != "auto" and shipped is not None and not _is_draft_model(drafter):
            count = shipped.num_assistant_tokens
        if not isinstance(drafter, str):
            return Drafting(drafter, name, count)
        entry = self._entry(drafter, chosen.draft_sampling)
        if entry is not None and constrained:
            entry = registry.beside_grammar(entry)
        elif entry is not None and entry.needs_grammar:
            raise UsageError(f"the drafter {entry.name} drafts what a grammar forces: give a response_format as well")
        return Drafting(entry, name, count)

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
