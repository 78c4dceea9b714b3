"""Replies of a target written by an accelerator: thousands of conversations in every forward.

Rows are sorted by the lengths of their prompts and padded on the left; a row whose reply has ended waits for the
others. A small target is limited by the launches of its kernels: a step of SmolLM2 took 58 to 72 ms on an H200, with
1,640 rows as with 4,096. Four processes at once were no faster, since they take turns on the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafters.lessons import head_dim
from drafters.replies import (
    HELD_OUT_TOKENS,
    MAX_ASKED,
    MOST,
    Asked,
    Written,
    asked,
    before_a_message,
    lines_of,
    read_replies,
)
from drafters.states import FrozenTarget
from ondevice.text.codec import TextCodec

WAVE = 16_384  # messages of which the prompts are sorted together
ROWS = 4096  # replies of a forward
MEMORY = 0.4  # share of the free memory for the caches and logits of a forward's rows
LOOK = 16  # steps after which is looked whether all replies have ended
GROUPED = "grouped"  # the attention below, by transformers' registry


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token per row whose heads share keys and values without copies of these.

    query : [B, heads, 1, D]; key, value : [B, KV heads, T, D]; attention_mask : bool[B, 1, 1, T]
    returns [B, 1, heads, D]

    `scaled_dot_product_attention` repeats keys and values for every head if there is a mask: three times the memory
    traffic for SmolLM2. Prompts, with more queries, are left to it.
    """
    if query.shape[2] > 1 or attention_mask is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    queries = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    mask = attention_mask.expand(-1, key.shape[1], queries.shape[2], -1)
    scale = options["scaling"]
    mixed = functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scale)
    return mixed.flatten(1, 2)[:, None], None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class DeviceWriter:
    """A target on an accelerator, with the tokenizer and the chat template of its bundle. ends : ids that end a text"""

    def __init__(self, target: FrozenTarget, codec: TextCodec, ends: Sequence[int]) -> None:
        self.target, self.codec = target, codec
        self.ends = torch.tensor(ends, device=target.projection.device)
        tokenizer = codec.tokenizer
        assert tokenizer is not None
        self.decode = tokenizer.decode
        self.opening = before_a_message(self.encode, self.decode)

    def encode(self, prompt: Any) -> list[int]:
        """The ids of a prompt."""
        return self.codec.encode(prompt, self.target.config.max_position_embeddings)

    def write(self, messages: Sequence[Asked], most: int) -> list[Written]:
        """The replies to messages, less those where the target asked nothing. most : tokens of a reply"""
        known = self.own([each for each in messages if each.kind == "own"])
        known += [each for each in messages if each.kind != "own"]
        texts = [each.text for each in known]
        prompts = [self.encode(x if self.opening is None else [{"role": "user", "content": x}]) for x in texts]
        replies = self.continued(prompts, [each.temperature for each in known], most)
        return [
            Written(each.number, each.kind, each.temperature, ids, reply)
            for each, ids, reply in zip(known, prompts, replies, strict=True)
        ]

    def own(self, messages: Sequence[Asked]) -> list[Asked]:
        """Messages with the target's text, less those that did not end within MAX_ASKED tokens."""
        if self.opening is None:
            return []
        made = self.continued([self.opening] * len(messages), [1.0] * len(messages), MAX_ASKED)
        ends = set(self.ends.tolist())
        texts = [self.decode(ids[:-1]).strip() if ids[-1] in ends else "" for ids in made]
        return [replace(each, text=text) for each, text in zip(messages, texts, strict=True) if text]

    def continued(self, prompts: Sequence[list[int]], temperatures: Sequence[float], most: int) -> list[list[int]]:
        """The tokens after each prompt, at most `most`, with the one that ends them."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        found: list[list[int]] = [[]] * len(prompts)
        while order:
            length = len(prompts[order[0]]) + most
            some, order = order[: self.rows(length)], order[self.rows(length) :]
            rows = self.rows_after([prompts[n] for n in some], torch.tensor([temperatures[n] for n in some]), most)
            for index, row in zip(some, rows, strict=True):
                found[index] = row
        return found

    def rows(self, length: int) -> int:
        """How many conversations of this length fit into a forward."""
        config, device = self.target.config, self.target.projection.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
        kept = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * length
        return max(1, min(ROWS, int(MEMORY * free / (kept + 16 * config.vocab_size))))

    @torch.no_grad()
    def rows_after(self, prompts: Sequence[list[int]], temperatures: Tensor, most: int) -> list[list[int]]:
        """As `continued`, in one forward per step."""
        device, longest = self.target.projection.device, max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        seen = torch.ones(len(prompts), longest + most, dtype=torch.int64)
        for row, mask, prompt in zip(ids, seen, prompts, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt)
            mask[: longest - len(prompt)] = 0
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0).to(device)
        newest, seen, heat = ids.to(device), seen.to(device), temperatures.to(device)[:, None]
        cache = StaticCache(self.target.config, max_cache_len=longest + most)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        made: list[Tensor] = []
        self.target.model.set_attn_implementation(GROUPED)
        for step in range(most):
            place = longest + step
            logits = (
                self.target.model(
                    input_ids=newest,
                    attention_mask=seen[:, :place],
                    position_ids=positions[:, place - newest.shape[1] : place],
                    past_key_values=cache,
                    logits_to_keep=1,
                )
                .logits[:, -1]
                .float()
            )
            noise = torch.empty_like(logits).exponential_().log_()
            newest = logits.sub_(noise.mul_(heat)).argmax(dim=-1, keepdim=True)
            made.append(newest)
            ended |= torch.isin(newest[:, 0], self.ends)
            if step % LOOK == LOOK - 1 and bool(ended.all()):
                break
        self.target.model.set_attn_implementation("sdpa")
        tokens = torch.cat(made, dim=1)
        last = torch.isin(tokens, self.ends).int()
        counts = torch.where(last.any(dim=1), last.argmax(dim=1) + 1, tokens.shape[1]).tolist()
        return [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]


def write_replies_on_device(writer: DeviceWriter, file: Path, tokens: int) -> None:
    """Append replies to a file until it has `tokens` tokens of them, those of a wave together."""
    known = list(read_replies(file))
    total, begun = sum(len(each.reply) for each in known), len({each.number // WAVE for each in known})
    for wave in itertools.count(begun):
        if total >= tokens:
            return
        started = time.monotonic()
        torch.manual_seed(wave)
        written = writer.write([asked(number) for number in range(wave * WAVE, (wave + 1) * WAVE)], MOST)
        with file.open("a") as output:
            output.write(lines_of(written))
        fresh = sum(len(each.reply) for each in written)
        total += fresh
        speed = fresh / (time.monotonic() - started)
        print(f"{time.strftime('%H:%M:%S')} {file.name}: {total:,} tokens, {speed:.0f} per second", flush=True)


def write_held_out_on_device(writer: DeviceWriter, messages: Sequence[Asked], out: Path) -> None:
    """Write the replies to given messages."""
    torch.manual_seed(0)
    out.write_text(lines_of(writer.write(messages, HELD_OUT_TOKENS)))
