"""Token streams on disk, cut into blocks whose order depends on a seed and an index alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from corpus import Chat, Module, chats, read_modules
from tokenizer import BOS, EOS, TURN_END, TURN_START, train_tokenizer
from tokenizers import Tokenizer

CHAT_SHARE = 0.08
Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Blocks:
    """A stream cut into blocks, shuffled anew in every epoch; resuming needs only the index.

    tokens : uint16[N]
    """

    tokens: Tokens
    length: int
    seed: int = 0

    def block(self, index: int) -> Tokens:
        """Block `index` of an endless shuffled sequence: uint16[length + 1], the last token being a label only."""
        count = (len(self.tokens) - self.length - 1) // self.length
        epoch, place = divmod(index, count)
        random = np.random.default_rng([self.seed, epoch, self.length])
        offset = int(random.integers(self.length))
        start = offset + int(random.permutation(count)[place]) * self.length
        return self.tokens[start : start + self.length + 1]

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of batch `step`: two int64[size, length]."""
        rows = np.stack([self.block(step * size + row) for row in range(size)]).astype(np.int64)
        rows_tensor = torch.from_numpy(rows)
        return rows_tensor[:, :-1].contiguous(), rows_tensor[:, 1:].contiguous()


def module_ids(tokenizer: Tokenizer, module: Module) -> list[int]:
    """`<bos> source <eos>`."""
    return [*tokenizer.encode(module.text).ids, EOS]


def prompt_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """The chat template's rendering of a question, up to where the model answers."""
    question = tokenizer.encode(f"user\n{chat.question}", add_special_tokens=False).ids
    return [BOS, TURN_START, *question, TURN_END, *plain(tokenizer, "\n"), TURN_START, *plain(tokenizer, "model\n")]


def chat_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """A whole conversation of one question and one answer."""
    answer = plain(tokenizer, chat.answer)
    return [*prompt_ids(tokenizer, chat), *answer, TURN_END, *plain(tokenizer, "\n"), EOS]


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` without `<bos>`."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def prepare(work: Path) -> None:
    """Train the tokenizer and write `tokenizer.json`, `train.npy` and `held_out.npy` to `work`; nothing if there."""
    if (work / "held_out.npy").exists():
        return
    modules = read_modules()
    kept = [module for module in modules if not module.held_out]
    tokenizer = train_tokenizer(module.text for module in kept)
    tokenizer.encode_special_tokens = True  # a "<bos>" inside a source file is text
    tokenizer.save(str(work / "tokenizer.json"))
    np.save(work / "train.npy", stream(tokenizer, kept, np.random.default_rng(0), repeat=2))
    held_out = [module for module in modules if module.held_out]
    np.save(work / "held_out.npy", stream(tokenizer, held_out, np.random.default_rng(1), repeat=1))


def stream(tokenizer: Tokenizer, modules: Iterable[Module], random: np.random.Generator, repeat: int) -> Tokens:
    """All documents in random order: modules (those outside test packages `repeat` times) and chats: uint16[N]."""
    sources, conversations = [], []
    for module in modules:
        sources += [module_ids(tokenizer, module)] * (1 if module.is_test else repeat)
        conversations += [chat_ids(tokenizer, chat) for chat in chats(module)]
    wanted = CHAT_SHARE / (1 - CHAT_SHARE) * sum(map(len, sources)) / sum(map(len, conversations))
    documents = sources + [chat for chat in conversations if random.random() < wanted]
    order = random.permutation(len(documents))
    return np.concatenate([np.array(documents[i], dtype=np.uint16) for i in order])
