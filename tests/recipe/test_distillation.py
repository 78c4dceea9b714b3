"""The loss of a draft model and its gradients against autograd's of the formula."""

import pytest
import torch
from distillation import HARD_SHARE, Aim, SoftLoss, aim, soft_gradients
from torch import Tensor

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


def test_gradients_are_autograds(logits: Tensor, ordering: Tensor) -> None:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, WIDTH, generator=random)
    head = torch.randn(VOCABULARY, WIDTH, generator=random)
    wanted, _ = aim(logits, ordering, CLUSTERS)
    found = []
    for soft in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
        if soft:
            loss = SoftLoss.apply(soft_gradients, *leaves, wanted)
        else:
            scores = (leaves[0] @ leaves[1].T).log_softmax(dim=-1)
            loss = -(wanted.float() * scores).sum(dim=-1).mean()
        (2 * loss).backward()
        found.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-2)
    for own, autograds in zip(found[1][1:], found[0][1:], strict=True):
        assert (own - autograds).norm() < 0.02 * autograds.norm()  # bfloat16 products
