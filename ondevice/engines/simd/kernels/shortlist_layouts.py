"""Steps of a head that scores a few clusters of tokens.

Fields and words are those of `step_layouts`.
"""

from __future__ import annotations

from typing import NamedTuple


class CentroidScores(NamedTuple):
    """Score every cluster of the vocabulary by its centroid."""

    weights: int
    """Address of float32[clusters, width], the centroids."""
    clusters: int
    width: int
    x: int
    """Address of float32[width]."""
    out: int
    """Address of float32[clusters], the scores."""


class Shortlist(NamedTuple):
    """Choose the clusters with the best scores, for each of some rows."""

    scores: int
    """Address of float32[rows, stride]."""
    clusters: int
    chosen: int
    """Address of int64[rows, top], the clusters, best first."""
    top: int
    rows: int
    stride: int
    """Scores from a row to the next."""


class CandidateLogits(NamedTuple):
    """The ids and logits of all tokens in the chosen clusters, written to the slots CANDIDATES and LOGITS."""

    codes: int
    """Address of the table's codes."""
    scales: int
    """Address of the table's scales."""
    half: int
    """1 where the scales are fp16, 0 where they are float32."""
    bits: int
    """Of a code."""
    group: int
    """Numbers that share a scale; 0 where the codes are plain numbers."""
    width: int
    """Of a row of the table."""
    x: int
    """Address of float32[rows, width]."""
    chosen: int
    """Address of int64[rows, top], the clusters."""
    top: int
    per_cluster: int
    """Tokens in a cluster."""
    ids: int
    """Address of int64[clusters, per_cluster], the clusters' tokens."""
    rows: int
    clustered: int
    """1 where the table's rows lie cluster by cluster, 0 where they lie in the order of their tokens."""
    cap: int
    """As in `Project`."""
