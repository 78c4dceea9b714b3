"""Causal attention with one KV head for training, which skips most of the masked scores."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BAND = 64  # queries that a sliding layer computes together; 128 were slower: see forward.py
CHUNK = 256  # queries that a full layer computes together at first; more of them in longer blocks
CHUNKS = 16  # at most, for the compiler's sake


def band_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Mask of a sliding layer's bands, added to their scores: float32[length / BAND, BAND, window + BAND].

    Band b has the queries from b * BAND on and the keys from b * BAND - window on; a query sees the last `window` keys,
    its own included. Compared with a masked_fill by positions, adding a mask made a layer's softmax take 8.8 instead of
    12.1 ms forward and 1.7 instead of 7.1 backward (2,048 tokens, bands of 128).
    """
    query = torch.arange(BAND, device=device)[:, None] + window
    key = torch.arange(window + BAND, device=device)[None]
    first = torch.arange(0, length, BAND, device=device)[:, None, None] - window
    seen = (key <= query) & (key > query - window) & (first + key >= 0)
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)


def sliding_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of a sliding layer, in bands of queries with all keys that any of them sees.

    query : [B, T, heads, D]; key, value : [B, T, D]; mask : as of `band_mask`
    returns [B, T, heads * D]
    """
    batch, length, heads, width = query.shape
    bands, span = mask.shape[0], mask.shape[2]
    rows = query.view(batch, bands, BAND, heads, width).transpose(2, 3).reshape(batch * bands, heads * BAND, width)
    keys, values = (functional.pad(x, (0, 0, span - BAND, 0)).unfold(1, span, BAND) for x in (key, value))
    scores = torch.bmm(rows, keys.reshape(batch * bands, width, span)).view(batch, bands, heads, BAND, span)
    weights = torch.softmax(scores.float() + mask[None, :, None], dim=-1).to(value.dtype)
    values = values.transpose(2, 3).reshape(batch * bands, span, width)
    mixed = torch.bmm(weights.view(batch * bands, heads * BAND, span), values)
    return mixed.view(batch, bands, heads, BAND, width).transpose(2, 3).reshape(batch, length, heads * width)


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a full layer, in chunks of queries with the keys before them; shapes as for sliding layers.

    On a GPU it is the fused kernel; on a CPU training did 4.1 k tokens/s with it, 4.2 k with chunks (bands of 128).
    """
    batch, length, heads, width = query.shape
    if query.is_cuda:
        keys, values = (x[:, None].expand(batch, heads, length, width) for x in (key, value))
        mixed = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, is_causal=True, scale=1.0)
        return mixed.transpose(1, 2).reshape(batch, length, heads * width)
    size = max(CHUNK, length // CHUNKS)
    later = torch.full((size, size), -torch.inf).triu(1)
    chunks = []
    for start in range(0, length, size):
        stop = start + size
        rows = query[:, start:stop].transpose(1, 2).reshape(batch, heads * size, width)
        scores = torch.bmm(rows, key[:, :stop].transpose(1, 2)).view(batch, heads, size, stop).float()
        weights = torch.softmax(scores + functional.pad(later, (start, 0)), dim=-1).to(value.dtype)
        mixed = torch.bmm(weights.view(batch, heads * size, stop), value[:, :stop])
        chunks.append(mixed.view(batch, heads, size, width).transpose(1, 2).reshape(batch, size, heads * width))
    return torch.cat(chunks, dim=1)


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float = 1.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention with one KV head, in the interface of transformers ("chunked").

    Keys above the diagonal and before the window are skipped. Compared with whole score matrices, a step of 8 blocks of
    512 was 1.4 times as fast, a step of 4 equally fast; longer blocks skip more.

    query : [B, heads, T, D]; key, value : [B, 1, T, D]; attention_mask : [1, 1, T, T], added to the scores
    returns [B, T, heads, D]
    """
    batch, heads, length, width = query.shape
    size = min(CHUNK, length // 4)
    chunks = []
    for start in range(0, length, size):
        stop = start + size
        first = 0 if sliding_window is None else max(0, start - sliding_window) // size * size
        rows = query[:, :, start:stop].reshape(batch, heads * size, width)
        scores = (rows @ key[:, 0, first:stop].transpose(1, 2)).view(batch, heads, size, stop - first)
        scores = scores.float() * scaling + attention_mask[:, :, start:stop, first:stop]
        weights = torch.softmax(scores, dim=-1).to(value.dtype).view(batch, heads * size, stop - first)
        chunks.append((weights @ value[:, 0, first:stop]).view(batch, heads, size, width))
    return torch.cat(chunks, dim=2).transpose(1, 2), None


def causal_masks(length: int, window: int, device: torch.device) -> dict[str, Tensor]:
    """Additive masks [1, 1, T, T] by layer type: sliding layers see the last `window` positions, their own included."""
    position = torch.arange(length, device=device)
    age = position[:, None] - position[None, :]
    seen = {"full_attention": age >= 0, "sliding_attention": (age >= 0) & (age < window)}
    return {
        kind: torch.zeros(1, 1, length, length, device=device).masked_fill(~ok, -torch.inf) for kind, ok in seen.items()
    }


ALL_ATTENTION_FUNCTIONS.register("chunked", chunked_attention)
