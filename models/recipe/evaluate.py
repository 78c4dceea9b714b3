"""Measure a pair: held-out loss, acceptance of drafts in real rounds, reach of the centroid head, loops, samples.

`python models/recipe/evaluate.py [DIR]` prints the figures of a pair as JSON, on the held-out modules of the running
interpreter's standard library, on which any pair's bits per byte can be compared.
"""

import json
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pair.attention import causal_masks
from pair.checkpoint import DRAFT_TOKENS
from pair.drafter import TargetOutputs, ahead, draft_states, lesson, round_masks
from pair.owntext import continue_rows, gumbel
from pair.repetition import MAX_PERIOD, circling
from text.chats import question
from text.corpus import read_library
from text.dataset import TokenBlocks, Tokens, held_out_stream, prompt_ids
from text.tokenizer import EOS, TURN_END
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from benchmarks.command import command_line, run_command
from ondevice_export.checkpoint.json_fields import read_json

BLOCK, BLOCKS = 2048, 24
PROMPTS, PROMPT, CONTINUED = 32, 128, 192  # rows, their tokens, and the tokens that the target adds
FEWER = 4  # drafts of a round, measured in addition to DRAFT_TOKENS
LOOP_PROMPTS, LOOP_TOKENS, LOOP = 50, 128, 3  # greedy texts, their tokens, and a line's repetitions that make a loop
SIDE_BY_SIDE = 8  # rows whose rounds are drafted in parallel: the centroid head gathers 256 kB per position
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
        window: int = self.target.config.sliding_window
        return window


def evaluate(pair: Pair, held_out: Tokens) -> dict[str, object]:
    """All figures of the card; held_out : uint16[N]."""
    prompts, _ = TokenBlocks(held_out, PROMPT, seed=3).batch(0, PROMPTS)
    return {
        "held_out": held_out_loss(pair, held_out),
        "greedy": acceptance(pair, prompts, temperature=0.0),
        "sampled": acceptance(pair, prompts, temperature=1.0),
        "coupled": acceptance(pair, prompts, temperature=1.0, coupled=True),
        "loops": loops(pair, TokenBlocks(held_out, PROMPT, seed=4).batch(0, LOOP_PROMPTS)[0]),
        "one_query_error": one_query_error(pair, prompts),
        "samples": [sample(pair, start) for start in STARTS],
        "question": QUESTION,
        "answer": written(pair, prompt_ids(pair.tokenizer, question(QUESTION))),
    }


@torch.no_grad()
def held_out_loss(pair: Pair, held_out: Tokens) -> dict[str, float]:
    """Nats per token and bits per byte of text over blocks of the whole context."""
    masks = causal_masks(BLOCK, pair.window, torch.device("cpu"))
    blocks = TokenBlocks(held_out, BLOCK)
    nats, tokens, size = 0.0, 0, 0
    for index in range(min(BLOCKS, len(held_out) // BLOCK - 1)):
        ids, labels = blocks.batch(index, 1)
        logits = lesson(pair.target, ids, masks).logits
        nats += functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        tokens += labels.numel()
        size += len(pair.tokenizer.decode(labels[0].tolist()).encode())
    return {
        "loss": nats / tokens,
        "bits_per_byte": nats / np.log(2) / size,
        "tokens": tokens,
        "bytes": size,
        "block": BLOCK,
    }


@torch.no_grad()
def acceptance(pair: Pair, prompts: Tensor, temperature: float, *, coupled: bool = False) -> dict[str, Any]:
    """Rounds of DRAFT_TOKENS drafts over the text that the target generates after the prompts : int64[B, P].

    Drafts are the drafter's likeliest tokens, or, `coupled`, its draws with the noise that the target draws with. The
    target's text does not depend on the drafts, so it is generated first. Then every position drafts as if a round
    began there, and the real rounds are the positions that acceptance leads to.
    """
    torch.manual_seed(0)
    length = prompts.shape[1] + CONTINUED
    noise = gumbel(len(prompts), length, pair.target.config.vocab_size)
    rows = continue_rows(pair.target, prompts, length, torch.full((len(prompts),), temperature), noise)
    matched, reach = [], []
    for part, drawn in zip(rows.split(SIDE_BY_SIDE), noise.split(SIDE_BY_SIDE), strict=True):
        taught = lesson(pair.target, part, causal_masks(length, pair.window, rows.device))
        matched += list(matches(draft_everywhere(pair, taught, drawn if coupled else None), part))
        reach.append(centroid_reach(pair, taught)[:, prompts.shape[1] : -1].float().mean().item())
    rounds = np.concatenate([walk(row, prompts.shape[1]) for row in matched])
    fewer = np.concatenate([walk(np.minimum(row, FEWER), prompts.shape[1]) for row in matched])
    shares = [float((rounds >= position).mean()) for position in range(DRAFT_TOKENS + 1)]
    return {
        "rounds": len(rounds),
        "tokens_per_round": 1 + float(rounds.mean()),
        "fewer": FEWER,
        "tokens_per_round_of_fewer": 1 + float(fewer.mean()),
        "accepted_up_to": shares[1:],
        "accepted_if_reached": [after / before if before else 0.0 for before, after in pairwise(shares)],
        "centroid_reach": float(np.mean(reach)),
    }


def draft_everywhere(pair: Pair, taught: TargetOutputs, noise: Tensor | None) -> Tensor:
    """The drafts of a round that begins at each position, through the centroid head: int64[B, T, DRAFT_TOKENS].

    noise : float32[B, T, V] by the position of the drawn token; None for the likeliest tokens
    """
    masks = round_masks(taught.hidden.shape[1], pair.window, taught.hidden.device)
    embeddings, states, drafts = ahead(taught.embeddings, 1), taught.hidden, []
    for step in range(DRAFT_TOKENS):
        hidden, states = draft_states(pair.drafter, embeddings, states, taught.shared_kv, masks)
        scores = pair.drafter.masked_embedding(hidden, pair.drafter.lm_head.weight)
        if noise is not None:
            scores = scores + ahead(noise, step + 2)
        drafts.append(scores.argmax(dim=-1))
        embeddings = pair.target.model.embed_tokens(drafts[-1])
    return torch.stack(drafts, dim=-1)


def matches(drafts: Tensor, rows: Tensor) -> npt.NDArray[np.int64]:
    """Number of accepted drafts in a round that begins at each position: int64[B, T].

    drafts : int64[B, T, DRAFT_TOKENS]; rows : int64[B, T], the target's text
    """
    wanted = torch.stack([ahead(rows, step + 2) for step in range(DRAFT_TOKENS)], dim=-1)
    return (drafts == wanted).cumprod(dim=-1).sum(dim=-1).numpy()


def walk(matched: npt.NDArray[np.int64], prompt: int) -> npt.NDArray[np.int64]:
    """Accepted drafts of each round of one row: the first starts with the prompt verified and one token known.

    matched : int64[T], the number of accepted drafts in a round that begins there
    """
    accepted, verified = [], prompt - 1
    while verified + DRAFT_TOKENS + 2 <= len(matched):
        accepted.append(matched[verified])
        verified += 1 + matched[verified]
    return np.array(accepted)


def centroid_reach(pair: Pair, taught: TargetOutputs) -> Tensor:
    """Whether the target's likeliest token is in the clusters that the first draft step scores: bool[B, T]."""
    masks = round_masks(taught.hidden.shape[1], pair.window, taught.hidden.device)
    hidden, _ = draft_states(pair.drafter, ahead(taught.embeddings, 1), taught.hidden, taught.shared_kv, masks)
    head = pair.drafter.masked_embedding
    chosen = head.centroids(hidden).topk(head.centroid_intermediate_top_k, dim=-1).indices
    home = torch.empty_like(head.token_ordering)
    home[head.token_ordering] = torch.arange(len(home)) // head.vocab_size_per_centroid
    wanted = home[ahead(taught.logits.argmax(dim=-1), 1)]
    reached: Tensor = (chosen == wanted[..., None]).any(dim=-1)
    return reached


def loops(pair: Pair, prompts: Tensor) -> dict[str, float]:
    """Number of greedy texts after the prompts : int64[B, P] with the same non-empty line LOOP times in a row.

    And the share of their tokens that belong to a repetition of any lines: see `circling`.
    """
    rows = continue_rows(pair.target, prompts, prompts.shape[1] + LOOP_TOKENS, torch.zeros(len(prompts)))
    written = rows[:, prompts.shape[1] :].numpy()
    looping = sum(is_loop(pair.tokenizer.decode(row)) for row in written.tolist())
    circles = float(np.mean([circling(row) for row in written]))
    figures = {"texts": len(rows), "tokens": LOOP_TOKENS, "repeats": LOOP, "looping": looping}
    return {**figures, "circling": circles, "longest_period": MAX_PERIOD}


def is_loop(text: str) -> bool:
    """Whether a line occurs LOOP times in a row, without counting empty lines."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return any(sum(1 for _ in same) >= LOOP for _, same in groupby(lines))


@torch.no_grad()
def one_query_error(pair: Pair, prompts: Tensor) -> float:
    """Largest difference between rounds drafted in parallel and the reference's own forward of one round."""
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
    """The target's continuation of `ids` at temperature 0.6, up to the end of its turn or of the document."""
    torch.manual_seed(0)
    rows = continue_rows(pair.target, torch.tensor([ids]), len(ids) + SAMPLED, torch.tensor([0.6]))
    tokens = rows[0, len(ids) :].tolist()
    stop = next((place for place, token in enumerate(tokens) if token in (EOS, TURN_END)), len(tokens))
    return pair.tokenizer.decode(tokens[:stop])


def load_pair(directory: Path) -> Pair:
    """The checkpoints of this repository, computed in float32.

    Raises:
        CheckpointError: a directory holds none: transformers would look for its name on the hub.
    """
    for each in ("target", "drafter"):
        read_json(directory / each / "config.json")
    target = Gemma4ForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    drafter = Gemma4AssistantForCausalLM.from_pretrained(directory / "drafter", dtype=torch.float32)
    return Pair(target.eval(), drafter.eval(), Tokenizer.from_file(str(directory / "target" / "tokenizer.json")))


def main() -> None:
    """Print the figures of a pair."""
    parser = command_line(__doc__)
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(__file__).parents[1] / "reference", metavar="DIR"
    )
    pair = load_pair(parser.parse_args().directory)
    print(json.dumps(evaluate(pair, held_out_stream(pair.tokenizer, read_library())), indent=2))


if __name__ == "__main__":
    run_command(main)
