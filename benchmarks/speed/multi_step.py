"""How much time lies between forwards, and how much is left where several run in one call of the kernels?

    python -m benchmarks.speed.multi_step BUNDLE [--repeats N]

A forward that runs by itself is followed by Python: the token is chosen, reported and written for the next forward; and
with drafts, a draft is planned, made step by step, and judged. With `engines.protocol.MultiStep` that is done once
for several forwards, or rounds. All settings take turns, on the same replies. A bundle without an MTP drafter has plain
forwards only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple
from unittest.mock import patch

from tqdm import tqdm

from benchmarks.command import command_line, machine_lines, run_command, whole
from ondevice.arrays import Float32Array
from ondevice.cli.bench.tables import table
from ondevice.generate import loop
from ondevice.generate.controller import NO_ROOM, Controller, RoundPlan
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import DraftRequest
from ondevice.model import Model, load

PROMPTS = (
    "Why is the sky blue? Explain it in detail.",
    "Write a Python function that merges two sorted lists.",
    "A farmer has 17 sheep, buys 5 and sells 9. How many are left? Explain each step.",
    "Write a short story about a lighthouse keeper.",
)
NEW_TOKENS = 100


class DecodeSetting(NamedTuple):
    """How every round runs.

    widths : guesses of each step that are drafted, see `engines.protocol.EngineDrafts`; none without drafts
    at_once : forwards, or rounds, of a call at most
    """

    widths: tuple[int, ...]
    at_once: int


PLAIN = [DecodeSetting((), count) for count in (1, 2, 4, 8, 12)]
DRAFTED = [
    DecodeSetting((1,), 0),
    *(DecodeSetting((1,), count) for count in (1, 4, 8, 12)),
    *(DecodeSetting(widths, 12) for widths in ((2,), (3,), (1, 1), (2, 1), (3, 2))),
]
"""With 0 rounds in a call, the draft is made in Python, and its forward is a call of its own."""


class MultiStepFigures(NamedTuple):
    """Tokens per second and per round, and milliseconds of a round and of its part outside the engine."""

    tokens_per_s: float
    tokens_per_round: float
    round_ms: float
    outside_ms: float


@contextmanager
def always(setting: DecodeSetting) -> Iterator[None]:
    """Let every round run by a setting, whatever it costs."""

    def plan(self: Controller, drafters: Sequence[Any], limit: int, other_rows: int = 0) -> RoundPlan:
        count = min(limit, sum(setting.widths))
        return RoundPlan(drafters[0], count, rounds=[setting.at_once] * count) if count else NO_ROOM

    def widths(self: MtpDrafter, request: DraftRequest) -> tuple[Sequence[int], Float32Array]:
        return (setting.widths if request.nodes == sum(setting.widths) else [1]), self._hidden

    patches: list[Any] = [patch.object(loop, "MOST_AT_ONCE", setting.at_once)]
    if setting.widths:
        patches = [
            patch.object(Controller, "asked", lambda self, drafters: list(drafters)),
            patch.object(Controller, "plan", plan),
            patch.object(MtpDrafter, "widths", widths),
            patch.object(loop, "MOST_AT_ONCE", max(setting.at_once, 2)),
        ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def measure(model: Model, prompt: str, temperature: float, setting: DecodeSetting) -> MultiStepFigures:
    """Decode NEW_TOKENS tokens."""
    with always(setting):
        stats = model.generate(
            [{"role": "user", "content": prompt}],
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=1,
            drafter="mtp" if setting.widths else "none",
        ).stats
    rounds = stats.target_forwards
    outside = stats.decode_s - stats.target_s - stats.draft_s
    return MultiStepFigures(
        stats.decode_tokens_per_s, stats.tokens_per_round, 1e3 * stats.decode_s / rounds, 1e3 * outside / rounds
    )


def report(runs: Mapping[tuple[float, DecodeSetting], Sequence[MultiStepFigures]]) -> str:
    """Markdown: a line for each temperature and setting."""
    rows = []
    for (temperature, setting), found in runs.items():
        alone, best = runs[temperature, PLAIN[0]], runs[temperature, PLAIN[-1]]
        gains = [
            geometric_mean(own.tokens_per_s / other.tokens_per_s for own, other in zip(found, others, strict=True))
            for others in (alone, best)
        ]
        middle = [median(column) for column in zip(*found, strict=True)]
        rows.append(
            [
                f"{temperature:g}",
                " + ".join(map(str, setting.widths)) or "-",
                str(setting.at_once),
                *(f"{value:.2f}" for value in middle[1:]),
                *(f"{gain:.2f}" for gain in gains),
            ]
        )
    titles = [
        "T", "drafts", "rounds in a call", "tokens/round", "ms per round", "outside forward and draft",
        f"of plain, {PLAIN[0].at_once} in a call", f"of plain, {PLAIN[-1].at_once}",
    ]  # fmt: skip
    return table(titles, rows, left=())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=whole(1), default=4, metavar="N", help="turns of each prompt (default: 4)")
    arguments = parser.parse_args()
    runs: dict[tuple[float, DecodeSetting], list[MultiStepFigures]] = {}
    with load(arguments.bundle) as model:
        settings = PLAIN + (DRAFTED if model.manifest.drafter is not None else [])
        with tqdm(total=2 * len(PROMPTS) * arguments.repeats * len(settings), disable=None) as bar:
            for temperature in (0.0, 1.0):
                measure(model, PROMPTS[0], temperature, settings[-1])
                for prompt in PROMPTS * arguments.repeats:
                    for setting in settings:
                        found = measure(model, prompt, temperature, setting)
                        runs.setdefault((temperature, setting), []).append(found)
                        bar.update()
        print(report(runs))
        print()
        print(machine_lines(arguments.bundle.name, model.threads))


if __name__ == "__main__":
    run_command(main)
