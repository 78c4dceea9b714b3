"""`ondevice bench --mtp-bench`: nine prompts, 192 tokens each, as people measure MTP drafters in llama.cpp's threads.

The nine kinds of text, their names, the number of tokens and the columns are those of that list (the pull request
ggml-org/llama.cpp#22673 links to it). The prompts are our own: for its exact texts, give its prompts with `--prompts`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench.measure import (
    PLAIN,
    Configuration,
    Run,
    Variant,
    acceptance_by_position,
    load_variant,
    read_prompts,
    run_in_turns,
)
from ondevice.cli.bench.tables import acceptance_text, footer, setup, table
from ondevice.cli.main import FAILED
from ondevice.cli.prompts import fitting_prompts
from ondevice.cli.terminal.progress import ProgressBar
from ondevice.generate.drafters import registry
from ondevice.generate.stats import DraftCounts

if TYPE_CHECKING:
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

NAMES = (
    "code_python",
    "code_cpp",
    "explain_concept",
    "summarize",
    "qa_factual",
    "translation",
    "creative_short",
    "stepwise_math",
    "long_code_review",
)
"""The kinds of text, in the order of the prompts."""

NEW_TOKENS = 192
"""Default of `--max-new-tokens`; a reply that ends by itself has fewer."""

POSITIONS = 4
"""Draft positions whose acceptance fits into 80 columns; `-o json` has all."""


def run_mtp_list(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    with load_variant(
        args, args.bundle[0], *(each[0] if each else None for each in (args.engine, args.threads))
    ) as model:
        if args.prompts is None:
            prompts: Sequence[Prompt] = read_prompts("mtp", as_chat=CHAT_TEMPLATE in model.manifest.files)[: args.limit]
            names: Sequence[str] = NAMES[: len(prompts)]
            for prompt in prompts:
                model.encode(prompt)
        else:
            prompts = fitting_prompts(model, args)
            names = [str(number) for number in range(1, len(prompts) + 1)]
        offered = [name for name in registry.offered(model.engine) if name != registry.AUTO]
        drafters = [name for name in args.drafters or offered[:1] if name != registry.NONE]
        ways = [Configuration(name, length) for name in drafters for length in args.lengths or ["auto"]]
        variants = [Variant(model, each) for each in (PLAIN, *ways)]
        options: GenerationKeywords = {
            "max_new_tokens": args.max_new_tokens or NEW_TOKENS,
            "temperature": args.temperature or 0.0,
            "seed": args.seed,
        }
        with ProgressBar("mtp-bench", unit="run") as bar:
            total = len(variants) * len(prompts)
            done = iter(range(1, total + 1))
            turns = [*run_in_turns(variants, prompts, options, 1, lambda: bar.show(next(done), total))]
        runs = {variant.configuration: [turn[variant] for turn in turns] for variant in variants}
        facts = setup(model.manifest, model.engine.name, model.threads)
    if args.output == "json":
        records = [record for way, own in runs.items() for record in mtp_records(names, way, own)]
        print(json.dumps({**facts, **options, "rows": records}))
    else:
        shown = [mtp_report(names, f"{way.drafter}, length {way.length}", runs[way], runs[PLAIN]) for way in ways]
        foot = f"temperature {options['temperature']:g}, seed {args.seed}"
        print("\n\n".join([*shown, footer(facts, foot)]))
    texts = {tuple(run.token_ids for run in own) for own in runs.values()}
    return 0 if len(texts) == 1 else FAILED


def mtp_report(names: Sequence[str], drafter: str, runs: Sequence[Run], plain: Sequence[Run]) -> str:
    """A table of the prompts and a line of sums.

    Args:
        names: of the prompts.
        runs, plain: of the drafter and of plain decoding, for every prompt.
    """
    cells = [
        [
            name,
            str(run.stats.new_tokens),
            str(run.stats.num_draft_tokens),
            str(run.stats.num_accepted_tokens),
            _rate(run.stats),
            f"{run.stats.decode_tokens_per_s:.1f}",
            acceptance_text(acceptance_by_position([run.stats])[:POSITIONS], POSITIONS),
        ]
        for name, run in zip(names, runs, strict=True)
    ]
    total = DraftCounts()
    for run in runs:
        total.include(run.stats)
    gain = _seconds(plain) / _seconds(runs) if _seconds(runs) else 0.0
    equal = sum(run.token_ids == other.token_ids for run, other in zip(runs, plain, strict=True))
    return (
        f"{table(['prompt', 'pred', 'draft', 'acc', 'rate', 't/s', 'by position'], cells, {'prompt', 'by position'})}"
        f"\n\n{drafter}: {sum(run.stats.new_tokens for run in runs)} tokens, {total.num_draft_tokens} drafted, "
        f"{total.num_accepted_tokens} accepted, rate {_rate(total)}; {gain:.2f} times plain decoding;\n"
        f"{equal} of {len(runs)} replies with the tokens of plain decoding"
    )


def mtp_records(names: Sequence[str], configuration: Configuration, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A drafter's runs as plain values, for JSON."""
    return [
        {
            "prompt": name,
            "drafter": configuration.drafter,
            "draft_length": configuration.length,
            **run.stats.timings(),
            "acceptance": run.stats.draft_acceptance_rate,
            "acceptance_by_position": acceptance_by_position([run.stats]),
            "tokens_per_round": run.stats.tokens_per_round,
        }
        for name, run in zip(names, runs, strict=True)
    ]


def _rate(counts: DraftCounts) -> str:
    return f"{counts.draft_acceptance_rate:.3f}" if counts.num_draft_tokens else "n/a"


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.stats.decode_s for run in runs)
