"""Which drafted tokens the target takes, and which token it adds itself. Pure functions on small arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.decoding.sampling import Probabilities, Sampler
from ondevice.drafters.protocol import ROOT, Draft

Floats = NDArray[np.float32]

BLOCK = 512
"""Weights summed at a time in search of a draw: sums of a block are vectorised, a cumulative sum is not."""


@dataclass(frozen=True)
class Verdict:
    """What a round keeps.

    path : rows of the forward whose KV stays, ascending; row 0 is the newest token, row i + 1 node i of the draft
    emitted : tokens that now follow: the accepted ones, then the target's own; as many as there are rows in `path`
    """

    path: tuple[int, ...]
    emitted: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


def accept(draft: Draft, logits: Floats, context: Sequence[int], sampler: Sampler) -> Verdict:
    """Verify a draft by the rule that is lossless for it: `accept_ratio` where it was drawn from distributions that it
    brings along, `accept_matching` otherwise. Arguments as there.

    Never a mixture: the residual of the ratio rule would no longer be independent of a draft made with the same noise.
    """
    if draft.probs is None:
        return accept_matching(draft, logits, context, sampler)
    return accept_ratio(draft, logits, context, sampler, sampler.rng)


def accept_matching(draft: Draft, logits: Floats, context: Sequence[int], sampler: Sampler) -> Verdict:
    """Choose the target's token at each node reached, walk to the child that equals it, stop where there is none.

    Every emitted token is one the target chose given all before it, so the output is that of plain decoding, greedy or
    sampled, token for token with the same seed. It is the ratio rule with a one-hot q: the target's own draw equals
    the drafted token with probability p(x), and given that it does not, it is a draw from p without x, renormalised.
    Any draft may be verified so that was made without random numbers, or with the noise that the target's own draws
    take (`Sampler.guess`): a chain or a tree, whatever cut it short.

    Args:
        draft: n nodes.
        logits: float32[1 + n, V]; row 0 follows the newest token, row i + 1 follows node i.
        context: every token up to the newest one.
        sampler: the target's choice at each place, whatever was drafted.
    """
    children: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
        children.setdefault(edge, node)
    node = ROOT
    path = [0]
    emitted: list[int] = []
    while True:
        token = sampler.choose(logits[node + 1], context, emitted)
        emitted.append(token)
        if (node, token) not in children:
            return Verdict(tuple(path), tuple(emitted))
        node = children[node, token]
        path.append(node + 1)


def accept_ratio(
    draft: Draft, logits: Floats, context: Sequence[int], sampler: Sampler, rng: np.random.Generator
) -> Verdict:
    """Speculative sampling: a token x drawn from q is taken with probability min(1, p(x) / q(x)); the first that is
    not is replaced by a draw from norm(max(0, p - q)); after the last a bonus token is drawn from p.

    Where q gives x more than p does, taking x a share p/q of the times leaves p(x); elsewhere x is always taken and
    what is missing, p - q, is exactly what the replacement makes up for. So each token is distributed as p:
    min(p, q) + (1 - sum min(p, q)) * norm(max(0, p - q)) = p. Leviathan et al. (arXiv 2211.17192, Theorem 1 in
    appendix A.1), Chen et al. (arXiv 2302.01318, algorithm 2). p and q must both be what is left after temperature,
    top-k, top-p and penalties: a raw q against a warped p, or an argmax draft that claims its softmax for q, is biased.

    A draft that stops early must not do so because of a token that it drew and would have submitted; but for one that
    the sampler's constraint does not allow: what was submitted is then a draw from q without such tokens, renormalised,
    and that is the q it is tested with.

    Args:
        draft: a chain of n tokens with probs float32[n, V].
        logits: float32[1 + n, V].
        context: every token up to the newest one.
        sampler: gives p.
        rng: one uniform number per drafted token looked at, and one for the target's own token; neither the noise of
            `sampler` nor what the drafts were drawn with.

    Raises:
        ValueError: no probs, or probs of another shape; a tree, whose siblings would each need the residual that the
            ones before them left: a chain is as good on a CPU, where rows are not free.
    """
    if draft.probs is None or draft.probs.shape != (len(draft), logits.shape[1]):
        raise ValueError("the ratio rule needs the distribution that each token was drawn from")
    if (draft.parents != np.arange(-1, len(draft) - 1)).any():
        raise ValueError("a draft with probabilities must be a chain")
    tokens: list[int] = draft.tokens.tolist()
    for row, token in enumerate(tokens):
        p = sampler.distribution(logits[row], context, tokens[:row])
        q = sampler.allowed_share(draft.probs[row].astype(np.float64), context, tokens[:row])
        if rng.random() * q[token] >= p[token]:
            residual = np.maximum(p - q, 0.0)
            # Nothing left means p = q up to rounding, and then a draw from p is the same thing.
            own = draw(residual if residual.any() else p, rng)
            return Verdict(tuple(range(row + 1)), (*tokens[:row], own))
    bonus = draw(sampler.distribution(logits[len(tokens)], context, tokens), rng)
    return Verdict(tuple(range(len(tokens) + 1)), (*tokens, bonus))


def draw(weights: Probabilities, rng: np.random.Generator) -> int:
    """An index drawn in proportion to `weights`, by inverting the cumulative sum at one uniform number."""
    if len(weights) <= BLOCK:
        return _crossing(weights, rng.random() * float(weights.sum()))[0]
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, mass = _crossing(sums, rng.random() * float(sums.sum()))
    index, _ = _crossing(weights[block * BLOCK : (block + 1) * BLOCK], mass)
    return block * BLOCK + index


def _crossing(weights: Probabilities, mass: float) -> tuple[int, float]:
    """The index at which the cumulative sum comes to exceed `mass`, and what of `mass` is left for it."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, mass, side="right"))
    # Rounding can carry the mass up to the sum itself, past every index that has a weight.
    index = min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    return index, mass - float(cumulative[index - 1]) if index else mass
