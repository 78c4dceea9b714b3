"""The loss of a draft model and its gradients against autograd's of the formula."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from training.distillation import (
    HARD_SHARE,
    Aim,
    acceptance,
    aim,
    both,
    cross_entropy,
    frozen_gradients,
    soft_gradients,
    soft_loss,
)
from training.precision import PRODUCTS

ROWS, WIDTH, VOCABULARY, CLUSTERS = 700, 32, 96, 8  # more rows than are computed together


@pytest.fixture
def ordering() -> Tensor:
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))


def test_an_aim_is_the_distribution_and_some_of_its_likeliest_token(logits: Tensor, ordering: Tensor) -> None:
    aimed = Aim(*aim(logits, ordering, CLUSTERS))
    likely = logits.softmax(dim=-1)
    wanted = (1 - HARD_SHARE) * likely
    wanted[torch.arange(ROWS), logits.argmax(dim=-1)] += HARD_SHARE
    torch.testing.assert_close(aimed.tokens.float(), wanted, rtol=1e-2, atol=1e-6)
    for cluster, members in enumerate(ordering.view(CLUSTERS, -1)):
        torch.testing.assert_close(aimed.clusters[:, cluster], likely[:, members].sum(dim=-1))
    some = aimed.rows(600, 50)
    assert torch.equal(some.tokens, aimed.tokens[600:650])
    assert torch.equal(some.clusters, aimed.clusters[600:650])


@pytest.mark.parametrize(
    ("gradients", "cap"),
    [(soft_gradients, None), (partial(frozen_gradients, cap=None), None), (partial(frozen_gradients, cap=8.0), 8.0)],
    ids=["head", "frozen", "soft-capped"],
)
def test_gradients_are_autograds(gradients: Callable[..., Any], cap: float | None, logits: Tensor) -> None:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, WIDTH, generator=random)
    head = torch.randn(VOCABULARY, WIDTH, generator=random).to(torch.bfloat16).float()  # frozen ones are given as that
    wanted, _ = aim(logits, None, 0)
    frozen = gradients is not soft_gradients
    found: list[tuple[Any, ...]] = []
    for soft in (False, True):
        states, table = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
        if soft:
            loss = soft_loss(gradients, states, table.to(PRODUCTS) if frozen else table, wanted)
        else:
            products = states @ table.T
            scores = (products if cap is None else cap * torch.tanh(products / cap)).log_softmax(dim=-1)
            loss = -(wanted.float() * scores).sum(dim=-1).mean()
        (2 * loss).backward()
        found.append((loss.detach(), *(leaf.grad for leaf in (states, table) if leaf.requires_grad)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-2)
    assert len(found[0]) == len(found[1]) == (2 if frozen else 3)
    for own, autograds in zip(found[1][1:], found[0][1:], strict=True):
        assert (own - autograds).norm() < 0.02 * autograds.norm()  # bfloat16 products


def test_the_loss_of_acceptance_is_that_of_rejection_sampling_and_its_gradient_autograds(logits: Tensor) -> None:
    wanted = (2 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(4))).softmax(dim=-1)
    drafted = logits.clone().requires_grad_()
    loss = -torch.minimum(drafted.softmax(dim=-1), wanted).sum(dim=-1).log().sum()
    loss.backward()
    found, gradient = acceptance(logits, wanted)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradient, drafted.grad, atol=1e-5, rtol=1e-4)
    other, slope = cross_entropy(logits, wanted)
    mean, mean_gradient = both(logits, wanted)
    torch.testing.assert_close(mean, (found + other) / 2)
    torch.testing.assert_close(mean_gradient, (gradient + slope) / 2)


def test_a_sampled_token_stands_for_others_by_its_bias(logits: Tensor) -> None:
    """Two tokens with equal rows, or one of them with the logarithm of two added."""
    random = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(ROWS, WIDTH, generator=random), torch.randn(8, WIDTH, generator=random).to(PRODUCTS)
    wanted = torch.nn.functional.pad(logits[:, :7].softmax(dim=-1), (0, 1)).to(PRODUCTS)  # none of it on the last
    twice = torch.cat([head, head[-1:]]), torch.nn.functional.pad(wanted, (0, 1))
    loss, gradient, _ = frozen_gradients(hidden, *twice, cap=None)
    bias = torch.tensor([0.0] * 7 + [2.0]).clamp(min=1).log()
    found, other, _ = frozen_gradients(hidden, head, wanted, cap=None, bias=bias)
    torch.testing.assert_close(found, loss, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(other, gradient, atol=1e-4, rtol=2e-2)
