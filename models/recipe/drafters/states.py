"""Hidden states of a frozen target over text, computed once and kept on disk to train its heads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pair.owntext import PROMPT, written_by_engine, written_on_device
from text.corpus import read_library
from text.dataset import TokenBlocks
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from drafters.frozen_target import FrozenTarget

LENGTH = 512  # tokens of a block; training does not look across its end
TOGETHER = 8  # blocks of one forward
OWN_SHARE = 0.75  # share of generated tokens; the rest is the text itself


def text_stream(target: FrozenTarget, directory: Path, files: Iterable[Path]) -> npt.NDArray[np.uint32]:
    """Files of text, or else Python's standard library, as one stream of the target's tokens."""
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    texts = texts or [module.text for module in read_library() if not module.held_out]
    eos = target.model.generation_config.eos_token_id
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return read_text(tokenizer, texts, eos[0] if isinstance(eos, list) else eos)


def read_text(tokenizer: Tokenizer, texts: Iterable[str], eos: int) -> npt.NDArray[np.uint32]:
    """All texts as one stream of token ids, each preceded by <bos> and followed by `eos`."""
    rows = (encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=True))
    return np.concatenate([np.array([*ids, eos], np.uint32) for ids in rows])


def write_own(target: FrozenTarget, checkpoint: Path, stream: npt.NDArray[np.uint32], count: int, file: Path) -> None:
    """Generate `count` blocks of LENGTH tokens with the target after short pieces of the text; resumes after a stop."""
    rows = np.lib.format.open_memmap(file, "r+" if file.exists() else "w+", np.uint32, (count, LENGTH))
    missing = range(int(rows.any(axis=1).sum()), count)
    if not missing:
        return
    prompts = TokenBlocks(stream, PROMPT, seed=2)
    if target.projection.device.type == "cpu":
        written = written_by_engine(checkpoint, file.with_suffix(".bundle"), prompts, missing, LENGTH)
    else:
        written = written_on_device(target.model, prompts, missing, LENGTH)
    for number, row in zip(missing, tqdm(written, desc="own text", total=len(missing)), strict=True):
        rows[number] = row
    rows.flush()


@torch.no_grad()
def write_states(target: FrozenTarget, tokens: npt.NDArray[Any], layer: int, file: Path) -> None:
    """float16[2, blocks, LENGTH, H] of tokens [blocks, LENGTH]: after the final norm, and after a layer.

    The second at unit scale, because the residual stream of a large model exceeds float16's range, and a norm reads it.
    A second file counts the written blocks, from which a stopped run resumes.
    """
    shape = (2, len(tokens), LENGTH, target.config.hidden_size)
    states = np.lib.format.open_memmap(file, "r+" if file.exists() else "w+", np.float16, shape)
    done = file.with_suffix(".done")
    start = int(done.read_text()) if done.exists() else 0
    behind: list[Tensor] = []
    hook = target.decoder.layers[layer].register_forward_hook(lambda module, inputs, output: behind.append(output))
    for first in tqdm(range(start, len(tokens), TOGETHER), desc="states"):
        behind.clear()
        ids = torch.from_numpy(tokens[first : first + TOGETHER].astype(np.int64)).to(target.projection.device)
        last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
        lower = behind[0][0] if isinstance(behind[0], tuple) else behind[0]
        lower = lower.float() * torch.rsqrt(lower.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        for place, value in enumerate((last, lower)):
            states[place, first : first + TOGETHER] = value.half().cpu().numpy()
        done.write_text(str(first + TOGETHER))
    hook.remove()
    states.flush()
