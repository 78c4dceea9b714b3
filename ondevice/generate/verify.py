"""Verification: which drafted tokens the target accepts, and which token it adds itself. Pure functions on arrays.

Two rules for drafts, both lossless. `accept_matching` samples the target's token at each node and compares it with the
draft: the output is that of plain decoding, token for token. `accept_ratio` is speculative sampling for drafts that
bring the distributions they were drawn from: the output is distributed as that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.arrays import Float32Array, Float64Array
from ondevice.errors import OndeviceError
from ondevice.generate.drafters.protocol import ROOT, Draft
from ondevice.generate.sampling.sampler import Sampler


@dataclass(frozen=True)
class Verdict:
    """The result of a round.

    path : rows of the forward to commit, ascending; row 0 is the newest token, row i + 1 is node i of the draft
    emitted : tokens that now follow: the accepted ones, then the target's own; as many as there are rows in `path`
    error : the exception that plain decoding would end with after these tokens; None if there is none
    """

    path: tuple[int, ...]
    emitted: tuple[int, ...]
    error: Exception | None = None

    @property
    def accepted(self) -> int:
        """Number of emitted tokens without the target's own last one, which is missing where there is an error: the
        accepted part of a draft, or what the engine chose.
        """
        return len(self.emitted) - (self.error is None)


def accept(
    draft: Draft, logits: Float32Array, context: Sequence[int], sampler: Sampler, chosen: Sequence[int] = ()
) -> Verdict:
    """The verdict of a round. A draft is verified by the rule that is lossless for it: `accept_ratio` where it brings
    the distributions that it was drawn from, `accept_matching` otherwise. `accept_chosen` is for tokens that the engine
    chose. For the arguments see there.

    The two are never mixed in one draft: the residual of the ratio rule would then depend on the noise that the draft
    was made with.
    """
    if chosen:
        return accept_chosen(chosen, logits, context, sampler)
    if draft.probs is None:
        return accept_matching(draft, logits, context, sampler)
    return accept_ratio(draft, logits, context, sampler, sampler.rng)


def accept_matching(draft: Draft, logits: Float32Array, context: Sequence[int], sampler: Sampler) -> Verdict:
    """Sample and match: choose the target's token at each node reached, walk to the child that equals it, stop where
    there is no such child.

    Every emitted token is one that the target chose given all before it, so the output is that of plain decoding,
    greedy or sampled, token for token with the same seed. It is the ratio rule with a one-hot q: the target's own draw
    equals the drafted token with probability p(x), and given that it does not, it is a draw from p without x,
    renormalised.

    Valid for any draft, chain or tree, that was made without random numbers, or with the noise that the target's own
    draws take (`Sampler.guess`), wherever it was cut short.

    A node at which nothing can be chosen, or at which a logits processor raises an exception, ends the walk before it:
    as in plain decoding, the tokens before it are emitted first, and if they do not end the reply, the error follows.

    Args:
        draft: n nodes.
        logits: float32[1 + n, V]; row 0 follows the newest token, row i + 1 follows node i.
        context: every token up to the newest one.
        sampler: the target's choice at each node, independent of the draft.

    Raises:
        Exception: as `Sampler.choose` does, at the root.
    """
    children: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)):
        children.setdefault(edge, node)
    node = ROOT
    path = [0]
    emitted: list[int] = []
    while True:
        try:
            token = sampler.choose(logits[node + 1], context, emitted)
        except Exception as error:
            if not emitted:
                raise
            return Verdict(tuple(path[:-1]), tuple(emitted), error)
        emitted.append(token)
        if (node, token) not in children:
            return Verdict(tuple(path), tuple(emitted))
        node = children[node, token]
        path.append(node + 1)


def accept_chosen(chosen: Sequence[int], logits: Float32Array, context: Sequence[int], sampler: Sampler) -> Verdict:
    """The verdict on tokens that the engine chose, the target's own choices (see `MultiStep`): all of them, and the one
    that follows the last row. Where nothing can be chosen there, they end before it, as in `accept_matching`.

    Args:
        chosen: at least one token.
        logits: float32[rows, V]; the last row follows the last of these tokens.
        context, sampler: as for `accept_matching`.
    """
    try:
        own = sampler.choose(logits[-1], context, chosen)
    except OndeviceError as error:
        return Verdict(tuple(range(len(chosen))), tuple(chosen), error)
    return Verdict(tuple(range(1 + len(chosen))), (*chosen, own))


def accept_ratio(
    draft: Draft, logits: Float32Array, context: Sequence[int], sampler: Sampler, rng: np.random.Generator
) -> Verdict:
    """Speculative sampling: a token x drawn from q is accepted with probability min(1, p(x) / q(x)); the first one that
    is not is replaced by a draw from norm(max(0, p - q)); after the last a bonus token is drawn from p.

    Where q(x) > p(x), accepting x in a share p/q of the cases leaves p(x). Elsewhere x is always accepted, and the
    missing mass p - q is exactly what the replacement adds. So each token is distributed as p:
    min(p, q) + (1 - sum min(p, q)) * norm(max(0, p - q)) = p. Leviathan et al. (arXiv 2211.17192, Theorem 1 in
    appendix A.1), Chen et al. (arXiv 2302.01318, algorithm 2).

    p and q must both be distributions after temperature, top-k, top-p and penalties: a raw q against a warped p, or an
    argmax draft with its softmax as q, is biased.

    Whether a draft stops early must not depend on a token that it drew and would have submitted. The exception is a
    token that the sampler's constraint forbids (`loop.pruned`): a submitted token is then a draw from q without the
    forbidden tokens, renormalised, and is tested with that q.

    A row whose distribution is an error ends the walk before it, as in `accept_matching`.

    Args:
        draft: a chain of n tokens with probs float32[n, V].
        logits: float32[1 + n, V].
        context: every token up to the newest one.
        sampler: gives p.
        rng: one uniform number per drafted token tested, and one for the target's own token; independent of the noise
            of `sampler` and of what the drafts were drawn with.

    Raises:
        ValueError: no probs, or probs of another shape; a tree, whose siblings would each need the residual that the
            siblings before them left: a chain is as good on a CPU, where rows are not free.
    """
    if draft.probs is None or draft.probs.shape != (len(draft), logits.shape[1]):
        raise ValueError("the ratio rule needs the distribution that each token was drawn from")
    if (draft.parents != np.arange(-1, len(draft) - 1)).any():
        raise ValueError("a draft with probabilities must be a chain")
    tokens: list[int] = draft.tokens.tolist()
    row = 0
    while True:
        try:
            p = sampler.distribution(logits[row], context, tokens[:row])
        except Exception as error:
            if not row:
                raise
            return Verdict(tuple(range(row)), tuple(tokens[:row]), error)
        if row == len(tokens):
            return Verdict(tuple(range(row + 1)), (*tokens, draw(p, rng)))
        q = sampler.allowed_share(draft.probs[row].astype(np.float64), context, tokens[:row])
        if rng.random() * q[tokens[row]] >= p[tokens[row]]:
            residual = np.maximum(p - q, 0.0)
            # An empty residual means p = q up to rounding, and then a draw from p is the same thing.
            own = draw(residual if residual.any() else p, rng)
            return Verdict(tuple(range(row + 1)), (*tokens[:row], own))
        row += 1


BLOCK = 512
"""Weights that `draw` sums at a time: block sums are vectorised, a cumulative sum over a whole vocabulary is not."""


def draw(weights: Float64Array, rng: np.random.Generator) -> int:
    """An index drawn in proportion to `weights`, by inverting the cumulative sum at one uniform number."""
    if len(weights) <= BLOCK:
        return _crossing(weights, rng.random() * float(weights.sum()))[0]
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, mass = _crossing(sums, rng.random() * float(sums.sum()))
    index, _ = _crossing(weights[block * BLOCK : (block + 1) * BLOCK], mass)
    return block * BLOCK + index


def _crossing(weights: Float64Array, mass: float) -> tuple[int, float]:
    """The index at which the cumulative sum first exceeds `mass`, and the part of `mass` that falls into that index."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, mass, side="right"))
    # Rounding can carry the mass up to the sum itself, past every index that has a weight.
    index = min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    return index, mass - float(cumulative[index - 1]) if index else mass
