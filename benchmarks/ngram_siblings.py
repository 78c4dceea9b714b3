"""How often the target chooses the n-gram drafter's second-best continuation if it does not choose the best.

    python -m benchmarks.ngram_siblings bundles/reference [--temperature 1.0 0.7 0.0] [--tokens 250]

Every token after a match is counted, on the prompts and seeds of `benchmarks.coupling`; the result does not depend on
the machine. A sibling pays if its share exceeds the cost of one more row, times the tokens that a round brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.coupling import prompts
from ondevice import load
from ondevice.cli.bench.tables import table
from ondevice.generate.drafters.ngram import COUNT, EDGE, NONE, ROOT, SuffixAutomaton, longest_match


def continuations(automaton: SuffixAutomaton) -> list[int]:
    """The tokens that followed the longest match, most frequent first, the newest first in a tie; empty without a
    match.
    """
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
    """For every token after a match: whether there are two continuations, and whether the token is the best or the
    second.
    """
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
