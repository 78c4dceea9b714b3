"""Balanced clusters of the vocabulary, for the drafter's centroid head."""

import torch
from torch import Tensor
from torch.nn import functional

ROUNDS = 20


def balanced_clusters(vectors: Tensor, count: int) -> Tensor:
    """Balanced k-means on directions: the order int64[V] whose c-th run of V / count ids is cluster c.

    vectors : float32[V, D]
    """
    directions = functional.normalize(vectors.float(), dim=-1)
    size = len(directions) // count
    generator = torch.Generator().manual_seed(0)
    centres = directions[torch.randperm(len(directions), generator=generator)[:count]]
    for _ in range(ROUNDS):
        order = fill(directions @ centres.T, size)
        centres = functional.normalize(directions[order].view(count, size, -1).mean(dim=1), dim=-1)
    return order


def fill(likeness: Tensor, size: int) -> Tensor:
    """Assign every token to its best cluster that is not full, tokens with the largest margin first: int64[V], by
    cluster.

    likeness : float32[V, clusters]
    """
    best_two = likeness.topk(2, dim=1).values
    surest_first = (best_two[:, 0] - best_two[:, 1]).argsort(descending=True)
    wishes = likeness.argsort(dim=1, descending=True).tolist()
    members: list[list[int]] = [[] for _ in range(likeness.shape[1])]
    for token in surest_first.tolist():
        home = next(cluster for cluster in wishes[token] if len(members[cluster]) < size)
        members[home].append(token)
    return torch.tensor(members).flatten()
