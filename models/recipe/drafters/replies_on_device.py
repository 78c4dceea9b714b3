"""A target's replies with its states, written by an accelerator: thousands of conversations in every forward.

Rows are sorted by the lengths of their prompts and padded on the left; a row whose reply has ended waits for the
others. A small target is limited by the launches of its kernels: a step of SmolLM2 took 58 to 72 ms on an H200, with
1,640 rows as with 4,096. Four processes at once were no faster, since they take turns on the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lesson, Shards
from drafters.replies import LONGEST, MOST, MOST_ASKED, Asked, ChatIds, asked, repeats
from ondevice.bundle import Bundle
from ondevice.text.codec import TextCodec

WAVE = 16_384  # messages of which the prompts are sorted together
ROWS = 4096  # replies of a forward
MEMORY = 0.4  # share of the free memory for the caches and logits of a forward's rows
STATE_TOKENS = 1 << 16  # tokens of a forward over finished conversations, padding included
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


class Written(NamedTuple):
    """A conversation: its message, the tokens of the prompt, and the ids of prompt and reply."""

    message: Asked
    prompt: int
    tokens: list[int]


class DeviceWriter:
    """A target on an accelerator, with the tokenizer and the chat template of its bundle."""

    def __init__(self, target: FrozenTarget, chat: ChatIds) -> None:
        self.target, self.chat = target, chat
        self.ends = torch.tensor(sorted(chat.ends), device=target.projection.device)

    @classmethod
    def open(cls, target: FrozenTarget, bundle: Bundle) -> DeviceWriter:
        """With the chat of an exported bundle."""
        codec = TextCodec(bundle)
        assert codec.tokenizer is not None
        context = target.config.max_position_embeddings
        encode, decode = partial(codec.encode, context_length=context), codec.tokenizer.decode
        return cls(target, ChatIds(encode, decode, bundle.manifest.eos_token_ids))

    def lessons(self, messages: Sequence[Asked], most: int) -> Iterator[Lesson]:
        """The lessons of messages, less those where the target asked nothing. most : tokens of a reply"""
        known = self.completed(messages)
        prompts = [self.chat.message(each.prompt.text) for each in known]
        replies = self.continued(prompts, [each.temperature for each in known], most)
        rows = (
            Written(each, len(prompt), [*prompt, *reply][:LONGEST])
            for each, prompt, reply in zip(known, prompts, replies, strict=True)
        )
        yield from with_states(self.target, sorted(rows, key=lambda row: len(row.tokens)))

    def completed(self, messages: Sequence[Asked]) -> list[Asked]:
        """Messages with what the target writes for them first, less those for which it wrote nothing."""
        first = [self.chat.first(each) for each in messages]
        open_ones = [(each, ids) for each, ids in zip(messages, first, strict=True) if ids]
        made = self.continued([ids for _, ids in open_ones], [1.0] * len(open_ones), MOST_ASKED)
        found = [self.chat.completed(each, ids) for (each, _), ids in zip(open_ones, made, strict=True)]
        finished = [each for each, ids in zip(messages, first, strict=True) if ids is None]
        return finished + [each for each in found if each is not None]

    def continued(self, prompts: Sequence[list[int]], temperatures: Sequence[float], most: int) -> list[list[int]]:
        """The tokens after each prompt, at most `most`, up to one that ends them or where they repeat themselves."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        found: list[list[int]] = [[]] * len(prompts)
        while order:
            length = len(prompts[order[0]]) + most
            some, order = order[: self.rows(length)], order[self.rows(length) :]
            rows = self.rows_after([prompts[n] for n in some], torch.tensor([temperatures[n] for n in some]), most)
            for index, row in zip(some, rows, strict=True):
                found[index] = up_to_repetition(row)
        return found

    def rows(self, length: int) -> int:
        """How many conversations of this length fit into a forward."""
        form, device = self.target.form, self.target.projection.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
        kept = 4 * sum(own.kv_width for own in form.cached.values()) * length
        return max(1, min(ROWS, int(MEMORY * free / (kept + 16 * form.vocab_size))))

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
        attention = self.target.model.config._attn_implementation
        if attention == "sdpa":  # not where heads have sinks
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
        self.target.model.set_attn_implementation(attention)
        tokens = torch.cat(made, dim=1)
        last = torch.isin(tokens, self.ends).int()
        counts = torch.where(last.any(dim=1), last.argmax(dim=1) + 1, tokens.shape[1]).tolist()
        return [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]


def up_to_repetition(reply: list[int]) -> list[int]:
    """The reply up to where it repeats itself."""
    seen: set[tuple[int, ...]] = set()
    lengths = range(1, len(reply) + 1)
    return next((reply[:length] for length in lengths if repeats(reply[:length], seen)), reply)


@torch.no_grad()
def with_states(target: FrozenTarget, rows: Sequence[Written]) -> Iterator[Lesson]:
    """The lessons of conversations, the shortest first. Those of a forward are padded at their end."""
    for batch in batches(rows):
        ids = torch.zeros(len(batch), len(batch[-1].tokens), dtype=torch.int64)
        for padded, row in zip(ids, batch, strict=True):
            padded[: len(row.tokens)] = torch.tensor(row.tokens)
        cache = DynamicCache(config=target.config)
        hidden = target.decoder(input_ids=ids.to(target.projection.device), past_key_values=cache).last_hidden_state
        layer = cache.layers[target.source]
        keys, values = (each.transpose(1, 2).flatten(2) for each in (layer.keys, layer.values))
        kept = torch.stack([target.keys(keys), values], dim=1).half().cpu()
        for row, own, keys_values in zip(batch, target.states(hidden).half().cpu(), kept, strict=True):
            tokens, count = torch.tensor(row.tokens, dtype=torch.int32), len(row.tokens)
            facts = row.message.number, row.message.prompt.kind, row.message.temperature, row.prompt
            yield Lesson(*facts, tokens, own[:count].clone(), keys_values[:, :count].clone())


def batches(rows: Sequence[Written]) -> Iterator[list[Written]]:
    """Conversations, the shortest first, that fit into a forward of STATE_TOKENS tokens."""
    batch: list[Written] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.tokens) > STATE_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def write_replies_on_device(writer: DeviceWriter, directory: Path, tokens: int, first: int) -> None:
    """Write lessons to files in a directory until their replies have `tokens` tokens, those of a wave together.

    first : number of the first message
    """
    shards = Shards(directory)
    for wave in itertools.count(len({(number - first) // WAVE for number in shards.numbers})):
        if shards.tokens >= tokens:
            return
        started, before = time.monotonic(), shards.tokens
        torch.manual_seed(wave)
        numbers = range(first + wave * WAVE, first + (wave + 1) * WAVE)
        for lesson in writer.lessons([asked(number) for number in numbers], MOST):
            shards.add(lesson)
        shards.finish()
        speed = (shards.tokens - before) / (time.monotonic() - started)
        line = f"{time.strftime('%H:%M:%S')} wave {wave}: {shards.tokens:,} tokens of replies, "
        print(f"{line}{speed:.0f} per second", flush=True)
