"""Text that the target writes itself, for the drafter to learn from: acceptance is about the target's own words."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from checkpoint import save_target
from dataset import Blocks
from tokenizer import PAD
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, Gemma4ForCausalLM

import ondevice
from ondevice_export import export as export_bundle

LENGTH = 512
PROMPT = 64
TEMPERATURES = (0.0, 0.6, 0.8, 1.0)  # by row, in turn
ROWS = 128
writers: list[ondevice.Model] = []  # of a process of the pool: one


def gumbel(*shape: int) -> Tensor:
    """Gumbel noise: what makes the argmax of logits a draw from their softmax. float32[shape]"""
    return -torch.empty(shape).exponential_().log()


@torch.no_grad()
def continue_rows(
    target: Gemma4ForCausalLM, prompts: Tensor, length: int, temperatures: Tensor, noise: Tensor | None = None
) -> Tensor:
    """Sample prompts : int64[B, P] on to int64[B, length]; leaves the target with transformers' eager attention.

    temperatures : float32[B], 0 for greedy; noise : Gumbel noise by place, float32[B, length, V], None for new noise
    """
    target.set_attn_implementation("eager")  # one query a row: 1.4 times as many tokens as with sdpa on a core
    cache, rows, newest = DynamicCache(config=target.config.get_text_config()), prompts, prompts
    while (place := rows.shape[1]) < length:
        logits = target(newest, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        logits[:, PAD] = -torch.inf
        drawn = gumbel(*logits.shape).to(logits.device) if noise is None else noise[:, place]
        newest = (logits + drawn * temperatures[:, None]).argmax(dim=-1, keepdim=True)
        rows = torch.cat([rows, newest], dim=1)
    return rows


def write_own_text(target: Gemma4ForCausalLM, work: Path, file: Path, batches: int, device: torch.device) -> None:
    """Continue prompts from the training stream and write them to `file`, one stream of uint16; nothing if it is there.

    On a CPU the text is that of the engine it is for; it ends where the target ends it. The target is in bfloat16 then.
    """
    if file.exists():
        return
    torch.manual_seed(0)
    prompts, _ = Blocks(np.load(work / "train.npy", mmap_mode="r"), PROMPT, seed=2).batch(0, batches * ROWS)
    if device.type == "cpu":
        written = written_by_engine(target, work, prompts.numpy())
    else:
        temperatures = torch.tensor(TEMPERATURES, device=device).repeat(ROWS // len(TEMPERATURES))
        target, parts = target.to(device), tqdm(prompts.to(device).split(ROWS), desc="own text")
        written = [continue_rows(target, ids, LENGTH, temperatures).cpu().numpy().ravel() for ids in parts]
    np.save(file, np.concatenate(written).astype(np.uint16))


def written_by_engine(target: Gemma4ForCausalLM, work: Path, prompts: npt.NDArray[np.int64]) -> list[list[int]]:
    """Each prompt [N, P] with what follows it, from an export of the target, a process for every core.

    Some 3,000 tokens/s of a core, where `continue_rows` had 700: it multiplies in float32, and copies its cache.
    """
    save_target(target, work / "writer")
    bundle = export_bundle(work / "writer", work / "writer-bundle", drafter="none", heads="none")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn, initializer=open_writer, initargs=(bundle,)) as pool:
        texts = pool.map(write, range(len(prompts)), prompts.tolist(), chunksize=4)
        return list(tqdm(texts, desc="own text", total=len(prompts)))


def open_writer(bundle: Path) -> None:
    """What a process of the pool begins with."""
    writers.append(ondevice.load(bundle, threads=1, drafter="ngram"))


def write(number: int, prompt: list[int]) -> list[int]:
    """A prompt and what the process's target writes behind it."""
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    options = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": number}
    return [*prompt, *writers[0].generate(prompt, max_new_tokens=LENGTH - PROMPT, **options).token_ids]
