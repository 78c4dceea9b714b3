"""A generation on the terminal, and what is said about it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.decoding.record import Stats
from ondevice.progress import Progress
from ondevice.reply import Reply, Step
from ondevice.terminal.interrupt import cancel_on_interrupt
from ondevice.terminal.progress_bar import prompt_bar
from ondevice.terminal.reply_view import View

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt

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


def stream_reply(model: Model, prompt: Prompt, options: GenerationKeywords, view: View | None = None) -> Reply:
    """Generate, and show it as it comes. Ctrl-C ends it with the finish reason `cancelled`."""
    steps: list[Step] = []

    def on_prefill(done: int, total: int) -> None:
        (bar.show_below if view and steps else bar.show)(done, total)

    with (
        cancel_on_interrupt(model) as interrupt,
        prompt_bar() as bar,
        model.stream(prompt, **_with_progress(options, on_prefill)) as generation,
    ):
        if interrupt.happened:
            generation.cancel()  # it came before there was anything to cancel
        for step in generation:
            if view:
                view.step(step)
            steps.append(step)
    reply = Reply.of(steps, generation.stats)
    if view:
        view.end(reply)
    return reply


def _with_progress(options: GenerationKeywords, on_prefill: Progress) -> GenerationKeywords:
    return {**options, "on_prefill": on_prefill}


def summary(stats: Stats) -> str:
    """One line: how much, how fast, and what the drafts did for it."""
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
    """The object that `generate --json` prints: `stats` with vLLM's names for drafts, `timings` with llama.cpp's."""
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
    """What was said, and nothing of how long it took."""
    made: dict[str, Any] = {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": [call.as_openai() for call in reply.tool_calls],
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
    }
    if reply.logprobs:
        made["logprobs"] = [
            {"token_id": each.token_id, "logprob": each.logprob, "top": [list(pair) for pair in each.top]}
            for each in reply.logprobs
        ]
    return made
