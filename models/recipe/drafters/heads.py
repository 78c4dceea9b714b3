"""Heads that draft from hidden states of a frozen target; all use the target's own vocabulary projection.

medusa     u[j] = x + silu(W[j] x), x the state after the final norm (Medusa's ResBlock, arXiv 2401.10774): the token
           j positions after the next one
blockwise  u[j] = norm(x + V[j] relu(U x)), the same tokens (Stern et al., NeurIPS 2018)
exit       u = x + silu(W x), x = norm(the residual stream after a lower layer): the next token itself

In Medusa each head has its own projection: at a vocabulary of 262,144 that is 403 M weights per head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of the heads.

    hidden : width of the target's states
    offsets : tokens that medusa and blockwise propose
    width : of blockwise's shared layer
    exit_layer : index of the layer after which exit reads the residual stream
    """

    hidden: int
    offsets: int
    width: int
    exit_layer: int

    def config(self, kinds: list[str]) -> dict[str, dict[str, int]]:
        """The kinds' fields of `config.json`."""
        fields = {
            "medusa": {"offsets": self.offsets},
            "blockwise": {"offsets": self.offsets, "width": self.width},
            "exit": {"layer": self.exit_layer},
        }
        return {kind: fields[kind] for kind in kinds}


class Medusa(nn.Module):
    """A ResBlock for every offset."""

    def __init__(self, shape: Shape, final_norm: Tensor) -> None:
        super().__init__()
        self.offsets = shape.offsets
        self.blocks = nn.Linear(shape.hidden, shape.offsets * shape.hidden, bias=False)
        nn.init.zeros_(self.blocks.weight)  # as in Medusa: at first it predicts the target's next token

    def forward(self, x: Tensor) -> Tensor:
        """x : [N, H], after the final norm; returns [offsets, N, H]."""
        steps: Tensor = functional.silu(self.blocks(x)).view(len(x), self.offsets, -1)
        return (x[:, None] + steps).transpose(0, 1)


class Blockwise(nn.Module):
    """One dense-relu-dense for all offsets, followed by a residual and a norm."""

    def __init__(self, shape: Shape, final_norm: Tensor) -> None:
        super().__init__()
        self.offsets = shape.offsets
        self.inner = nn.Linear(shape.hidden, shape.width, bias=False)
        self.outer = nn.Linear(shape.width, shape.offsets * shape.hidden, bias=False)
        nn.init.zeros_(self.outer.weight)
        self.norm: Any = nn.RMSNorm(shape.hidden, EPS)
        nn.init.constant_(self.norm.weight, final_norm.float().pow(2).mean().sqrt().item())

    def forward(self, x: Tensor) -> Tensor:
        """x : [N, H], after the final norm; returns [offsets, N, H]."""
        steps: Tensor = self.outer(functional.relu(self.inner(x))).view(len(x), self.offsets, -1)
        normed: Tensor = self.norm((x[:, None] + steps).float())
        return normed.transpose(0, 1)


class Exit(nn.Module):
    """A norm and a ResBlock on the residual stream after a lower layer."""

    def __init__(self, shape: Shape, final_norm: Tensor) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, EPS)
        self.block = nn.Linear(shape.hidden, shape.hidden, bias=False)
        nn.init.zeros_(self.block.weight)
        with torch.no_grad():
            self.norm.weight.copy_(final_norm)

    def forward(self, x: Tensor) -> Tensor:
        """x : [N, H], the residual stream, of any scale; returns [1, N, H]."""
        x = self.norm(x.float())
        return (x + functional.silu(self.block(x)))[None]


KINDS: dict[str, Any] = {"medusa": Medusa, "blockwise": Blockwise, "exit": Exit}


class Heads(nn.Module):
    """Heads of some kinds, and the centroids that choose the tokens to score.

    The clusters are those of the drafter, whose centroids have another width; these are initialised with the means of
    their tokens' rows of the projection.
    """

    def __init__(
        self,
        kinds: list[str],
        shape: Shape,
        final_norm: Tensor,
        projection: Tensor,
        *,
        ordering: Tensor | None,
        count: int,
    ) -> None:
        """
        Args:
            projection: float[V, H], the target's.
            ordering: int64[V], token ids cluster by cluster; None to score the whole vocabulary.
            count: number of clusters.
        """
        super().__init__()
        self.heads = nn.ModuleDict({kind: KINDS[kind](shape, final_norm) for kind in kinds})
        self.ordering, self.centroids = ordering, None
        if ordering is not None:
            means = torch.stack([projection[ids].float().mean(dim=0) for ids in ordering.view(count, -1)])
            self.centroids = nn.Linear(shape.hidden, count, bias=False)
            self.centroids.weight = nn.Parameter(means)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint of these heads, by name."""
        found = {
            f"{kind}.{name}": value for kind, head in self.heads.items() for name, value in head.state_dict().items()
        }
        found = {name: value.to(torch.bfloat16) for name, value in found.items()}
        if self.centroids is not None and self.ordering is not None:
            found["shortlist.centroids.weight"] = self.centroids.weight.detach().to(torch.bfloat16)
            found["shortlist.token_ordering"] = self.ordering
        return {name: value.contiguous().clone() for name, value in found.items()}
