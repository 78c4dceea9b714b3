"""Float32 graphs against transformers, past the sliding window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from tests.export.conftest import Pair
from tests.export.graph.graph_runner import DrafterRunner, TargetRunner
from tests.fixtures.tiny_models import VOCAB, WINDOW

TOLERANCE = 1e-4
PROMPT = [2, *np.random.default_rng(7).integers(3, VOCAB, 3 * WINDOW - 2).tolist()]


def reference(model: PreTrainedModel, ids: list[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits and post-norm hidden states, [T, V] and [T, H]."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    return output.logits[0].numpy(), output.hidden_states[-1][0].numpy()


def assert_close(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [len(PROMPT), 7, 1])
def test_logits_at_every_position(pair: Pair, chunk: int) -> None:
    logits, hidden = reference(pair.target, PROMPT)
    runner = TargetRunner(pair.bundle)
    for start in range(0, len(PROMPT), chunk):
        step = runner.forward(PROMPT[start : start + chunk])
        assert_close(step.logits, logits[start : start + chunk])
        assert_close(step.hidden, hidden[start : start + chunk])


def test_wanted_rows_only(pair: Pair) -> None:
    logits, _ = reference(pair.target, PROMPT)
    runner = TargetRunner(pair.bundle)
    wanted = [3, 0, len(PROMPT) - 1]
    assert_close(runner.forward(PROMPT, wanted=wanted).logits, logits[wanted])


def test_tree_rows_equal_their_chains(pair: Pair) -> None:
    runner = TargetRunner(pair.bundle)
    runner.forward(PROMPT)
    #        0 -> 1 -> 2
    #        0 -> 3 -> 4    and a second root, 5
    tokens, parents = [11, 12, 13, 14, 15, 16], [-1, 0, 1, 0, 3, -1]
    step = runner.forward(tokens, parents=parents)
    for row in range(len(tokens)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        logits, _ = reference(pair.target, PROMPT + [tokens[index] for index in path])
        assert_close(step.logits[row], logits[-1])


@pytest.mark.parametrize("length", [5, WINDOW, WINDOW + 2, len(PROMPT)])
def test_draft_steps(pair: Pair, length: int) -> None:
    """Candidates, their logits and the next hidden state, over four steps of a round."""
    prompt = PROMPT[:length]
    runner = TargetRunner(pair.bundle)
    hidden = runner.forward(prompt, wanted=[length - 1]).hidden
    drafter = DrafterRunner(pair.bundle, runner)
    with torch.no_grad():
        output = pair.target(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True)
    expected_hidden = output.hidden_states[-1][:, -1:]
    token = 17
    for _ in range(4):
        embedded = pair.target.get_input_embeddings()(torch.tensor([[token]]))
        with torch.no_grad():
            expected = pair.drafter(
                inputs_embeds=torch.cat([embedded, expected_hidden], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=output.shared_kv_states,
            )
        draft = drafter.step(token, hidden, length)
        every = expected.logits[0, 0].numpy()
        assert_close(draft.logits, every[draft.candidates])
        if len(draft.candidates) < VOCAB:  # the reference fills the rest with the smallest logit - 1
            rest = np.delete(every, draft.candidates)
            assert len(set(draft.candidates.tolist())) == len(draft.candidates)
            assert_close(rest, np.full_like(rest, draft.logits.min() - 1))
        assert_close(draft.hidden, expected.last_hidden_state[0].numpy())
        token = int(draft.candidates[draft.logits.argmax()])
        assert token == int(every.argmax())
        hidden, expected_hidden = draft.hidden, expected.last_hidden_state
