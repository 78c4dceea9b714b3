"""How often the target takes the second-best continuation of the n-gram drafter, where it does not take the best.

    python -m benchmarks.ngram_siblings bundles/reference [--temperature 1.0 0.7 0.0] [--tokens 250]

Every token that follows a match is judged, on the prompts and seeds of `benchmarks.coupling`: nothing here depends on
the machine. A sibling pays where its share is above what one more row costs, times the tokens that a round brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.coupling import prompts
from ondevice import load
from ondevice.drafters.suffix_automaton import COUNT, EDGE, NONE, ROOT, SuffixAutomaton, longest_match
from ondevice.terminal.bench.table import table


def continuations(automaton: SuffixAutomaton) -> list[int]:
    """What followed the longest match, most often first, the newest first in a tie; empty where nothing matches."""
    tables = automaton._tables
    state, _ = longest_match(tables)
    if state == ROOT:
        return []
    found: list[tuple[int, int, int]] = []
    edge = int(tables.states[state, EDGE])
    while edge != NONE:
        _, token, target, beyond = tables.edges[edge].tolist()
        found.append((-int(tables.states[target, COUNT]), len(found), token))
        edge = beyond
    return [token for _, _, token in sorted(found)]


def judged(prompt: Sequence[int], reply: Sequence[int]) -> list[tuple[bool, bool, bool]]:
    """Of every token after a match: whether there are two continuations, and whether it is the best, or the second."""
    automaton = SuffixAutomaton()
    automaton.extend(prompt)
    verdicts = []
    for token in reply:
        if found := continuations(automaton):
            verdicts.append((len(found) > 1, token == found[0], token in found[1:2]))
        automaton.extend([token])
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--temperature", type=float, nargs="+", default=(1.0, 0.7, 0.0), metavar="T")
    parser.add_argument("--tokens", type=int, default=250, metavar="N", help="per prompt (default: 250)")
    arguments = parser.parse_args()
    lines = []
    with load(arguments.bundle, threads=1) as model:
        assert model.tokenizer is not None
        for temperature in arguments.temperature:
            verdicts = []
            for seed, prompt in enumerate(prompts()):
                reply = model.generate(
                    prompt, max_new_tokens=arguments.tokens, temperature=temperature, top_k=64, top_p=0.95, seed=seed,
                    drafter="none",
                )  # fmt: skip
                verdicts += judged(model.tokenizer.encode(prompt), reply.token_ids)
            torn, best, second = np.array(verdicts).T
            shares = best.mean(), second.mean(), torn.mean(), best[torn].mean(), second[torn].mean()
            lines.append([f"{temperature:g}", str(len(verdicts)), *(f"{share:.3f}" for share in shares)])
    header = ["temperature", "matches", "best taken", "second", "with a second", "best of these", "second of these"]
    print(table(header, lines, left=()))


if __name__ == "__main__":
    main()
