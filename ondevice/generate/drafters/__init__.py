"""Drafters: everything that proposes tokens for the target to verify. None of them can change the emitted text.

In: the text, by `Drafter.begin` and `Drafter.observe`. Out: a `Forecast` of what a draft would be worth, and a `Draft`,
a chain or a tree of tokens. `acceptance` has the estimators that drafters learn with, `registry` the drafters by name,
each with the reason why it cannot run for some bundle. One file per method: mtp, ngram, draft_model, self_speculative
(self, swift, early-exit; with skip_search), heads (medusa, blockwise) and grammar. `trees` has what all but ngram and
grammar share: a draft that grows token by token. `simulated` is right at a chosen rate, for measurements. The
controller chooses among all of them.

Read first: `protocol.py`, then `ngram.py` for a complete drafter. CONTRIBUTING.md shows how to add one.
"""
