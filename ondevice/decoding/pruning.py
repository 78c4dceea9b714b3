"""A draft without what a constraint does not allow."""

from __future__ import annotations

import numpy as np

from ondevice.decoding.constraint import Constraint
from ondevice.drafters.protocol import ROOT, Draft


def pruned(draft: Draft, constraint: Constraint) -> Draft:
    """The draft without the tokens that could not be taken: no row is spent on them.

    The ratio rule must know of it, because such a token was drawn from a distribution that allowed it: see
    `verify.accept_ratio`.
    """
    parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent in paths and constraint.allows(path := [*paths[parent], token]):
            paths[node] = path
    kept = sorted(paths)[1:]
    if len(kept) == len(tokens):
        return draft
    places = {node: place for place, node in enumerate(kept)} | {ROOT: ROOT}
    return Draft(
        draft.tokens[kept],
        np.array([places[parents[node]] for node in kept], np.int64),
        draft.confidence[kept] if len(draft.confidence) else draft.confidence,
        None if draft.probs is None else draft.probs[kept],
        draft.source,
        draft.reading_s,
    )
