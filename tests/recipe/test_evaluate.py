"""A figure of the model card: the share of tokens that repeat in circles."""

import evaluate
import pytest
import torch
from evaluate import Pair, is_loop, loops
from pair import drafter, target
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


def test_the_share_of_tokens_that_go_round_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without opinions says the same token for ever: all but the first of them are a circle."""
    monkeypatch.setattr(evaluate, "LOOP_TOKENS", 32)
    model = target.new_target()
    torch.nn.init.zeros_(model.lm_head.weight)
    pair = Pair(model, drafter.new_drafter(model).eval(), Tokenizer(models.BPE()))
    assert loops(pair, torch.full((2, 8), 20))["circling"] == 31 / 32
