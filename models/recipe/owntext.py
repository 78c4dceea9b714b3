"""Text that the target writes itself, for the drafter to learn from: acceptance is about the target's own words."""

import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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

    On a CPU the target is in bfloat16 afterwards.
    """
    if file.exists():
        return
    prompts = Blocks(np.load(work / "train.npy", mmap_mode="r"), PROMPT, seed=2)
    if device.type == "cpu":
        save_target(target, work / "writer")
        written = written_by_engine(work / "writer", work / "writer-bundle", prompts, range(batches * ROWS), LENGTH)
    else:
        written = written_on_device(target.to(device), prompts, range(batches * ROWS), LENGTH)
    rows = list(tqdm(written, desc="own text", total=batches * ROWS))
    np.save(file, np.array(rows, np.uint16).ravel())


def written_on_device(target: Any, prompts: Blocks, numbers: range, length: int) -> Iterator[list[int]]:
    """The prompts of these numbers, each continued to `length` tokens, ROWS at a time."""
    for batch in (numbers[first : first + ROWS] for first in range(0, len(numbers), ROWS)):
        torch.manual_seed(batch[0])
        ids = torch.tensor([read_prompt(prompts, number) for number in batch], device=target.device)
        temperatures = torch.tensor([TEMPERATURES[number % len(TEMPERATURES)] for number in batch])
        yield from continue_rows(target, ids, length, temperatures.to(target.device)).tolist()


def written_by_engine(
    checkpoint: Path, bundle: Path, prompts: Blocks, numbers: range, length: int
) -> Iterator[list[int]]:
    """As `written_on_device`, by the engine that the text is for: from an export of the checkpoint, on every core.

    Some 3,000 tokens/s of a core, where `continue_rows` had 700: it multiplies in float32, and copies its cache.
    """
    shutil.rmtree(bundle, ignore_errors=True)  # of an earlier target
    export_bundle(checkpoint, bundle, drafter="none", heads="none")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn, initializer=open_writer, initargs=(bundle,)) as pool:
        yield from pool.map(partial(write, length), numbers, (read_prompt(prompts, n) for n in numbers), chunksize=4)


def read_prompt(prompts: Blocks, number: int) -> list[int]:
    """Block `number` of the prompts, without the label behind it."""
    tokens: list[int] = prompts.block(number)[:-1].tolist()
    return tokens


def open_writer(bundle: Path) -> None:
    """What a process of the pool begins with."""
    writers.append(ondevice.load(bundle, threads=1, drafter="ngram"))


def write(length: int, number: int, prompt: list[int]) -> list[int]:
    """A prompt and what the process's target writes behind it; where a text ends before `length`, another begins."""
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    options: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": number}
    text = prompt
    while len(text) < length:
        text = [*text, *writers[0].generate(text, max_new_tokens=length - len(text), **options).token_ids]
    return text
