"""`ondevice tune`: search for the attention and MLP blocks that self-speculative drafts can skip on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from ondevice.cli.main import INTERRUPTED
from ondevice.cli.options import add_model_arguments, load_model
from ondevice.cli.prompts import add_prompt_set_arguments, check_counts, fitting_prompts
from ondevice.cli.terminal.progress import PERCENTAGE, ProgressBar
from ondevice.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--seconds", type=float, default=300.0, metavar="N", help="duration of the search (default: %(default).0f)"
    )
    add_prompt_set_arguments(group)
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from ondevice.tuning import Tuning

    check_counts(args)
    if not 0 < args.seconds < math.inf:
        raise UsageError(f"--seconds must be a number above 0, not {args.seconds:g}")
    interrupted = False
    with load_model(args) as model:
        tuning = Tuning(model)
        facts: dict[str, Any] = {}
        prompts = fitting_prompts(model, args)
        with ProgressBar("tuning", unit=" s", bar_format=PERCENTAGE) as bar:

            def show(found: dict[str, Any], spent: float) -> None:
                facts.update(found)
                title = f"tuning, {facts['tried']} tried, best {facts['predicted_speed_up']:.2f}x"
                bar.show(min(round(10 * spent), round(10 * args.seconds) - 1), round(10 * args.seconds), title)

            try:
                facts.update(tuning.run(prompts, args.seconds, show))
            except KeyboardInterrupt:
                interrupted = True
        where = tuning.where()
    if not facts:
        return INTERRUPTED
    print(json.dumps({**facts, "file": where}) if args.json else report(facts))
    print(f"saved in {where}" + ("" if facts["finished"] else ": run it again to continue"), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def report(facts: dict[str, Any]) -> str:
    """The result of a search, of `ondevice.tuning.facts_of`, as text."""
    blocks = " and ".join(f"{name} of layers {_numbers(facts[f'without_{name}'])}" for name in ("attention", "mlp"))
    survival = ", ".join(f"{chance:.2f}" for chance in facts["survival"])
    return "\n".join(
        [
            f"tried {facts['tried']} sets of blocks to skip"
            + (", search complete" if facts["finished"] else ", search not complete"),
            f"best: skip {blocks}",
            f"a draft step takes {facts['draft_share']:.2f} of the time of a plain step",
            f"probability that the first 1, 2, ... drafted tokens are accepted: {survival}",
            f"predicted: {facts['predicted_speed_up']:.2f} times plain decoding; "
            + (
                "--drafter self skips these blocks, auto may"
                if facts["pays"]
                else "too slow for auto; --drafter self tries it all the same"
            ),
        ]
    )


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
