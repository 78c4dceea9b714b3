"""The draft model: drafts with a second, smaller model that has the same vocabulary.

`DraftModelDrafter` drafts for one generation at a time, on the engine of a `DraftModel`, which the drafters of all
generations share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Literal

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import ROOT, Engine, Outputs, Rows, Session, TokenTree
from ondevice.generate.costs import Costs
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.drafters.trees import GuessedTree, TreeDrafter
from ondevice.generate.prefix_cache import PrefixCache
from ondevice.generate.request import Limits
from ondevice.generate.sampling.sampler import Guess, Sampler
from ondevice.generate.verify import draw

DraftSampling = Literal["coupled", "ratio"]
"""How a draft model draws above temperature 0. coupled: with the noise that the target will use. ratio: from its own
distribution with independent random numbers, for the ratio rule (`verify.accept_ratio`)."""

NEAR = 16
"""Unread tokens that the first forward of a draft reads along, at the draft's expense. More are read in forwards of
their own, and with the `auto` schedule only where that is expected to pay."""

READING_RETURN = 4.0
"""Multiple of the reading time that drafts must be expected to save before `auto` lets a text be read. A reply is
assumed to go on for as long as it has gone on already, so only a part of that time is lost if it ends, or drafts
fail."""

READ_PRIOR = 0.2
"""Cost of reading a token, as a share of the cost of drafting one, until it was measured. It is less because the rows
of a forward share the reading of weights."""

NO_TOKENS = np.zeros(0, np.float32)
"""Survival of a draft without tokens."""

IDLE = 0.995
"""Weight of the acceptance seen so far after a token that another drafter brought: half is forgotten after 140 tokens.
With 0.98, as for drafters of the target's own bundle, the reference pair's draft model was tried three times as often
beside MTP, at E2B's cost and temperature 1, and was wrong as often."""

DRAFT_STREAM = 1
"""Added to the seed of the random numbers that drafts are drawn with for the ratio rule: they must be independent of
the noise and of the random numbers of the rule itself."""


class DraftModelDrafter(TreeDrafter):
    """Drafts chains with a session of its own on a draft model's engine.

    Nothing is computed while nothing is drafted: the text is read when the first draft is made, and tokens of rounds
    without a draft are read in the next draft's first forward. Rejected draft tokens are rewound.

    `coupled` draws with the target's noise (`Sampler.guess`), and drafts are verified by equality. `ratio` is the rule
    of Leviathan et al. (arXiv 2211.17192): the text is distributed as that of plain decoding, but is not the same text.
    """

    def __init__(self, model: DraftModel, costs: Costs, sampling: DraftSampling = "coupled") -> None:
        super().__init__(model.engine.target.vocab_size, acceptance=PositionAcceptance(idle=IDLE))
        self.name = model.name
        self._model = model
        self._costs = costs
        costs.assume(model.name, model.share)
        self._sampling = sampling
        self._limits: Limits | None = None
        self._prompt: Sequence[int] = ()
        self._reads = True
        """Whether the draft model can read the prompt: it has no embeddings for soft tokens, which are negative."""
        self._new = 0
        self._matching = 0
        """Number of leading tokens of the text that the session, or a cached one, holds."""
        self._reconsider_at = 0
        """Number of generated tokens from which reading the text is considered again."""
        self._own: tuple[Sampler, np.random.Generator] | None = None

    def expect(self, limits: Limits) -> None:
        self._limits = limits

    def rest(self) -> None:
        """Put the session into the cache, for the next generation with the same beginning."""
        self._limits = None
        self._return_session()

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        self._return_session()
        self._prompt, self._new, self._reconsider_at = list(prompt_ids), 0, 0
        self._reads = min(self._prompt) >= 0
        self._matching = self._model.sequences.shared(self._prompt)
        self._tree = self._own = None

    def forget(self) -> None:
        self._return_session()
        self._model.sequences.clear()
        self._prompt, self._new, self._matching, self._tree, self._own = (), 0, 0, None, None

    def forecast(self, nodes: int) -> Forecast:
        if self._new < self._reconsider_at or not self._reads:
            return Forecast(NO_TOKENS, self.name)
        nodes = min(nodes, self._model.engine.context_length - self._length)
        forecast = Forecast(self._acceptance.survival(max(nodes, 0)), self.name)
        behind = self._length - self._matching
        if behind <= NEAR or self._model.reading_s(behind, self._costs) <= self._savings(forecast):
            return forecast
        self._reconsider_at = self._new + max(NEAR, self._new // 4)
        return Forecast(NO_TOKENS, self.name)

    def draft(self, request: DraftRequest) -> Draft:
        if not self._new or not self._reads:
            return Draft.empty()
        started = perf_counter()
        if not self._catch_up(request.context):
            return Draft.empty()
        reading_s, session = perf_counter() - started, self._session
        assert session is not None
        ratio = self._sampling == "ratio" and not request.sampler.greedy
        probs: list[Float32Array] = []

        def guess(tree: GuessedTree, node: int) -> list[Guess]:
            unread = request.context[session.length :] if node == ROOT else [tree.tokens[node]]
            if session.max_rows() < len(unread):
                return []
            row = self._model.forward(session, unread).logits[0]
            if ratio:
                return self._drawn(row, request, tree.paths[node], probs)
            return request.sampler.guess(row, None, request.context, tree.paths[node])

        tree = self._grow(request, guess, step_runs=True)
        if not ratio:
            return replace(tree.draft(self.name), reading_s=reading_s)
        drafted = len(tree.tokens)
        tree.guesses.pop(drafted - 1, None)  # a token that the ratio rule does not see is not judged
        return replace(tree.draft(self.name), probs=np.stack(probs[:drafted]) if drafted else None, reading_s=reading_s)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        hits = self._judge(emitted)
        session = self._session
        if session is not None and session.length > self._matching:
            matching = min(session.length, self._length + hits)
            self._matching = session.rewind(matching) if matching < session.length else matching
        self._new += len(emitted)

    @property
    def _length(self) -> int:
        """Number of tokens of the text."""
        return len(self._prompt) + self._new

    def _return_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.rewind(session.length)  # an interrupt may have come while rows were being committed
            self._model.sequences.keep(session)

    def _savings(self, forecast: Forecast) -> float:
        """Seconds that reading may take to be expected to pay."""
        count = len(forecast.survival)
        plain, *forwards = self._costs.forwards(count + 1)
        tokens: Iterator[float] = accumulate(forecast.survival.tolist(), initial=1.0)
        drafted = zip(tokens, [plain, *forwards], [0.0, *self._costs.drafts(self.name, count)], strict=False)
        best = min((forward + draft) / brought for brought, forward, draft in drafted)  # seconds of a token
        left = self._new
        if self._limits is not None:
            left = min(left, self._limits.max_new_tokens - self._new)
        return left * (plain - best) / READING_RETURN

    def _catch_up(self, context: Sequence[int]) -> bool:
        """Take a session if there is none. If more than NEAR tokens are unread, read all but the newest.

        Returns:
            False where the generation was cancelled or the context of the draft model is full.
        """
        if self._session is None:
            self._session = self._model.sequences.take(context)
            self._matching = self._session.length
        session, limits = self._session, self._limits
        last, prompt = len(context) - 1, len(self._prompt)
        if last - session.length < min(NEAR, session.max_rows()):
            return True
        while session.length < last:
            if not session.max_rows() or (limits is not None and limits.cancelled()):
                return False
            stop = min(prompt if session.length < prompt else last, session.length + session.max_rows())
            self._model.read(session, context[session.length : stop])
            if stop == prompt:
                session.snapshot()
            if limits is not None:
                limits.on_prefill(stop, last)
        return True

    def _drawn(
        self, row: Float32Array, request: DraftRequest, path: Sequence[int], probs: list[Float32Array]
    ) -> list[Guess]:
        """A token drawn for the ratio rule from a row of the draft model's logits, whose distribution, float32[V], is
        appended to `probs`. None where the row holds NaN or infinity: a damaged draft model may cost speed, but no
        reply.

        Its share is the largest probability: the end of a draft must not depend on the token that was drawn.
        """
        if not np.isfinite(row.max()):
            return []
        sampler, rng = self._own_sampler(request.sampler)
        distribution = sampler.distribution(row, request.context, path).astype(np.float32)
        probs.append(distribution)
        return [Guess(draw(distribution.astype(np.float64), rng), float(distribution.max()))]

    def _own_sampler(self, sampler: Sampler) -> tuple[Sampler, np.random.Generator]:
        """The target's sampler without its processors, and the random numbers for drafting this text."""
        if self._own is None:
            seed = sampler.options.seed
            rng = np.random.default_rng(None if seed is None else [seed, DRAFT_STREAM])
            self._own = sampler.without_processors(), rng
        return self._own


class DraftModel:
    """The engine of a draft model's bundle, and the sequences that it has read. Shared by all generations."""

    def __init__(self, engine: Engine, name: str, cache_bytes: int, share: float = 1.0) -> None:
        """
        Args:
            engine: closed with the draft model.
            name: name of the drafter in statistics.
            cache_bytes: limit on the keys and values of idle sequences.
            share: size of its weights as a share of the target's, which is taken for the cost of a token until that was
                measured.
        """
        self.engine = engine
        self.share = share
        self.name = name
        self.sequences = PrefixCache(engine, cache_bytes)
        self._token_s = 0.0

    def forward(self, session: Session, tokens: Sequence[int]) -> Outputs:
        """Run and commit more tokens, at most `session.max_rows()`; returns the outputs of the last one."""
        (outputs,) = self.engine.forward([Rows(session, TokenTree.chain(list(tokens)), [len(tokens) - 1])])
        session.commit(range(session.pending))
        return outputs

    def read(self, session: Session, tokens: Sequence[int]) -> None:
        """Run and commit tokens whose outputs are not needed, and measure the time per token."""
        started = perf_counter()
        self.forward(session, tokens)
        token_s = (perf_counter() - started) / len(tokens)
        self._token_s = (self._token_s + token_s) / 2 if self._token_s else token_s

    def reading_s(self, tokens: int, costs: Costs) -> float:
        """Expected seconds for reading this many tokens."""
        return tokens * (self._token_s or READ_PRIOR * costs.drafts(self.name, 1)[0])

    def close(self) -> None:
        """Close the engine and all sequences."""
        self.sequences.clear()
        self.engine.close()
