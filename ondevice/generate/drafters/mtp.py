"""The MTP drafter: the model's own multi-token-prediction drafter (Gemma4AssistantForCausalLM), one step per token."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.arrays import Float32Array
from ondevice.engines.protocol import MAX_DRAFTED, ROOT, DraftVerdict
from ondevice.generate.drafters.acceptance import PositionAcceptance
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.generate.drafters.trees import KEEP, GuessedTree, TreeDrafter
from ondevice.generate.sampling.sampler import GUESSES, Guess

BRANCHES = 3
"""Children that a token of a draft may have. On the reference pair at temperature 1 a token at depth 1 is accepted in
0.75 of the rounds, with chains in 0.66 (`benchmarks/drafts/coupling.py`)."""

SIBLING = 0.1
"""Prior probability that the target takes the second child. On the reference pair it is 0.09 at temperature 1, and 0.03
at 0.7 and at 0 (`benchmarks/drafts/coupling.py`: acceptance at depth 1 of a tree less that of a chain)."""

SURE = 10.0
"""Drafts that a measured acceptance is worth beside those of the present text. Kinds of text differ by 0.07 in the
share of first tokens that are accepted (models/smollm2-drafter), so that the mean of all tells as much as
0.25 / 0.07**2 = 50 drafts; but a text at the end of a context may take none. With 3, one rejected draft took the
expectation from 0.45 to 0.33, and `auto` drafted nothing for 20 tokens; with 20, it made 30 to 40 drafts of which none
was accepted."""

MIN_SIBLING_SHARE = 0.5
"""Siblings are guessed only where the probability of a second child is at least this share of the request's floor, the
survival at which a row just pays. Below, hardly any is worth its row: at temperature 0 siblings took time on the
reference pair, and gained nothing."""

SIBLING_INTERVAL = 8
"""Every so many drafts siblings are guessed in any case, so that their probability follows the text."""


class MtpDrafter(TreeDrafter):
    """Drafts trees from the hidden state of the last verified token, drawing with the target's noise (`Sampler.guess`).

    Every step of a round attends to the same verified KV at the same position, or with an MTP layer to the steps before
    it too (`Session.draft_step`), so a draft depends only on the verified tokens and the noise of its positions: after
    a rejection it equals the draft of a fresh prefill. The matching rule keeps it lossless under sampling too, which
    transformers' ratio test of an argmax draft with the drafter's raw softmax is not. Drawing from sharper
    distributions, 0.85 of the temperature, gave 2.75 tokens per round of the reference pair at temperature 1 instead of
    2.81.
    """

    name = "mtp"

    def __init__(
        self,
        vocab_size: int,
        branches: int = BRANCHES,
        acceptance: float | None = None,
        *,
        writes: bool = False,
    ) -> None:
        """
        Args:
            vocab_size: number of token ids.
            branches: children of a token at most; 1 drafts chains.
            acceptance: measured probability that the target takes a first child; None where it is not known.
            writes: whether a step writes keys and values, which those of later depths read (`Target.mtp`).
        """
        siblings = [SIBLING / rank for rank in range(1, GUESSES)]
        prior = PositionAcceptance() if acceptance is None else PositionAcceptance(acceptance, sure=SURE)
        super().__init__(vocab_size, branches, siblings, acceptance=prior)
        self._writes = writes
        self._without_siblings = 0
        """Drafts since siblings were last guessed."""

    def forecast(self, nodes: int) -> Forecast:
        """The chain of first children, and a second child next to each of them."""
        if not self._grows_trees:
            return Forecast(self._acceptance.survival(nodes), self.name)
        survival, depths = self._acceptance.survival_with_siblings(nodes, self._siblings[0].rate())
        return Forecast(survival, self.name, depths)

    def widths(self, request: DraftRequest) -> tuple[Sequence[int], Float32Array]:
        """Likeliest token first, as `draft` does it, by rates in the place of guesses: first children of the chain, for
        which a step is run, and other children.
        """
        firsts = self._acceptance.survival(MAX_DRAFTED).tolist()
        others = [sibling.rate() for sibling in self._siblings] if request.trees else []
        found = list[int]()
        for node in range(min(request.nodes, MAX_DRAFTED)):
            beside = [
                (parent * others[width - 1], step)
                for step, (width, parent) in enumerate(zip(found, [1.0, *firsts], strict=False))
                if width - 1 < min(len(others), self._branches - 1)
            ]
            chance, step = max(beside, default=(0.0, 0))
            if firsts[len(found)] >= chance and request.pays_step(node, firsts[len(found)], len(found)):
                found.append(1)
            elif beside and request.pays_row(node, chance):
                found[step] += 1
            else:
                break
        return found, self._hidden

    def verified(self, verdicts: Sequence[DraftVerdict]) -> None:
        for verdict in verdicts:
            self._acceptance.learn(verdict.depth, verdict.hits, verdict.accepted + 1)
            for step in range(min(verdict.hits + 1, verdict.depth)):
                for rank, sibling in enumerate(self._siblings, 1):
                    sibling.add(step == verdict.hits and rank == verdict.rank, KEEP)
        self._learnt = sum(verdict.accepted + 1 for verdict in verdicts)

    def draft(self, request: DraftRequest) -> Draft:
        """Grow a tree, with one draft step for each token that is expanded."""
        session, newest = self._session, self._newest
        if newest is None or session is None or not request.nodes:
            return Draft.empty()
        branches = self._branching(request)
        states = dict[int, Float32Array]()
        """By node, float32[H]: the hidden state from the step that read its token. A step reads its parent's."""

        def guess(tree: GuessedTree, node: int) -> list[Guess]:
            if node == ROOT:
                step = session.draft_step(newest, self._hidden)
            else:
                depth = len(tree.paths[node])
                step = session.draft_step(tree.tokens[node], states[tree.parents[node]], depth)
            states[node] = step.hidden.copy()
            path = tree.paths[node]
            return self._valid(request.sampler.guess(step.logits, step.candidates, request.context, path, branches))

        return self._grow(request, guess, step_runs=True, one_per_depth=self._writes).draft(self.name)

    def _branching(self, request: DraftRequest) -> int:
        """Children that a token of this draft may have."""
        if not request.trees:
            return 1
        self._without_siblings += 1
        if (
            self._siblings[0].rate() < MIN_SIBLING_SHARE * request.row_floor(0)
            and self._without_siblings < SIBLING_INTERVAL
        ):
            return 1
        self._without_siblings = 0
        return self._branches
