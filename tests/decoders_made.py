"""Layers of a decoder for tests that need no weights."""

from __future__ import annotations

from ondevice.bundle_format.decoder import Attention, Block, FeedForward, Layer


def layer(
    *,
    window: int | None = None,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 2,
    width: int = 1,
    kv_source: int | None = None,
    rotary: int | None = None,
) -> Layer:
    """A layer with all norms, as Gemma 4's; `width` is that of its feed-forward block."""
    writes = kv_source is None
    body = Attention(
        heads, kv_heads, head_dim, 1.0, rotary, window, kv_source, q_norm=True, k_norm=writes, v_norm=writes
    )
    blocks = (Block(each, norm_in=True, norm_out=True) for each in (body, FeedForward(width, "gelu_tanh")))
    return Layer(tuple(blocks), scalar=True)
