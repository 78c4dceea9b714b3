"""A reply on the terminal: views that show it while it is generated, its summary line, JSON, and `--compare`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

from ondevice.cli.progress import cancel_on_interrupt, prompt_bar
from ondevice.cli.style import Style, styled
from ondevice.generate.drafters import registry
from ondevice.generate.stats import Origin, Stats
from ondevice.text.messages import ToolCall

if TYPE_CHECKING:
    from ondevice.generation import Reply, Step
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

STATS_KEYS = (
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "prefill_s",
    "decode_s",
    "load_s",
    "target_forwards",
    "drafted",
    "accepted",
    "drafter",
    "engine",
    "peak_rss_bytes",
    "threads",
    "threads_ran",
    "experts_per_round",
    "rounds_without_draft",
    "fallbacks",
    "costs_age_s",
)
"""Fields of `Stats` that `--json` prints under the same name."""

DRAFTING_OPTIONS = ("drafter", "draft_sampling", "num_assistant_tokens", "num_assistant_tokens_schedule")

ORIGIN_STYLES = {"accepted": Style.ACCEPTED, "corrected": Style.CORRECTED}
"""How `--watch-drafts` shows tokens by their origin; the others are not styled."""


class View(Protocol):
    """Shows a generation: `step` is called for every step, then `end` once with the whole reply."""

    def step(self, step: Step) -> None: ...

    def end(self, reply: Reply) -> None: ...


def stream_reply(model: Model, prompt: Prompt, options: GenerationKeywords, view: View | None = None) -> Reply:
    """Generate a reply, showing it in a view and the prefill of long prompts as a bar.

    Ctrl-C ends the reply with the finish reason `cancelled`.
    """
    from ondevice.generation import Reply

    steps: list[Step] = []

    def on_prefill(done: int, total: int) -> None:
        (bar.show_below if view and steps else bar.show)(done, total)

    with_progress: GenerationKeywords = {**options, "on_prefill": on_prefill}
    with (
        cancel_on_interrupt(model.cancel) as interrupted,
        prompt_bar() as bar,
        model.stream(prompt, **with_progress) as generation,
    ):
        if interrupted.is_set():
            generation.cancel()  # Ctrl-C came before the model had a generation to cancel
        for step in generation:
            if view:
                view.step(step)
            steps.append(step)
    reply = Reply.of(steps, generation.stats)
    if view:
        view.end(reply)
    return reply


class TextView:
    """Prints text on stdout as it comes, tool calls as a line each; thoughts become one dim line on stderr."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """
        Args:
            as_ids: print token ids in the form that `--ids` reads, for a bundle without a tokenizer.
        """
        self._as_ids = as_ids
        self._last = ""
        """The last character on stdout."""
        self._thinking_since = 0.0
        """When the thoughts began, 0 outside of thoughts."""

    def step(self, step: Step) -> None:
        if step.reasoning and not self._thinking_since:
            self._begin_thoughts()
        self._answer(step)
        for call in step.tool_calls:
            self._call(call)

    def end(self, reply: Reply) -> None:
        self._end_thoughts()
        if self._last != "\n":
            print(flush=True)

    def _answer(self, step: Step) -> None:
        """Print the new part of the answer."""
        if self._as_ids and step.token_ids:
            self._write(("," if self._last else "") + ",".join(map(str, step.token_ids)))
        self._write(step.text)

    def _call(self, call: ToolCall) -> None:
        self._write(("" if self._last in ("", "\n") else "\n") + f"{_call_line(call)}\n")

    def _write(self, text: str, style: Style | None = None) -> None:
        if text:
            self._end_thoughts()
            self._last = text[-1]
            sys.stdout.write(text if style is None else styled(text, style, sys.stdout))
            sys.stdout.flush()

    def _begin_thoughts(self) -> None:
        self._thinking_since = perf_counter()
        self._print_dim("(thinking ...", end="")

    def _end_thoughts(self) -> None:
        """Complete the line about thoughts with their duration."""
        if self._thinking_since:
            self._print_dim(f" {perf_counter() - self._thinking_since:.1f} s)", end="\n")
            self._thinking_since = 0.0

    def _print_dim(self, text: str, end: str) -> None:
        print(styled(text, Style.DIM, sys.stderr), end=end, file=sys.stderr, flush=True)


class DraftsView(TextView):
    """A `TextView` that shows on a terminal which tokens were drafted and which drafts were wrong. Without colours,
    standard output gets the same text as from a `TextView`.
    """

    def __init__(self, *, as_ids: bool = False) -> None:
        super().__init__(as_ids=as_ids)
        self._counts: Counter[Origin] = Counter()

    def _answer(self, step: Step) -> None:
        for origin, pieces in groupby(step.pieces, key=lambda piece: piece.origin):
            style, same = ORIGIN_STYLES.get(origin), list(pieces)
            ids = [str(piece.token_id) for piece in same if piece.token_id is not None]
            self._counts[origin] += len(ids)
            if self._as_ids and ids:
                self._write(("," if self._last else "") + ",".join(ids), style)
            self._write("".join(piece.text for piece in same), style)

    def legend(self, stats: Stats) -> str:
        """The line that explains the colours, with the number of tokens of each and the tokens per round, for stderr.

        Args:
            stats: of the whole reply.
        """
        parts = []
        for origin in get_args(Origin):
            text, style = f"{self._counts[origin]} {origin}", ORIGIN_STYLES.get(origin)
            parts.append(text if style is None else styled(text, style, sys.stderr))
        return f"tokens: {', '.join(parts)}; {stats.tokens_per_round:.2f} tokens per round"


class JsonLinesView:
    """Prints one JSON object per step on stdout. The command prints the object of the whole reply."""

    def step(self, step: Step) -> None:
        fields = {"text": step.text, "reasoning": step.reasoning, "token_ids": list(step.token_ids)}
        if step.tool_calls:
            fields["tool_calls"] = [call.as_openai() for call in step.tool_calls]
        print(json.dumps(fields), flush=True)

    def end(self, reply: Reply) -> None:
        pass


def _call_line(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"


def summary(stats: Stats) -> str:
    """One line: tokens, speed, drafts, threads, time to the first token."""
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.decode_tokens_per_s:.1f} tokens/s",
        f"{stats.tokens_per_round:.2f} tokens per round",
    ]
    if stats.drafter == "none":
        parts.append("no drafter")
    elif not stats.drafted:
        parts.append(f"nothing drafted ({stats.drafter})")
    else:
        parts.append(f"{stats.draft_acceptance_rate:.0%} of {stats.drafted} drafted tokens accepted ({stats.drafter})")
    if stats.experts_per_round:
        parts.append(f"{stats.experts_per_round:.1f} experts per layer and round")
    if stats.usual_threads < stats.threads:
        parts.append(f"on {stats.usual_threads} of {stats.threads} threads, which is faster now")
    parts.append(f"first token after {stats.prefill_s:.2f} s ({stats.prompt_tokens} prompt tokens)")
    return ", ".join(parts)


def as_json(reply: Reply) -> dict[str, Any]:
    """The object that `generate --json` prints: `stats` has vLLM's names for drafts, `timings` llama.cpp's."""
    stats = reply.stats
    return {
        **content(reply),
        "stats": {
            **{key: getattr(stats, key) for key in STATS_KEYS},
            **stats.draft_figures(),
            "by_source": {source: counts.draft_figures() for source, counts in stats.by_source.items()},
        },
        "timings": stats.timings(),
    }


def content(reply: Reply) -> dict[str, Any]:
    """The fields of a reply that do not depend on how long it took or what was drafted."""
    fields: dict[str, Any] = {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": [call.as_openai() for call in reply.tool_calls],
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
    }
    if reply.logprobs:
        fields["logprobs"] = [
            {"token_id": each.token_id, "logprob": each.logprob, "top": [list(pair) for pair in each.top]}
            for each in reply.logprobs
        ]
    return fields


def plain_options(options: GenerationKeywords) -> GenerationKeywords:
    """The options of the same generation without drafts."""
    rest = {name: value for name, value in options.items() if name not in DRAFTING_OPTIONS}
    return cast("GenerationKeywords", {**rest, "drafter": registry.NONE})


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Comparison:
    """The replies to one prompt with and without drafts, whose tokens must be equal."""

    drafted: Reply
    plain: Reply

    @property
    def equal(self) -> bool:
        return self.drafted.token_ids == self.plain.token_ids

    @property
    def speed_up(self) -> float:
        """Decoding speed over plain decoding speed; 0.0 where one of them decoded nothing."""
        plain = self.plain.stats.decode_tokens_per_s
        return self.drafted.stats.decode_tokens_per_s / plain if plain else 0.0

    def line(self) -> str:
        plain = f"plain decoding: {self.plain.stats.decode_tokens_per_s:.1f} tokens/s"
        return f"{plain}, with drafts {self.speed_up:.2f}x as fast; {self._verdict()}"

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "speed_up": self.speed_up,
            "plain_tokens_per_s": self.plain.stats.decode_tokens_per_s,
            "drafted_tokens_per_s": self.drafted.stats.decode_tokens_per_s,
        }

    def _verdict(self) -> str:
        if self.equal:
            return f"all {len(self.plain.token_ids)} tokens equal"
        at = first_difference(self.drafted.token_ids, self.plain.token_ids)
        return f"THE TOKENS DIFFER from number {at + 1} on"
