"""Token streams on disk, cut into blocks whose order depends only on a seed and an index."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from text.chats import Chat, Template, chats
from text.corpus import Module, read_library, read_packages, without_copies
from text.packages import PACKAGES, download
from text.tokenizer import EOS, train_tokenizer

CHAT_SHARE = 0.08  # of the training tokens
LIBRARY_REPEATS, LIBRARY_TEST_REPEATS = 3, 2  # times per epoch; packages once
CHATS_PER_MODULE = 8  # at most, so that no large module dominates
ENCODED_TOGETHER = 1000  # texts encoded at a time, because encodings take far more memory than ids
CHAT_MODULES = 500  # modules whose conversations are made at a time, until there are enough
TOKENIZER_STRIDE = 4  # the tokenizer sees every fourth package module, and all of the library
T = TypeVar("T")
Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class TokenBlocks:
    """A stream cut into blocks, shuffled again in every epoch; resuming needs only the index.

    tokens : integers [N]
    """

    tokens: npt.NDArray[np.integer]
    length: int
    seed: int = 0

    def block(self, index: int) -> npt.NDArray[np.integer]:
        """Block `index` of an endless shuffled sequence: [length + 1]; the last token is a label only."""
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


def source_ids(tokenizer: Tokenizer, modules: Sequence[Module]) -> list[Tokens]:
    """`<bos> source <eos>` of every module; special tokens within a source are encoded as text."""
    tokenizer.encode_special_tokens = True
    return documents(tokenizer, [module.text for module in modules], begin=True)


def chat_ids(tokenizer: Tokenizer, conversations: Iterable[Chat]) -> list[Tokens]:
    """Rendered conversations, `<bos>` to `<eos>`; they contain no special tokens except the template's."""
    tokenizer.encode_special_tokens = False
    template = Template()
    return documents(tokenizer, [template.render(chat) for chat in conversations], begin=False)


def documents(tokenizer: Tokenizer, texts: Sequence[str], *, begin: bool) -> list[Tokens]:
    """Token ids of every text, followed by `<eos>` and, with `begin`, preceded by `<bos>`."""
    encoded = []
    for start in range(0, len(texts), ENCODED_TOGETHER):
        batch = tokenizer.encode_batch_fast(list(texts[start : start + ENCODED_TOGETHER]), add_special_tokens=begin)
        encoded += [np.array([*encoding.ids, EOS], dtype=np.uint16) for encoding in batch]
    return encoded


def prompt_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """A conversation up to the model's turn."""
    tokenizer.encode_special_tokens = False
    return tokenizer.encode(Template().render(chat, prompt=True), add_special_tokens=False).ids


def prepare(work: Path) -> None:
    """Download the packages and write the token streams to `work`, with its tokenizer; nothing if all exist.

    `train.npy` is sources and conversations, `held_out.npy` the held-out modules of the standard library.
    """
    if (work / "held_out.npy").exists():
        return
    wheels = work / "wheels"
    wheels.mkdir(exist_ok=True)
    download(PACKAGES, wheels)
    library, packages = read_library(), read_packages(PACKAGES, wheels)
    held_out = [module for module in [*library, *packages] if module.held_out]
    kept = without_copies([module for module in [*library, *packages] if not module.held_out], held_out)
    shown = [module for module in kept if not module.package]
    shown += [module for module in kept if module.package][::TOKENIZER_STRIDE]
    tokenizer = own_tokenizer(work / "tokenizer.json", (module.text for module in shown))
    np.save(work / "train.npy", training_stream(tokenizer, kept))
    np.save(work / "held_out.npy", held_out_stream(tokenizer, library))


def own_tokenizer(file: Path, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer in `file`; trained on `texts` if it does not exist."""
    if not file.exists():
        train_tokenizer(texts).save(str(file))
    return Tokenizer.from_file(str(file))


def held_out_stream(tokenizer: Tokenizer, library: Iterable[Module]) -> Tokens:
    """The held-out modules of the standard library in one random order: uint16[N]."""
    unseen = [module for module in library if module.held_out]
    return np.concatenate(shuffled(source_ids(tokenizer, unseen), np.random.default_rng(1)))


def training_stream(tokenizer: Tokenizer, modules: list[Module]) -> Tokens:
    """All documents of an epoch in random order, sources and conversations up to their share: uint16[N]."""
    random = np.random.default_rng(0)
    sources: list[Tokens] = []
    some = shuffled(modules, random)
    for module, ids in zip(modules, source_ids(tokenizer, modules), strict=True):
        sources += [ids] * repeats(module)
    wanted = CHAT_SHARE / (1 - CHAT_SHARE) * sum(map(len, sources))
    rendered: list[Tokens] = []
    for start in range(0, len(modules), CHAT_MODULES):
        if wanted > 0:
            conversations = chosen_chats(some[start : start + CHAT_MODULES], random)
            rendered += chat_ids(tokenizer, conversations)
            wanted -= sum(map(len, rendered[-len(conversations) :]))
    return np.concatenate(shuffled([*sources, *rendered], random))


def chosen_chats(modules: Iterable[Module], random: np.random.Generator) -> list[Chat]:
    """A few conversations of every module."""
    found = (list(chats(module)) for module in modules)
    return [chat for all_of_one in found for chat in shuffled(all_of_one, random)[:CHATS_PER_MODULE]]


def repeats(module: Module) -> int:
    """How many times an epoch contains a module."""
    if module.package:
        return 1
    return LIBRARY_TEST_REPEATS if module.is_test else LIBRARY_REPEATS


def shuffled(documents: list[T], random: np.random.Generator) -> list[T]:
    """The documents in random order."""
    return [documents[place] for place in random.permutation(len(documents))]
