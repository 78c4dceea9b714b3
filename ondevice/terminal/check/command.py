"""`ondevice check`: replay prompts plainly and with every drafter, and compare token by token."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ondevice.drafters import registry
from ondevice.terminal.bench.table import table
from ondevice.terminal.check.replay import Difference, Replay, replay
from ondevice.terminal.exit_codes import DIFFERENT
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_drafter_argument, add_model_arguments
from ondevice.terminal.prompt_set import add_prompt_set_arguments, check_limit, fitting_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

GREEDY, SEEDED = "greedy", "seeded"


@dataclasses.dataclass(frozen=True)
class Finding:
    """All prompts with one drafter and one way of choosing tokens; `tokens` were compared."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("prompts")
    add_prompt_set_arguments(group)
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default: 64)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampled replays (default: 0)")
    group = parser.add_argument_group("drafting")
    add_drafter_argument(group, "compare this one only (default: each that the bundle offers)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    check_limit(args)
    with load_model(args) as model:
        findings = _findings(model, args)
        facts = {"bundle": model.manifest.name, "engine": model.engine.name, "threads": model.threads}
    equal = all(finding.equal == finding.prompts for finding in findings)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({**facts, "seed": args.seed, "equal": equal, "rows": rows}))
    else:
        print(report(findings))
    return 0 if equal else DIFFERENT


def report(findings: Sequence[Finding]) -> str:
    """Markdown: what was compared, and every first difference."""
    titles = ["drafter", "tokens chosen", "compared", "drafted", "accepted", "equal"]
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
    lines = [table(titles, cells, left={"drafter", "tokens chosen"}), ""]
    for finding in findings:
        lines += [f"{finding.drafter}, {finding.sampling}: {_line(each)}" for each in finding.differences]
    if all(finding.equal == finding.prompts for finding in findings):
        lines.append("Every reply with drafts is the plain one, token for token.")
    return "\n".join(lines)


def _line(difference: Difference) -> str:
    place = f"prompt {difference.prompt + 1} DIFFERS from token {difference.position + 1} on"
    if difference.logit_gap is None:
        return f"{place}, where one of the two had ended"
    return (
        f"{place}: {difference.drafted} and not {difference.plain}, whose logit is {difference.logit_gap:+.3g} from it"
    )


def _findings(model: Model, args: argparse.Namespace) -> list[Finding]:
    from tqdm import tqdm

    prompts, _ = fitting_prompts(model, args)
    drafters = [args.drafter] if args.drafter else registry.offered(model.engine)
    ways: dict[str, GenerationKeywords] = {
        GREEDY: {"max_new_tokens": args.max_new_tokens, "temperature": 0.0},
        SEEDED: {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "seed": args.seed},
    }
    found = []
    with tqdm(total=2 * len(prompts) * len(drafters), unit="reply", leave=False, disable=None) as bar:
        for sampling, options in ways.items():
            replays = []
            for number, prompt in enumerate(prompts):
                for each in replay(model, number, prompt, drafters, options):
                    replays.append(each)
                    bar.update()
            found += [Finding.of(drafter, sampling, replays) for drafter in drafters]
    return found
