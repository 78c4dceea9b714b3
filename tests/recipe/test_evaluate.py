"""The card's figures: loops, and drafts that draw with the noise of the text."""

import drafter
import evaluate
import pytest
import target
import torch
from evaluate import Pair, acceptance, is_loop, loops
from tokenizers import Tokenizer, models


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("a = 1\na = 1\na = 1\n", True),
        ("a = 1\n\n    a = 1\n\na = 1", True),
        ("a = 1\na = 1\nb = 2\na = 1\n", False),
        ("\n\n\n\n", False),
    ],
)
def test_a_loop_is_a_line_three_times_running(text: str, loop: bool) -> None:
    assert is_loop(text) is loop


def test_coupled_drafts_draw_with_the_noise_of_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter and a target without opinions: greedy drafts hold by chance, coupled ones always."""
    monkeypatch.setattr(evaluate, "CONTINUED", 16)
    model = target.new_target()
    pair = Pair(model, drafter.new_drafter(model).eval(), Tokenizer(models.BPE()))
    head = pair.drafter.masked_embedding
    assert head is not None
    head.centroid_intermediate_top_k = head.num_centroids  # every token is scored
    for table in (model.lm_head, pair.drafter.lm_head):
        torch.nn.init.zeros_(table.weight)
    prompts = torch.full((evaluate.SIDE_BY_SIDE, 8), 20)
    greedy, coupled = (acceptance(pair, prompts, 1.0, coupled=coupled) for coupled in (False, True))
    assert coupled["tokens_per_round"] > 6.5
    assert greedy["tokens_per_round"] < 1.5


def test_the_share_of_tokens_that_go_round_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without opinions says the same token for ever: all but the first of them are a circle."""
    monkeypatch.setattr(evaluate, "LOOP_TOKENS", 32)
    model = target.new_target()
    torch.nn.init.zeros_(model.lm_head.weight)
    pair = Pair(model, drafter.new_drafter(model).eval(), Tokenizer(models.BPE()))
    assert loops(pair, torch.full((2, 8), 20))["circling"] == 31 / 32
