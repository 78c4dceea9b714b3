"""The loss of a draft model that learns from its target's distribution, computed together with the head's gradients.

Logits are computed a few rows at a time, so that they stay in the cache. For comparison: with log-softmax and autograd
over whole blocks, a step of the drafter on 2,048 rounds took 0.11 s forward and 0.10 s backward on one core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pair.forward import HEAD_ROWS
from torch import Tensor

from training.precision import PRODUCTS

HARD_SHARE = 0.2  # weight of the target's likeliest token; the rest is its distribution
CENTROID_SHARE = 0.3  # weight of the clusters' loss relative to the tokens'


@dataclass(frozen=True)
class Aim:
    """The distributions to predict, one row per token.

    tokens : PRODUCTS[N, V], the target's distribution, with HARD_SHARE of it on its likeliest token
    clusters : float32[N, C], the target's probability of each cluster of the ordered head; C is 0 without one
    """

    tokens: Tensor
    clusters: Tensor

    def rows(self, first: int, count: int) -> "Aim":
        """Some of the rows."""
        return Aim(self.tokens[first : first + count], self.clusters[first : first + count])


@torch.no_grad()
def aim(logits: Tensor, ordering: Tensor | None, clusters: int) -> tuple[Tensor, Tensor]:
    """Both parts of an `Aim` for the target's logits : [N, V]; ordering : int64[V], the tokens by cluster."""
    tokens, masses = [], []
    for rows in logits.split(HEAD_ROWS):
        likely = rows.softmax(dim=-1)
        ordered = None if ordering is None else likely[:, ordering].unflatten(-1, (clusters, -1))
        masses.append(likely[:, :0] if ordered is None else ordered.sum(dim=-1))
        best = rows.argmax(dim=-1, keepdim=True)
        likely = (1 - HARD_SHARE) * likely
        tokens.append(likely.scatter_add(1, best, torch.full_like(likely[:, :1], HARD_SHARE)).to(PRODUCTS))
    return torch.cat(tokens), torch.cat(masses)


@torch.no_grad()
def soft_gradients(hidden: Tensor, head: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of `hidden @ head.T` to distributions, and its gradients to `hidden` and `head`.

    hidden : [N, H]; head : [V, H]; wanted : [N, V], every row of which sums to one
    """
    table = head.to(PRODUCTS)
    columns = table.T.contiguous()
    loss, to_head, to_hidden = torch.zeros((), device=hidden.device), torch.zeros_like(head), []
    for rows, aimed in zip(hidden.to(PRODUCTS).split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True):
        entropy, gradient = cross_entropy((rows @ columns).float(), aimed.float())
        loss = loss + entropy / len(hidden)
        gradient = (gradient / len(hidden)).to(PRODUCTS)
        to_hidden.append(gradient @ table)
        to_head = to_head + (gradient.T @ rows).float()
    return loss, torch.cat(to_hidden).float(), to_head


@torch.no_grad()
def frozen_gradients(
    hidden: Tensor,
    head: Tensor,
    wanted: Tensor,
    *,
    cap: float | None,
    distance: "Distance | None" = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]:
    """`soft_gradients` of a frozen head, PRODUCTS[V, H], whose logits may be soft-capped.

    distance : of logits to a distribution; None for the cross-entropy
    bias : float32[V], added to the logits: of a sampled token, the logarithm of how many it stands for
    """
    distance = distance or cross_entropy
    loss, to_hidden = torch.zeros((), device=hidden.device), []
    count = HEAD_ROWS if hidden.device.type == "cpu" else len(hidden)
    for rows, aimed in zip(hidden.to(PRODUCTS).split(count), wanted.split(count), strict=True):
        products = (rows @ head.T).float()
        logits = products if cap is None else cap * torch.tanh(products / cap)
        entropy, gradient = distance(logits if bias is None else logits + bias, aimed.float())
        slope = torch.ones_like(logits) if cap is None else 1 - (logits / cap) ** 2
        loss = loss + entropy / len(hidden)
        to_hidden.append((gradient * slope / len(hidden)).to(PRODUCTS) @ head)
    return loss, torch.cat(to_hidden).float(), None


def cross_entropy(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows of the cross-entropy to `wanted`, and its gradient to `logits`: both [N, V]."""
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    return total.sum() - (wanted * logits).sum(), (logits - total).exp() - wanted


def acceptance(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows of -log(a), where a is the sum of min(q, p) over the tokens, and its gradient to `logits`.

    q : the softmax of the logits; p : `wanted`. A draft from q is accepted with
    probability a (rejection sampling), or at least a / (2 - a) with the target's noise. Source: "LK losses", arXiv
    2602.23881.
    """
    q = logits.softmax(dim=-1)
    below = q * (q < wanted)
    accepted = torch.minimum(q, wanted).sum(dim=-1, keepdim=True).clamp(min=1e-6)
    return -accepted.log().sum(), (q * below.sum(dim=-1, keepdim=True) - below) / accepted


def both(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of cross-entropy and acceptance loss."""
    parts = cross_entropy(logits, wanted), acceptance(logits, wanted)
    return (parts[0][0] + parts[1][0]) / 2, (parts[0][1] + parts[1][1]) / 2


Distance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Gradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def soft_loss(gradients: Gradients, hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
    """The loss of `gradients`, which are `soft_gradients` or `frozen_gradients`, or compiled ones, for autograd."""
    loss: Tensor = SoftLoss.apply(gradients, hidden, head, wanted)  # type: ignore[no-untyped-call]
    return loss


class SoftLoss(torch.autograd.Function):
    """A loss whose gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        loss, to_hidden, to_head = gradients(hidden, head, wanted)
        ctx.save_for_backward(to_hidden, to_head)
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        to_hidden, to_head = ctx.saved_tensors
        return None, (to_hidden * slope).to(ctx.dtype), None if to_head is None else to_head * slope, None
