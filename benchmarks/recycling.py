"""Whether token recycling would gain over n-grams: tokens per round of both, on the scenarios of `ondevice bench`.

    python -m benchmarks.recycling bundles/reference [--temperature 0.0 1.0] [--tokens 160] [--nodes 8]

Token Recycling (Luo et al., arXiv 2408.08696) keeps, for every token, the target's likeliest successors at its last
occurrence, and drafts the tree that follows from them. The paper's tree has 80 nodes and a fixed shape; here it has as
many as there are cheap rows, likeliest first, by how often each rank was right. The maximum number of drafted tokens is
constant, so the result does not depend on the machine; n-grams draft nothing without a match, recycling nearly always
the maximum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from ondevice import Model, load
from ondevice.cli.bench.measure import Scenario, load_scenarios
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.acceptance import Tally
from ondevice.generate.drafters.ngram import NgramDrafter
from ondevice.generate.drafters.protocol import ROOT, Draft, Drafter, DraftRequest, Forecast

SUCCESSORS = 8
"""Number of successors kept per token, as in the paper."""

KEEP = 0.97
"""Weight of earlier events after a new one."""


class RecyclingDrafter:
    """The paper's matrix of the target's likeliest successors, kept as long as the drafter."""

    name = "recycling"

    def __init__(self) -> None:
        self._successors: dict[int, list[int]] = {}
        self._newest: int | None = None
        self._ranks = [Tally(0.3 / (rank + 1), 1.0) for rank in range(SUCCESSORS)]

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._newest = prompt_ids[-1]

    def forget(self) -> None:
        self._successors.clear()
        self._newest = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.full(nodes, 0.5, np.float32), self.name)

    def draft(self, request: DraftRequest) -> Draft:
        if self._newest is None:
            return Draft.empty()
        rates = [tally.rate() for tally in self._ranks]
        tokens: list[int] = []
        parents: list[int] = []
        frontier: list[tuple[float, int, int, int]] = []
        self._follow(self._newest, ROOT, 1.0, rates, frontier)
        while frontier and len(tokens) < request.nodes:
            negative, _, token, parent = heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            self._follow(token, len(tokens) - 1, -negative, rates, frontier)
        return Draft(np.array(tokens, np.int64), np.array(parents, np.int64), source=self.name)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        before = [self._newest, *emitted[:-1]][-len(path) :]
        for token, row, after in zip(before, path, emitted[-len(path) :], strict=True):
            if token is None:
                continue
            for rank, successor in enumerate(self._successors.get(token, ())):
                self._ranks[rank].fade(KEEP)
                self._ranks[rank].add(successor == after)
            logits = outputs.logits[row]
            best = np.argpartition(-logits, SUCCESSORS)[:SUCCESSORS]
            self._successors[token] = best[np.argsort(-logits[best])].tolist()
        self._newest = emitted[-1]

    def _follow(
        self, token: int, node: int, survival: float, rates: list[float], frontier: list[tuple[float, int, int, int]]
    ) -> None:
        for rank, successor in enumerate(self._successors.get(token, ())):
            heappush(frontier, (-survival * rates[rank], len(frontier) * SUCCESSORS + node + rank, successor, node))


def measure(
    model: Model, scenario: Scenario, drafter: Drafter, tokens: int, chosen: dict[str, Any]
) -> tuple[float, float]:
    """Tokens and rows per round."""
    new = rounds = drafted = 0
    for seed, prompt in enumerate(scenario.prompts):
        model.forget()
        stats = model.generate(prompt, max_new_tokens=tokens, seed=seed, drafter=drafter, **chosen).stats
        new += stats.new_tokens - 1
        rounds += stats.target_forwards
        drafted += stats.drafted
    return new / rounds, 1 + drafted / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--tokens", type=int, default=160, metavar="N", help="per prompt (default: 160)")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="drafted tokens per round (default: 8)")
    arguments = parser.parse_args()
    lines = []
    with load(arguments.bundle, threads=1) as model:
        for temperature in arguments.temperature:
            chosen: dict[str, Any] = {
                "temperature": temperature,
                "num_assistant_tokens_schedule": "constant",
                "num_assistant_tokens": arguments.nodes,
            }
            ngram, recycling = NgramDrafter(), RecyclingDrafter()
            for scenario in load_scenarios(None, as_chat=True):
                one, other = (
                    measure(model, scenario, drafter, arguments.tokens, chosen) for drafter in (ngram, recycling)
                )
                lines.append([scenario.name, f"{temperature:g}", *(f"{each:.2f}" for each in (*one, *other))])
    print(table(["scenario", "T", "ngram", "rows", "recycling", "its rows"], lines, left={"scenario"}))


if __name__ == "__main__":
    main()
