"""`ondevice generate`: continue one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ondevice.errors import UsageError
from ondevice.terminal import answer_form, prompt_input
from ondevice.terminal.comparison import Comparison, plain_options
from ondevice.terminal.exit_codes import DIFFERENT, INTERRUPTED
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_generation_arguments, add_model_arguments, generation_options
from ondevice.terminal.reply import as_json, stream_reply, summary
from ondevice.terminal.reply_view import JsonLinesView, TextView

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt

WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    prompt_input.add_arguments(parser)
    add_generation_arguments(parser)
    answer_form.add_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    group.add_argument("--json-lines", action="store_true", help="and before it one for every step, a line each")
    group.add_argument("--top-logprobs", type=int, metavar="N", help="how likely each token was, and the N likeliest")
    group.add_argument("--compare", action="store_true", help="generate again without drafts: speed-up, equal tokens")


def run(args: argparse.Namespace) -> int:
    prompt = prompt_input.read_prompt(args)
    options = generation_options(args)
    if args.tools is not None:
        options["tools"] = prompt_input.read_tools(args.tools)
    options["response_format"] = answer_form.response_format(args)
    options["tool_choice"] = answer_form.tool_choice(args)
    as_objects = args.json or args.json_lines
    if args.compare and args.draft_sampling == "ratio":
        raise UsageError("--compare compares tokens, and --draft-sampling ratio draws others: leave one of them out")
    if args.compare:
        options.setdefault("seed", 0)  # without one, two sampled runs say nothing about each other
    comparison = None
    with load_model(args) as model:
        if args.compare:
            _warm_up(model, prompt, options)
        view = None if args.json else TextView(as_ids=model.tokenizer is None)
        reply = stream_reply(model, prompt, options, JsonLinesView() if args.json_lines else view)
        interrupted = reply.finish_reason == "cancelled"
        if not as_objects:
            print(summary(reply.stats), file=sys.stderr)
        if args.compare and not interrupted:
            plain = stream_reply(model, prompt, plain_options(options))
            interrupted = plain.finish_reason == "cancelled"
            comparison = None if interrupted else Comparison(reply, plain)
    if as_objects:
        extra = {"comparison": comparison.as_json()} if comparison else {}
        print(json.dumps({**as_json(reply), **extra}))
    elif comparison:
        print(comparison.line(), file=sys.stderr)
    if interrupted:
        return INTERRUPTED
    return DIFFERENT if comparison and not comparison.equal else 0


def _warm_up(model: Model, prompt: Prompt, options: GenerationKeywords) -> None:
    """What only the first generation pays for must not count against whichever run comes first."""
    for variant in (options, plain_options(options)):
        shortened: GenerationKeywords = {**variant, "max_new_tokens": WARM_UP_TOKENS}
        model.generate(prompt, **shortened)
    model.forget()
