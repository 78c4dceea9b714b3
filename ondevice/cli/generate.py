"""`ondevice generate`: complete one prompt, as text or JSON.

`--json-schema` and its siblings constrain the reply; `--compare` generates again without drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.cli.bench.measure import WARM_UP_TOKENS
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.options import (
    add_count,
    add_generation_arguments,
    add_model_arguments,
    generation_options,
    load_model,
)
from ondevice.cli.prompts import add_prompt_arguments, read_json, read_list, read_prompt
from ondevice.cli.terminal.reply_view import (
    DraftsView,
    JsonLinesView,
    TextView,
    content,
    first_difference,
    notice,
    stream_reply,
    summary,
)
from ondevice.cli.terminal.style import note
from ondevice.errors import UsageError
from ondevice.generate.drafters import registry
from ondevice.text.prompt_file import read_text

if TYPE_CHECKING:
    from ondevice.generation import Reply
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

STATS_KEYS = (
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "prefill_s",
    "decode_s",
    "target_s",
    "draft_s",
    "control_s",
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

LENGTH = "256; with --chat, and what implies it, until the context is full"
"""Default of `--max-new-tokens`, in words."""

DRAFTING_OPTIONS = ("drafter", "draft_sampling", "num_assistant_tokens", "num_assistant_tokens_schedule")


def add_arguments(parser: argparse.ArgumentParser, max_new_tokens: str = LENGTH) -> None:
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_generation_arguments(parser, max_new_tokens)
    _add_form_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--watch-drafts",
        action="store_true",
        help="on a terminal with colours: accepted drafts green, tokens that correct a draft magenta, others plain; "
        "then a line with their numbers and the tokens per round",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    group.add_argument(
        "--json-lines", action="store_true", help="print one JSON object per step as it comes, then that of --json"
    )
    add_count(group, "--top-logprobs", text="log-probabilities of each token and of the N most likely ones")
    group.add_argument(
        "--compare", action="store_true", help="generate again without drafts: print the speed-up, compare the tokens"
    )


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    options = generation_options(args)
    if args.tools is not None:
        options["tools"] = read_list(args.tools, "JSON list of functions")
    options["response_format"] = _response_format(args)
    as_objects = args.json or args.json_lines
    _check_options(args, as_objects=as_objects)
    if args.compare:
        options.setdefault("seed", 0)  # two sampled runs can only be compared with the same seed
    extra: dict[str, Any] = {}
    with load_model(args) as model:
        if args.max_new_tokens is None and isinstance(prompt, list) and args.ids is None:  # messages
            options["max_new_tokens"] = model.context_length
        if args.compare:
            _warm_up(model, prompt, options)
        view = _view(args, as_ids=model.tokenizer is None)
        reply = stream_reply(model, prompt, options, view)
        interrupted = reply.finish_reason == "cancelled"
        if isinstance(view, DraftsView):
            note(view.legend(reply.stats))
        if not as_objects:
            note(notice(reply))
            note(summary(reply.stats))
        if args.compare and not interrupted:
            plain = stream_reply(model, prompt, plain_options(options))
            interrupted = plain.finish_reason == "cancelled"
            if not interrupted:
                extra = {"comparison": compare(reply, plain)}
                if not as_objects:
                    note(_comparison_line(extra["comparison"], reply, plain))
    if as_objects:
        print(json.dumps({**as_json(reply), **extra}))
    if interrupted:
        return INTERRUPTED
    return FAILED if extra and not extra["comparison"]["equal"] else 0


def _check_options(args: argparse.Namespace, *, as_objects: bool) -> None:
    """Raise UsageError for options that contradict each other, or would show nothing."""
    if args.compare and args.draft_sampling == "ratio":
        raise UsageError("--compare needs equal tokens, and --draft-sampling ratio changes them: leave one of them out")
    if args.watch_drafts and as_objects:
        raise UsageError("--watch-drafts shows text: leave it out, or leave out --json and --json-lines")
    if args.top_logprobs is not None and not as_objects:
        raise UsageError("--top-logprobs needs --json or --json-lines, which print them: add one of these")


def _view(args: argparse.Namespace, *, as_ids: bool) -> TextView | JsonLinesView | None:
    if args.json_lines:
        return JsonLinesView()
    if args.json:
        return None
    return DraftsView(as_ids=as_ids) if args.watch_drafts else TextView(as_ids=as_ids)


def _warm_up(model: Model, prompt: Prompt, options: GenerationKeywords) -> None:
    """Generate a few tokens with and without drafts, so that one-time costs do not count against the first run."""
    for variant in (options, plain_options(options)):
        shortened: GenerationKeywords = {**variant, "max_new_tokens": WARM_UP_TOKENS}
        model.generate(prompt, **shortened)
    model.forget()


def _add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that constrain the reply by a grammar."""
    group = parser.add_argument_group(
        "form of the answer",
        "Constrains every token; tokens that the form determines are drafted. Needs the extra [grammar].",
    )
    forms = group.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that matches the schema in this file")
    forms.add_argument("--json-object", action="store_true", help="any JSON object")
    forms.add_argument("--regex", metavar="PATTERN", help="text that as a whole matches this regular expression")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeat it for each")
    forms.add_argument("--lark", type=Path, metavar="FILE", help="a grammar in Lark's syntax, as llguidance reads it")
    group.add_argument(
        "--tool-choice",
        type=_tool_choice,
        metavar="MODE",
        help="with --tools: auto allows calls and keeps them to their declarations, required forces a call, none "
        "forbids calls, a function's name forces a call of that function",
    )


def _response_format(args: argparse.Namespace) -> dict[str, Any] | None:
    """The keyword `response_format` of `Model.stream`; None where no form was given.

    Raises:
        PromptError: a file cannot be read, or the schema is not JSON.
    """
    if args.json_schema is not None:
        return {"type": "json_schema", "json_schema": {"schema": read_json(args.json_schema)}}
    if args.json_object:
        return {"type": "json_object"}
    texts = {"lark": args.lark and read_text(args.lark), "regex": args.regex, "choice": args.choice}
    return next(({"type": kind, kind: text} for kind, text in texts.items() if text is not None), None)


def _tool_choice(word: str) -> str | Mapping[str, Any]:
    """Parse `--tool-choice`: a mode, or the name of a function."""
    return word if word in ("auto", "required", "none") else {"type": "function", "function": {"name": word}}


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


def plain_options(options: GenerationKeywords) -> GenerationKeywords:
    """The options of the same generation without drafts."""
    rest = {name: value for name, value in options.items() if name not in DRAFTING_OPTIONS}
    return cast("GenerationKeywords", {**rest, "drafter": registry.NONE})


def compare(drafted: Reply, plain: Reply) -> dict[str, Any]:
    """The object that `--compare --json` prints. The tokens of both replies must be equal."""
    speed, plain_speed = (reply.stats.decode_tokens_per_s for reply in (drafted, plain))
    return {
        "equal": drafted.token_ids == plain.token_ids,
        "speed_up": speed / plain_speed if plain_speed else 0.0,
        "plain_tokens_per_s": plain_speed,
        "drafted_tokens_per_s": speed,
    }


def _comparison_line(comparison: Mapping[str, Any], drafted: Reply, plain: Reply) -> str:
    if comparison["equal"]:
        verdict = f"all {len(plain.token_ids)} tokens equal"
    else:
        at = first_difference(drafted.token_ids, plain.token_ids)
        verdict = f"THE TOKENS DIFFER from number {at + 1} on"
    if not comparison["speed_up"]:
        return f"plain decoding: no tokens after the first to compare the speed of; {verdict}"
    speed = f"plain decoding: {comparison['plain_tokens_per_s']:.1f} tokens/s"
    return f"{speed}, with drafts {comparison['speed_up']:.2f}x as fast; {verdict}"
