"""How much of plain decoding's time lies between its forwards, and how much is left where several run in one call?

    python -m benchmarks.speed.multi_step BUNDLE [--repeats N]

A forward that runs by itself is followed by Python: the token is chosen, reported and written for the next forward.
With `engines.protocol.Continuation` that is done once for several forwards. All numbers of forwards take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from benchmarks.command import command_line, machine_lines
from ondevice.cli.bench.tables import table
from ondevice.generate import loop
from ondevice.model import Model, load

AT_ONCE = (1, 2, 4, 8)
"""Most forwards of one call."""
PROMPT_TOKENS = 64
NEW_TOKENS = 100


class Times(NamedTuple):
    """Milliseconds per token of a reply, and those of them in which the target's forwards ran."""

    token: float
    forward: float


def measure(model: Model, temperature: float) -> Times:
    """Decode NEW_TOKENS tokens."""
    prompt = np.random.default_rng(0).integers(0, model.manifest.target.vocab_size, PROMPT_TOKENS).tolist()
    stats = model.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=1, drafter="none").stats
    return Times(*(1e3 * seconds / stats.target_forwards for seconds in (stats.decode_s, stats.target_s)))


def report(runs: Mapping[tuple[float, int], Sequence[Times]]) -> str:
    """Markdown: a line for each temperature and number of forwards."""
    rows = []
    for (temperature, count), found in runs.items():
        alone = runs[temperature, 1]
        shares = [own.token / other.token for own, other in zip(found, alone, strict=True)]
        token, forward = (median(each) for each in zip(*found, strict=True))
        rows.append([f"{temperature:g}", str(count), f"{token:.2f}", f"{token - forward:.2f}", f"{median(shares):.2f}"])
    titles = ["T", "forwards in a call, at most", "ms per token", "of it outside the engine", "of one forward a call"]
    return table(titles, rows, left=())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="turns (default: 15)")
    arguments = parser.parse_args()
    runs: dict[tuple[float, int], list[Times]] = {}
    with load(arguments.bundle) as model:
        for temperature in (0.0, 1.0):
            measure(model, temperature)
            for _ in tqdm(range(arguments.repeats), disable=None):
                for count in AT_ONCE:
                    with patch.object(loop, "MOST_AT_ONCE", count):
                        runs.setdefault((temperature, count), []).append(measure(model, temperature))
        print(report(runs))
        print()
        print(machine_lines(arguments.bundle.name, model.threads))


if __name__ == "__main__":
    main()
