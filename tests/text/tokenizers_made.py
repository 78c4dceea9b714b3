"""Small tokenizers of the kinds that bundles hold, made on the spot."""

import random
from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from ondevice.text.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
BOS = 2
CHANNELS = [
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>",
    "<|channel>", "<channel|>",
]  # fmt: skip
"""Gemma 4's further control tokens."""
IMAGES = ["<|image>", "<|image|>", "<image|>"]
SOUNDS = ["<|audio>", "<|audio|>", "<audio|>"]
"""Before a picture, in its place in a chat template, and after it."""
HARMONY = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
]  # fmt: skip
"""gpt-oss's control tokens."""
LFM = [
    "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>",
]  # fmt: skip
THINK = ["<think>", "</think>"]
"""LFM2's control tokens, and those that a tokenizer of its thinking models may have."""
QWEN = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    *THINK,
]  # fmt: skip
"""Control tokens of Qwen3, and of Qwen3.5 too."""
SEED_OSS = [
    "<seed:bos>", "<seed:pad>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
    "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>",
]  # fmt: skip
EXAONE_4 = [
    "[BOS]", "[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "<tool_call>", "</tool_call>",
    *THINK,
]  # fmt: skip
_GRANITE = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
GRANITE_3 = [*_GRANITE, "<|tool_call|>", "<|start_of_cite|>", "<|end_of_cite|>"]
GRANITE_4 = [*_GRANITE, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *THINK]
GLM_4 = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
HYPERCLOVA = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|endofturn|>", "<|stop|>"]
"""Control tokens of Seed-OSS, EXAONE 4, Granite 3 and 4, GLM-4, and HyperCLOVA X."""
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "def spam(eggs):\n    return [egg for egg in eggs if egg]\n",
    "naïve café, Привет мир, 你好世界, 😀 👩‍👩‍👧 and  two  spaces",
]


def byte_level() -> Tokenizer:
    """Like the reference pair's: bytes as characters, `<bos>` from the post-processor."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return Tokenizer(backend, BOS)


def gemma_like() -> Tokenizer:
    """Like Gemma 4's: spaces become ▁, unknown characters bytes; nothing is stripped."""
    return _byte_fallback([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def gemma_chat() -> Tokenizer:
    """As `gemma_like`, with all the control tokens of Gemma 4's chats."""
    return _byte_fallback([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()], CHANNELS)


def gemma_seeing() -> Tokenizer:
    """As `gemma_chat`, with the tokens of pictures and sounds."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoder, [*CHANNELS, *IMAGES, *SOUNDS])


def chat_with(control: Sequence[str]) -> Tokenizer:
    """As `gemma_chat`, with these control tokens."""
    return _byte_fallback([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()], [*control])


def harmony() -> Tokenizer:
    """Like gpt-oss's: bytes as characters, words of its headers as tokens, the control tokens after all others."""
    return _of_bytes(["assistant analysis commentary final json to=functions.get_weather"], HARMONY)


def lfm(*further: str) -> Tokenizer:
    """Like LFM2's: bytes as characters, these control tokens beside its own."""
    return _of_bytes(["assistant get_weather(city='"], [*LFM, *further])


def qwen() -> Tokenizer:
    """Like Qwen's: bytes as characters, some tokens that hold parts of tags."""
    return _of_bytes(["assistant <function=get_weather>\n<parameter=city>\n</parameter>\n</function>\n"], QWEN)


def of_bytes(control: Sequence[str]) -> Tokenizer:
    """Bytes as characters, with these control tokens, and some tokens that hold parts of a call."""
    return _of_bytes(['get_weather\n{"name": "get_weather", "arguments": {"city": "\n<think>\n</think>\n'], [*control])


def _of_bytes(texts: list[str], control: Sequence[str]) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*SENTENCES, *texts * 9], trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return Tokenizer(backend)


def llama_like() -> Tokenizer:
    """As `gemma_like`, and the first word's space is stripped."""
    return _byte_fallback(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def metaspace() -> Tokenizer:
    """The Metaspace decoder strips the first token's space by its place."""
    tokenizer = _byte_fallback([])
    tokenizer._backend.decoder = decoders.Metaspace()
    return tokenizer


def llama_2() -> Tokenizer:
    """As `llama_like`, with a space put in front of a text."""
    tokenizer = llama_like()
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer._backend.normalizer = normalizers.Sequence(steps)
    return tokenizer


def metaspace_words() -> Tokenizer:
    """As `metaspace`, with a space put in front of a text, by the pre-tokenizer."""
    tokenizer = metaspace()
    tokenizer._backend.normalizer = None
    tokenizer._backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


KINDS = [byte_level, gemma_like, llama_like, metaspace]


def _byte_fallback(decoder: list[decoders.Decoder], further: Sequence[str] = ()) -> Tokenizer:
    pieces = ["▁", "▁▁", "▁▁▁▁", "\n", "a", "b", "é", "\N{REPLACEMENT CHARACTER}", "世", "▁the", "▁fox", "ab", "b▁a"]
    specials = [*SPECIALS, *further]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(decoder)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return Tokenizer(backend, BOS)


def random_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Random tokens with the troublesome ones made frequent: bytes of real characters, whole and torn."""
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.4:
            ids.append(rng.randrange(tokenizer.vocab_size))
        elif kind < 0.8:
            ids += tokenizer.encode(rng.choice("é😀世 ab\ufffd"), add_special_tokens=False)
        else:
            ids += tokenizer.encode("😀世", add_special_tokens=False)[rng.randrange(4) :]
    return ids[:length]
