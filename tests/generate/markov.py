"""A target whose every distribution is known: logits that depend on the last token alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.generate.drafters.protocol import ROOT, Draft
from ondevice.generate.sampling.sampler import Sampler
from ondevice.generate.verify import accept

Floats = NDArray[np.float32]


class MarkovTarget:
    """logits[a] are those of the token after a, float32[V, V]; a larger `contrast` makes some tokens likelier."""

    def __init__(self, vocab_size: int, seed: int, contrast: float = 1.0) -> None:
        random = np.random.default_rng(seed)
        self.logits = (contrast * random.standard_normal((vocab_size, vocab_size))).astype(np.float32)

    def forward(self, newest: int, draft: Draft) -> Floats:
        """float32[1 + n, V], as an engine gives them for the newest token and a draft below it."""
        return self.logits[[newest, *draft.tokens.tolist()]]

    def joint(self, first: int, sampler: Sampler) -> NDArray[np.float64]:
        """float64[V, V]: the chances of the two tokens after `first`."""
        one = sampler.distribution(self.logits[first], [first])
        two = np.stack([sampler.distribution(self.logits[token], [first, token]) for token in range(len(one))])
        return one[:, None] * two


def plain(target: MarkovTarget, prompt: Sequence[int], sampler: Sampler, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sampler.choose(target.logits[tokens[-1]], tokens))
    return tokens[len(prompt) :]


def speculative(
    target: MarkovTarget, prompt: Sequence[int], sampler: Sampler, count: int, draft: Callable[[list[int]], Draft]
) -> list[int]:
    """Rounds of draft and verify until there are `count` tokens, and what the last round gave beyond them."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        proposed = draft(tokens)
        verdict = accept(proposed, target.forward(tokens[-1], proposed), tokens, sampler)
        tokens += verdict.emitted
    return tokens[len(prompt) :]


def random_tree(nodes: int, vocab_size: int, random: np.random.Generator) -> Draft:
    """A tree of any shape, duplicate siblings included."""
    parents = np.array([random.integers(ROOT, node) for node in range(nodes)], np.int64)
    return Draft(random.integers(0, vocab_size, nodes), parents)
