"""`ondevice check`: generate prompts with and without every drafter, greedily and with a seed, and compare all tokens.

With `--against`, `quality.py` compares the bundle's distributions with those of another model instead. In order: the
command and its table, the findings, the first difference of two replies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.cli.bench.measure import PLAIN, Configuration, run_prompt
from ondevice.cli.bench.tables import table
from ondevice.cli.main import FAILED
from ondevice.cli.options import add_count, add_drafter_argument, add_model_arguments, load_model
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts, fitting_prompts
from ondevice.cli.quality import compare
from ondevice.cli.terminal.reply_view import first_difference
from ondevice.errors import UsageError
from ondevice.generate.drafters import registry

if TYPE_CHECKING:
    from ondevice.arrays import Float32Array
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

NEW_TOKENS = 64
"""Default of `--max-new-tokens`."""

DRAFTS_OPTIONS = ("prompts", "limit", "drafter", "max_new_tokens", "seed")
"""Options that only the comparison of drafters has."""

DRAFT_TOKENS = "4"
"""Tokens per draft: a fixed number, because a schedule might never draft where it does not pay, which tests nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    add_count(group, "--max-new-tokens", text=f"per prompt (default: {NEW_TOKENS})")
    add_count(group, "--seed", text="seed of the sampled replies (default: 0)")
    group = parser.add_argument_group("drafting")
    add_drafter_argument(group, "compare only this drafter (default: each that the bundle offers)")
    group = parser.add_argument_group(
        "quality", "Instead of comparing drafters, measure what the rounding of the weights has changed."
    )
    group.add_argument(
        "--against",
        metavar="REFERENCE",
        help="compare the distributions of the next token with those of REFERENCE: a checkpoint's directory or hub id "
        "or a GGUF file, run in float32, or another bundle",
    )
    group.add_argument("--text", type=Path, metavar="FILE", help="the text to compare on (default: a built-in one)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    if args.against is not None:
        if any(getattr(args, name) is not None for name in DRAFTS_OPTIONS):
            raise UsageError(
                "--against runs a text, not prompts with drafters: leave --prompts, --limit and --drafter out, as well "
                "as --max-new-tokens and --seed"
            )
        return compare(args)
    if args.text is not None:
        raise UsageError("--text is for --against: add it, or name prompts with --prompts")
    check_counts(args)
    args.max_new_tokens, args.seed = args.max_new_tokens or NEW_TOKENS, args.seed or 0
    if args.drafter == registry.NONE:
        raise UsageError("--drafter none makes no drafts to compare: name another one, or leave it out for all")
    with load_model(args) as model:
        findings = _compare_all(model, args)
        facts = {"bundle": model.manifest.name, "engine": model.engine.name, "threads": model.threads}
    equal = all(finding.equal == finding.prompts for finding in findings)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({**facts, "seed": args.seed, "equal": equal, "rows": rows}))
    else:
        print(report(findings))
    return 0 if equal else FAILED


def _compare_all(model: Model, args: argparse.Namespace) -> list[Finding]:
    """Generate every prompt without drafts, then with each drafter, and compare the tokens."""
    from tqdm import tqdm

    prompts = fitting_prompts(model, args)
    drafters = [args.drafter] if args.drafter else registry.offered(model.engine)
    samplings: dict[str, GenerationKeywords] = {
        "greedy": {"max_new_tokens": args.max_new_tokens, "temperature": 0.0},
        "seeded": {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "seed": args.seed},
    }
    findings = []
    with tqdm(total=2 * len(prompts) * len(drafters), unit="reply", leave=False, disable=None) as bar:
        for sampling, options in samplings.items():
            own = [Finding(drafter, sampling) for drafter in drafters]
            findings += own
            for number, prompt in enumerate(prompts):
                plain = run_prompt(model, prompt, PLAIN, options).token_ids
                for finding in own:
                    run = run_prompt(model, prompt, Configuration(finding.drafter, DRAFT_TOKENS), options)
                    finding.prompts += 1
                    finding.tokens += len(plain)
                    finding.num_draft_tokens += run.stats.num_draft_tokens
                    finding.num_accepted_tokens += run.stats.num_accepted_tokens
                    if run.token_ids == plain:
                        finding.equal += 1
                    else:
                        place = _place(model, prompt, plain, run.token_ids)
                        finding.differences.append(Difference(number, finding.drafter, *place))
                    bar.update()
    return findings


def report(findings: Sequence[Finding]) -> str:
    """A Markdown table, then a line for every prompt whose tokens differ."""
    titles = ["drafter", "sampling", "compared", "drafted", "accepted", "equal"]
    cells = [
        [
            finding.drafter,
            finding.sampling,
            *map(str, (finding.tokens, finding.num_draft_tokens, finding.num_accepted_tokens)),
            f"{finding.equal}/{finding.prompts}",
        ]
        for finding in findings
    ]
    lines = [table(titles, cells, left={"drafter", "sampling"}), ""]
    for finding in findings:
        lines += [f"{finding.drafter}, {finding.sampling}: {_line(each)}" for each in finding.differences]
    if all(finding.equal == finding.prompts for finding in findings):
        lines.append("Every reply with drafts equals the plain one, token for token.")
    return "\n".join(lines)


def _line(difference: Difference) -> str:
    place = f"prompt {difference.prompt + 1} DIFFERS from token {difference.position + 1} on"
    if difference.logit_gap is None:
        return f"{place}, where one of the replies has ended"
    return (
        f"{place}: {difference.drafted} with drafts, {difference.plain} without, whose logit is "
        f"{difference.logit_gap:+.3g} higher"
    )


@dataclass
class Finding:
    """All prompts with one drafter and one way of sampling.

    equal : number of prompts, of `prompts`, whose tokens are equal
    tokens : number of tokens of the plain replies, all compared
    """

    drafter: str
    sampling: str
    prompts: int = 0
    equal: int = 0
    tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The first token at which a drafted reply differs from the plain one.

    prompt : index of the prompt
    position : index among the generated tokens
    plain, drafted : the two token ids at `position`; None where that reply has ended
    logit_gap : logit of `plain` minus logit of `drafted`, from a new prefill of all tokens before; None where one of
        the replies has ended
    """

    prompt: int
    drafter: str
    position: int
    plain: int | None
    drafted: int | None
    logit_gap: float | None


def _place(
    model: Model, prompt: Prompt, plain: Sequence[int], drafted: Sequence[int]
) -> tuple[int, int | None, int | None, float | None]:
    """`position`, `plain`, `drafted` and `logit_gap` of the `Difference` of two unequal replies."""
    position = first_difference(plain, drafted)
    one, other = (tokens[position] if position < len(tokens) else None for tokens in (plain, drafted))
    if one is None or other is None:
        return position, one, other, None
    return position, one, other, _logit_gap(model, [*model.encode(prompt), *plain[:position]], one, other)


def _logit_gap(model: Model, context: list[int], one: int, other: int) -> float:
    """The target's logit of token `one` minus that of token `other`, after the tokens of `context`."""
    rows: list[Float32Array] = []

    def capture(logits: Float32Array, context: Sequence[int]) -> Float32Array:
        rows.append(logits.copy())
        return logits

    model.forget()
    model.generate(context, max_new_tokens=1, temperature=0.0, drafter=registry.NONE, logits_processors=[capture])
    return float(rows[0][one] - rows[0][other])
