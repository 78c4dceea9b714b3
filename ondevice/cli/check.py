"""`ondevice check`: generate prompts with and without every drafter, greedily and with a seed, and compare all tokens.

In order: the command and its table, the summary of one drafter, the comparison of one prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.cli.bench.tables import table
from ondevice.cli.main import FAILED
from ondevice.cli.options import add_drafter_argument, add_model_arguments, load_model
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts, fitting_prompts
from ondevice.cli.reply_view import first_difference
from ondevice.errors import UsageError
from ondevice.generate.drafters import registry

if TYPE_CHECKING:
    from ondevice.arrays import Float32Array
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

DRAFT_TOKENS = 4
"""Tokens per draft: a fixed number, because a schedule might never draft where it does not pay, which tests nothing."""

GREEDY, SEEDED = "greedy", "seeded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default: 64)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampled replies (default: 0)")
    group = parser.add_argument_group("drafting")
    add_drafter_argument(group, "compare only this drafter (default: each that the bundle offers)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    check_counts(args)
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
    from tqdm import tqdm

    prompts, _ = fitting_prompts(model, args)
    drafters = [args.drafter] if args.drafter else registry.offered(model.engine)
    samplings: dict[str, GenerationKeywords] = {
        GREEDY: {"max_new_tokens": args.max_new_tokens, "temperature": 0.0},
        SEEDED: {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "seed": args.seed},
    }
    findings = []
    with tqdm(total=2 * len(prompts) * len(drafters), unit="reply", leave=False, disable=None) as bar:
        for sampling, options in samplings.items():
            replays = []
            for number, prompt in enumerate(prompts):
                for each in replay(model, number, prompt, drafters, options):
                    replays.append(each)
                    bar.update()
            findings += [Finding.of(drafter, sampling, replays) for drafter in drafters]
    return findings


def report(findings: Sequence[Finding]) -> str:
    """A Markdown table, then a line for every prompt whose tokens differ."""
    titles = ["drafter", "sampling", "compared", "drafted", "accepted", "equal"]
    cells = [
        [
            finding.drafter,
            finding.sampling,
            str(finding.tokens),
            str(finding.num_draft_tokens),
            str(finding.num_accepted_tokens),
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


@dataclass(frozen=True)
class Finding:
    """All prompts with one drafter and one way of sampling.

    tokens : number of tokens of the plain replies, all compared
    equal : number of prompts, of `prompts`, whose tokens are equal
    """

    drafter: str
    sampling: str
    prompts: int
    equal: int
    tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    differences: tuple[Difference, ...]

    @classmethod
    def of(cls, drafter: str, sampling: str, replays: Iterable[Replay]) -> Finding:
        """Sum up those of `replays` that have this drafter."""
        own = [each for each in replays if each.drafter == drafter]
        differences = tuple(each.difference for each in own if each.difference is not None)
        return cls(
            drafter=drafter,
            sampling=sampling,
            prompts=len(own),
            equal=len(own) - len(differences),
            tokens=sum(each.tokens for each in own),
            num_draft_tokens=sum(each.num_draft_tokens for each in own),
            num_accepted_tokens=sum(each.num_accepted_tokens for each in own),
            differences=differences,
        )


@dataclass(frozen=True)
class Replay:
    """One prompt with one drafter; `tokens` is the number of tokens of the plain reply."""

    drafter: str
    tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    difference: Difference | None


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


def replay(
    model: Model, number: int, prompt: Prompt, drafters: Sequence[str], options: GenerationKeywords
) -> Iterator[Replay]:
    """Generate a prompt once without drafts, then with each drafter, and compare the tokens.

    Args:
        number: index of the prompt.
        options: keywords of `Model.stream` except drafting; greedy, or with a seed.
    """
    model.forget()
    without_drafts: GenerationKeywords = {**options, "drafter": registry.NONE}
    plain = model.generate(prompt, **without_drafts).token_ids
    for drafter in drafters:
        model.forget()
        with_drafts: GenerationKeywords = {
            **options,
            "drafter": drafter,
            "num_assistant_tokens": DRAFT_TOKENS,
            "num_assistant_tokens_schedule": "constant",
        }
        reply = model.generate(prompt, **with_drafts)
        stats, drafted = reply.stats, reply.token_ids
        difference = None
        if drafted != plain:
            position = first_difference(plain, drafted)
            one, other = _at(plain, position), _at(drafted, position)
            gap = None
            if one is not None and other is not None:
                gap = _logit_gap(model, [*model.encode(prompt), *plain[:position]], one, other)
            difference = Difference(number, drafter, position, one, other, gap)
        yield Replay(drafter, len(plain), stats.num_draft_tokens, stats.num_accepted_tokens, difference)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _logit_gap(model: Model, context: list[int], one: int, other: int) -> float:
    """The target's logit of token `one` minus that of token `other`, after the tokens of `context`."""
    rows: list[Float32Array] = []

    def capture(logits: Float32Array, context: Sequence[int]) -> Float32Array:
        rows.append(logits.copy())
        return logits

    model.forget()
    model.generate(context, max_new_tokens=1, temperature=0.0, drafter=registry.NONE, logits_processors=[capture])
    return float(rows[0][one] - rows[0][other])
