"""Measures the pair: held-out loss, acceptance of drafts in real rounds, reach of the centroid head, samples."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from attention import causal_masks
from chats import question
from checkpoint import DRAFT_TOKENS
from dataset import Blocks, Tokens, prompt_ids
from drafter import Lesson, ahead, draft_states, lesson, round_masks
from owntext import continue_rows
from tokenizer import EOS, TURN_END
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

BLOCK, BLOCKS = 2048, 24
PROMPTS, PROMPT, CONTINUED = 32, 128, 192  # rows, their tokens, and the tokens the target adds
SIDE_BY_SIDE = 8  # rows whose rounds are drafted together: the centroid head gathers 256 kB per position
STARTS = (
    'def read_lines(path):\n    """',
    "def is_prime(n):",
    "class Stack:\n    def __init__(self",
)


QUESTION = "Write a Python function `add(a, b)`: Return the sum of two numbers."
SAMPLED = 160  # tokens of a sample, at most


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
        "question": QUESTION,
        "answer": written(pair, prompt_ids(pair.tokenizer, question(QUESTION))),
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
    accepted, reach = [], []
    for part in rows.split(SIDE_BY_SIDE):
        taught = lesson(pair.target, part, causal_masks(length, pair.window, rows.device))
        accepted += [walk(row, prompts.shape[1]) for row in matches(draft_everywhere(pair, taught), part)]
        reach.append(centroid_reach(pair, taught)[:, prompts.shape[1] : -1].float().mean().item())
    rounds = np.concatenate(accepted)
    shares = [float((rounds >= position).mean()) for position in range(DRAFT_TOKENS + 1)]
    return {
        "rounds": len(rounds),
        "tokens_per_round": 1 + float(rounds.mean()),
        "accepted_up_to": shares[1:],
        "accepted_if_reached": [after / before if before else 0.0 for before, after in pairwise(shares)],
        "centroid_reach": float(np.mean(reach)),
    }


def draft_everywhere(pair: Pair, taught: Lesson) -> Tensor:
    """The drafts of a round that begins at each position, through the centroid head: int64[B, T, DRAFT_TOKENS]."""
    masks = round_masks(taught.hidden.shape[1], pair.window, taught.hidden.device)
    embeddings, states, drafts = ahead(taught.embeddings, 1), taught.hidden, []
    for _ in range(DRAFT_TOKENS):
        hidden, states = draft_states(pair.drafter, embeddings, states, taught.shared_kv, masks)
        drafts.append(pair.drafter.masked_embedding(hidden, pair.drafter.lm_head.weight).argmax(dim=-1))
        embeddings = pair.target.model.embed_tokens(drafts[-1])
    return torch.stack(drafts, dim=-1)


def matches(drafts: Tensor, rows: Tensor) -> npt.NDArray[np.int64]:
    """How many drafts hold in a round that begins at each position: int64[B, T].

    drafts : int64[B, T, DRAFT_TOKENS]; rows : int64[B, T], what the target wrote
    """
    wanted = torch.stack([ahead(rows, step + 2) for step in range(DRAFT_TOKENS)], dim=-1)
    return (drafts == wanted).cumprod(dim=-1).sum(dim=-1).numpy()


def walk(matched: npt.NDArray[np.int64], prompt: int) -> npt.NDArray[np.int64]:
    """Accepted drafts of each round of one row: the first starts with the prompt verified and one token known.

    matched : int64[T], how many drafts hold in a round that begins there
    """
    accepted, verified = [], prompt - 1
    while verified + DRAFT_TOKENS + 2 <= len(matched):
        accepted.append(matched[verified])
        verified += 1 + matched[verified]
    return np.array(accepted)


def centroid_reach(pair: Pair, taught: Lesson) -> Tensor:
    """Whether the target's likeliest token lies in the clusters which the first draft step scores: bool[B, T]."""
    masks = round_masks(taught.hidden.shape[1], pair.window, taught.hidden.device)
    hidden, _ = draft_states(pair.drafter, ahead(taught.embeddings, 1), taught.hidden, taught.shared_kv, masks)
    head = pair.drafter.masked_embedding
    chosen = head.centroids(hidden).topk(head.centroid_intermediate_top_k, dim=-1).indices
    home = torch.empty_like(head.token_ordering)
    home[head.token_ordering] = torch.arange(len(home)) // head.vocab_size_per_centroid
    wanted = home[ahead(taught.logits.argmax(dim=-1), 1)]
    return (chosen == wanted[..., None]).any(dim=-1)


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


def sample(pair: Pair, start: str) -> str:
    """A continuation of `start`, cut at the end of the first function or class."""
    lines = (start + written(pair, pair.tokenizer.encode(start).ids)).split("\n")
    ends = [place for place, line in enumerate(lines) if place and line and not line[0].isspace()]
    return "\n".join(lines[: ends[0]] if ends else lines).rstrip()


@torch.no_grad()
def written(pair: Pair, ids: list[int]) -> str:
    """What the target writes after `ids` at temperature 0.6, up to the end of its turn or of the document."""
    torch.manual_seed(0)
    rows = continue_rows(pair.target, torch.tensor([ids]), len(ids) + SAMPLED, torch.tensor([0.6]))
    tokens = rows[0, len(ids) :].tolist()
    stop = next((place for place, token in enumerate(tokens) if token in (EOS, TURN_END)), len(tokens))
    return pair.tokenizer.decode(tokens[:stop])


def load_pair(directory: Path) -> Pair:
    """The checkpoints as they are shipped, computed in float32."""
    target = Gemma4ForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    drafter = Gemma4AssistantForCausalLM.from_pretrained(directory / "drafter", dtype=torch.float32)
    return Pair(target.eval(), drafter.eval(), Tokenizer.from_file(str(directory / "target" / "tokenizer.json")))
