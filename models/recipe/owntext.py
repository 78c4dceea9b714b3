"""Text that the target writes itself, for the drafter to learn from: acceptance is about the target's own words."""

from pathlib import Path

import numpy as np
import torch
from dataset import Blocks
from tokenizer import PAD
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, Gemma4ForCausalLM

LENGTH = 512
PROMPT = 64
TEMPERATURES = (0.0, 0.6, 0.8, 1.0)  # by row, in turn
ROWS = 128


def gumbel(*shape: int) -> Tensor:
    """Gumbel noise: what makes the argmax of logits a draw from their softmax. float32[shape]"""
    return -torch.empty(shape).exponential_().log()


@torch.no_grad()
def continue_rows(
    target: Gemma4ForCausalLM, prompts: Tensor, length: int, temperatures: Tensor, noise: Tensor | None = None
) -> Tensor:
    """Sample prompts : int64[B, P] on to int64[B, length].

    temperatures : float32[B], 0 for greedy; noise : Gumbel noise by place, float32[B, length, V], None for new noise
    """
    cache, rows, newest = DynamicCache(config=target.config.get_text_config()), prompts, prompts
    while (place := rows.shape[1]) < length:
        logits = target(newest, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        logits[:, PAD] = -torch.inf
        drawn = gumbel(*logits.shape).to(logits.device) if noise is None else noise[:, place]
        newest = (logits + drawn * temperatures[:, None]).argmax(dim=-1, keepdim=True)
        rows = torch.cat([rows, newest], dim=1)
    return rows


def write_own_text(target: Gemma4ForCausalLM, work: Path, batches: int, device: torch.device) -> None:
    """Continue prompts from the training stream and write them as `own.npy`, one stream of uint16; nothing if there."""
    if (work / "own.npy").exists():
        return
    torch.manual_seed(0)
    prompts = Blocks(np.load(work / "train.npy"), PROMPT, seed=2)
    temperatures = torch.tensor(TEMPERATURES, device=device).repeat(ROWS // len(TEMPERATURES))
    written = []
    for batch in tqdm(range(batches), desc="own text"):
        ids, _ = prompts.batch(batch, ROWS)
        rows = continue_rows(target.to(device), ids.to(device), LENGTH, temperatures)
        written.append(rows.cpu().numpy().astype(np.uint16))
    np.save(work / "own.npy", np.concatenate(written).ravel())
