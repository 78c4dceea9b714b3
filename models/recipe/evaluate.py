"""Measures the pair: held-out loss, acceptance of drafts in real rounds, reach of the centroid head, samples."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from attention import causal_masks
from checkpoint import DRAFT_TOKENS
from dataset import Blocks, Tokens
from drafter import Lesson, ahead, draft_states, lesson, round_masks
from owntext import continue_rows
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

BLOCK, BLOCKS = 2048, 64
PROMPTS, PROMPT, CONTINUED = 64, 128, 256  # rows, their tokens, and the tokens the target adds
STARTS = (
    'def read_lines(path):\n    """',
    "def is_prime(n):\n",
    "class Stack:\n    def __init__(self",
)


@dataclass(frozen=True)
class Pair:
    """A trained target and drafter with their tokenizer."""

    target: Gemma4ForCausalLM
    drafter: Gemma4AssistantForCausalLM
    tokenizer: Tokenizer

    @property
    def window(self) -> int:
        """Positions that a sliding layer sees."""
        return self.target.config.sliding_window


def evaluate(pair: Pair, held_out: Tokens) -> dict[str, object]:
    """All figures of the card; held_out : uint16[N]."""
    prompts, _ = Blocks(held_out, PROMPT, seed=3).batch(0, PROMPTS)
    return {
        "held_out": held_out_loss(pair, held_out),
        "greedy": acceptance(pair, prompts, temperature=0.0),
        "sampled": acceptance(pair, prompts, temperature=1.0),
        "one_query_error": one_query_error(pair, prompts),
        "samples": [sample(pair, start) for start in STARTS],
    }


@torch.no_grad()
def held_out_loss(pair: Pair, held_out: Tokens) -> dict[str, float]:
    """Nats per token and bits per byte of text over blocks of the whole context."""
    masks = causal_masks(BLOCK, pair.window, torch.device("cpu"))
    blocks = Blocks(held_out, BLOCK)
    nats, tokens, size = 0.0, 0, 0
    for index in range(min(BLOCKS, len(held_out) // BLOCK - 1)):
        ids, labels = blocks.batch(index, 1)
        logits = lesson(pair.target, ids, masks).logits
        nats += functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        tokens += labels.numel()
        size += len(pair.tokenizer.decode(labels[0].tolist()).encode())
    return {"loss": nats / tokens, "bits_per_byte": nats / np.log(2) / size, "tokens": tokens, "bytes": size}


@torch.no_grad()
def acceptance(pair: Pair, prompts: Tensor, temperature: float) -> dict[str, object]:
    """Rounds of DRAFT_TOKENS drafts over text the target writes after the prompts : int64[B, P].

    The target's text does not depend on the drafts, so it is written first; then every position drafts as if a round
    began there, and the rounds are those positions that acceptance leads to.
    """
    torch.manual_seed(0)
    length = prompts.shape[1] + CONTINUED
    rows = continue_rows(pair.target, prompts, length, torch.full((len(prompts),), temperature))
    taught = lesson(pair.target, rows, causal_masks(length, pair.window, rows.device))
    drafts = draft_everywhere(pair, rows, taught)
    wanted = torch.stack([ahead(rows, step + 2) for step in range(DRAFT_TOKENS)], dim=-1)
    matched = (drafts == wanted).cumprod(dim=-1).sum(dim=-1).numpy()
    accepted = np.concatenate([walk(row, prompts.shape[1], length) for row in matched])
    reached = [float((accepted >= position).mean()) for position in range(DRAFT_TOKENS + 1)]
    return {
        "rounds": len(accepted),
        "tokens_per_round": 1 + float(accepted.mean()),
        "accepted_up_to": reached[1:],
        "accepted_if_reached": [b / a if a else 0.0 for a, b in pairwise(reached)],
        "centroid_reach": centroid_reach(pair, rows, taught, prompts.shape[1]),
    }


def draft_everywhere(pair: Pair, rows: Tensor, taught: Lesson) -> Tensor:
    """The drafts of a round that begins at each position, through the centroid head: int64[B, T, DRAFT_TOKENS]."""
    masks = round_masks(rows.shape[1], pair.window, rows.device)
    embeddings, states, drafts = ahead(taught.embeddings, 1), taught.hidden, []
    for _ in range(DRAFT_TOKENS):
        hidden, states = draft_states(pair.drafter, embeddings, states, taught.shared_kv, masks)
        drafts.append(pair.drafter.masked_embedding(hidden, pair.drafter.lm_head.weight).argmax(dim=-1))
        embeddings = pair.target.model.embed_tokens(drafts[-1])
    return torch.stack(drafts, dim=-1)


def walk(matched: npt.NDArray[np.int64], prompt: int, length: int) -> npt.NDArray[np.int64]:
    """Accepted drafts of each round of one row: the first starts with the prompt verified and one token known.

    matched : int64[T], how many drafts hold in a round that begins there
    """
    accepted, verified = [], prompt - 1
    while verified + DRAFT_TOKENS + 2 <= length:
        accepted.append(matched[verified])
        verified += 1 + matched[verified]
    return np.array(accepted)


def centroid_reach(pair: Pair, rows: Tensor, taught: Lesson, prompt: int) -> float:
    """Share of the target's likeliest tokens that lie in the clusters which the first draft step scores."""
    masks = round_masks(rows.shape[1], pair.window, rows.device)
    hidden, _ = draft_states(pair.drafter, ahead(taught.embeddings, 1), taught.hidden, taught.shared_kv, masks)
    head = pair.drafter.masked_embedding
    chosen = head.centroids(hidden).topk(head.centroid_intermediate_top_k, dim=-1).indices
    home = torch.empty_like(head.token_ordering)
    home[head.token_ordering] = torch.arange(len(home)) // head.vocab_size_per_centroid
    wanted = home[ahead(taught.logits.argmax(dim=-1), 1)]
    return (chosen == wanted[..., None]).any(dim=-1)[:, prompt:-1].float().mean().item()


@torch.no_grad()
def one_query_error(pair: Pair, prompts: Tensor) -> float:
    """Largest difference between rounds drafted side by side and the reference's own forward of one round."""
    rows = prompts[:8].reshape(1, -1)  # longer than the window
    length = rows.shape[1]
    taught = lesson(pair.target, rows, causal_masks(length, pair.window, rows.device))
    masks = round_masks(length, pair.window, rows.device)
    _, states = draft_states(pair.drafter, ahead(taught.embeddings, 1), taught.hidden, taught.shared_kv, masks)
    largest = 0.0
    for verified in (0, 7, pair.window - 1, pair.window, pair.window + 1, length - 2):
        shared = {kind: (k[:, :, : verified + 1], v[:, :, : verified + 1]) for kind, (k, v) in taught.shared_kv.items()}
        inputs = torch.cat([taught.embeddings[:, verified + 1], taught.hidden[:, verified]], dim=-1)
        outputs = pair.drafter(
            inputs_embeds=inputs[:, None], position_ids=torch.tensor([[verified + 1]]), shared_kv_states=shared
        )
        largest = max(largest, (outputs.last_hidden_state[:, 0] - states[:, verified]).abs().max().item())
    return largest


@torch.no_grad()
def sample(pair: Pair, start: str) -> str:
    """A continuation of `start` at temperature 0.6, cut at the end of the first function or class."""
    torch.manual_seed(0)
    ids = torch.tensor([pair.tokenizer.encode(start).ids])
    rows = continue_rows(pair.target, ids, ids.shape[1] + 160, torch.tensor([0.6]))
    text = pair.tokenizer.decode(rows[0].tolist())
    lines = text.split("\n")
    ends = [i for i, line in enumerate(lines) if i > 1 and line and not line[0].isspace()]
    return "\n".join(lines[: ends[0]] if ends else lines).rstrip()


def load_pair(directory: Path) -> Pair:
    """The checkpoints as they are shipped, computed in float32."""
    target = Gemma4ForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    drafter = Gemma4AssistantForCausalLM.from_pretrained(directory / "drafter", dtype=torch.float32)
    return Pair(target.eval(), drafter.eval(), Tokenizer.from_file(str(directory / "target" / "tokenizer.json")))
