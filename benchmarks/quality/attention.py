"""How much do int8 caches and lookup attention change predictions, compared with exact attention over fp16?

    python -m benchmarks.quality.attention BUNDLE [--text FILE ...] [--sequences 8] [--threads 2]

Texts, by default source files of Python's standard library, are read up to the bundle's context. The last half of each
is compared: Kullback-Leibler divergence, likeliest tokens, and the text's perplexity. Needles are 32 tokens of another
text inserted somewhere; their first half is repeated at the end, and the predicted tokens of the second half are
counted. "Left out" is the share of rows' weights in full attention that is not attended to; "at best" is the share that
a choice of as many units by their true weights would leave out.

Lookups have their default settings: codebooks are learnt after 2,048 tokens, and the 512 newest are always attended to.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import forward, read
from ondevice import machine
from ondevice.bundle import TOKENIZER, Bundle
from ondevice.cli.bench.tables import PACKAGES, table, versions, versions_line
from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.caches import LookupSettings, read_keys
from ondevice.engines.simd.engine import SimdEngine, SimdSession
from ondevice.engines.simd.kernels.contract.attention_memory import UNIT
from ondevice.engines.simd.kernels.contract.steps import LOOK_UP, LookUp, from_row
from ondevice.engines.simd.plan.builder import Plan
from ondevice.text.tokenizer import Tokenizer

LOOKUP = LookupSettings()
LONGEST = 8192  # tokens of a text
NEEDLE = 32
MODULES = ("argparse", "ast", "inspect", "pickle", "shutil", "subprocess", "tarfile", "typing", "zipfile", "uuid")


@dataclass(frozen=True)
class Variant:
    """A cache and a way to attend."""

    name: str
    kv_cache: KVCacheType = "fp16"
    lookup: LookupSettings | None = None

    def session(self, bundle: Bundle, threads: int) -> SimdSession:
        return SimdEngine(bundle, threads, kv_cache=self.kv_cache, lookup=self.lookup).open_session()


VARIANTS = (
    Variant("exact"),
    Variant("exact, int8 cache", "int8"),
    *(Variant(f"lookup, {keys} keys", lookup=replace(LOOKUP, keys=keys)) for keys in (128, 256, 512, 1024, 2048)),
    Variant(f"lookup, auto, at most {LOOKUP.most}", lookup=LOOKUP),
    Variant(f"lookup, auto, at most {LOOKUP.most}, int8 cache", "int8", LOOKUP),
    *(Variant(f"lookup, 256 keys, width {width}", lookup=replace(LOOKUP, keys=256, width=width)) for width in (1, 2)),
    *(Variant(f"nomad, width {width}", lookup=replace(LOOKUP, mode="nomad", width=width)) for width in (1, 2, 4)),
)
"""The others are compared with the first. Codes of four numbers and an fp16 cache, unless the name says otherwise."""


def log_probabilities(session: SimdSession, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
    """float32[len(tokens) - first, V]: log probabilities of the token after each one from `first` on."""
    session.rewind(0)
    found, start = [], 0
    while start < len(tokens):
        chunk = tokens[start : start + session.max_rows()]
        wanted = range(max(0, first - start), len(chunk))
        logits = forward(session.engine, session, chunk, wanted).logits
        session.commit(range(len(chunk)))
        found.append(logits - logits.max(axis=1, keepdims=True))
        start += len(chunk)
    together = np.concatenate(found)
    together -= np.log(np.exp(together).sum(axis=1, keepdims=True))
    return together


@dataclass
class Comparison:
    """Sums over tokens."""

    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    same: int = 0
    found: int = 0
    sought: int = 0

    def add(self, own: NDArray[np.float32], exact: NDArray[np.float32], following: NDArray[np.int64]) -> None:
        """Add two of `log_probabilities`, except for the last token, and the tokens that follow in the text."""
        own, exact = own[:-1], exact[:-1]
        self.tokens += len(own)
        self.nats -= float(own[np.arange(len(own)), following].sum())
        self.divergence += float((np.exp(exact) * (exact - own)).sum())
        self.same += int((own.argmax(axis=1) == exact.argmax(axis=1)).sum())

    def seek(self, own: NDArray[np.float32], needle: NDArray[np.int64]) -> None:
        """For each token of a needle, whether it is the likeliest."""
        self.found += int((own.argmax(axis=1) == needle).sum())
        self.sought += len(needle)


def with_needle(
    tokens: Sequence[int], other: Sequence[int], rng: np.random.Generator
) -> tuple[list[int], NDArray[np.int64]]:
    """A text with a piece of another inserted, and repeated at the end except for its last token; and the piece's
    second half.
    """
    start = int(rng.integers(0, len(other) - NEEDLE))
    needle = list(other[start : start + NEEDLE])
    place = int(rng.integers(LOOKUP.learn, len(tokens) - LOOKUP.window - 3 * NEEDLE))
    room = list(tokens[: len(tokens) - 2 * NEEDLE])
    return [*room[:place], *needle, *room[place:], *needle[:-1]], np.array(needle[NEEDLE // 2 :])


def first_drafts(session: SimdSession, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The drafter's first token at every sixteenth position of a text's last half, and the target's there."""
    engine, drafted, taken = session.engine, [], []
    session.rewind(0)
    log_probabilities(session, tokens[: len(tokens) // 2], len(tokens) // 2 - 1)
    for start in range(len(tokens) // 2, len(tokens) - 17, 16):
        chunk = tokens[start : start + 16]
        hidden = read(engine, session, chunk).hidden[0].copy()
        step = session.draft_step(tokens[start + 16], hidden)
        drafted.append(int(step.candidates[step.logits.argmax()]))
        following = forward(engine, session, [tokens[start + 16]], [0])
        taken.append(int(following.logits[0].argmax()))
        session.commit([])
    return drafted, taken


def compare_drafts(bundle: Bundle, texts: Sequence[Sequence[int]], threads: int) -> str:
    """Markdown: acceptance of drafts if only the drafter looks up."""
    lookups = [replace(LOOKUP, mode="lookup-drafts", keys=keys) for keys in (64, 128, 256, 512)]
    found = {}
    for lookup in (None, *lookups):
        session = Variant("", lookup=lookup).session(bundle, threads)
        pairs = [first_drafts(session, text) for text in texts]
        name = "exact" if lookup is None else f"lookup, {lookup.keys} keys"
        found[name] = [np.concatenate(part) for part in zip(*pairs, strict=True)]
        session.engine.close()
    lines = [
        [name, f"{(drafted == taken).mean():.2%}", f"{(drafted == found['exact'][0]).mean():.2%}"]
        for name, (drafted, taken) in found.items()
    ]
    return table(
        ["the drafter's attention", "first draft taken", "same draft"], lines, left={"the drafter's attention"}
    )


def missed(session: SimdSession, tokens: Sequence[int]) -> list[tuple[float, float]]:
    """Mean shares of the newest rows' weights that the choice leaves out, and that the best choice would leave out, by
    layer.

    Forwards that end at a layer's lookups leave its queries and its choice in the engine's memory.
    """
    engine, found = session.engine, []
    session.rewind(0)
    log_probabilities(session, tokens[: -LOOKUP.window], len(tokens) - LOOKUP.window - 1)
    program, rows = engine._program, tokens[-LOOKUP.window :]
    plan, whole = program.plan, program.plan()
    owners = {2 * place: layer for layer, place in program.caches.items()}
    for end, words in enumerate(whole.steps):
        if int(words[0]) != LOOK_UP:
            continue
        step = from_row(words)
        assert isinstance(step, LookUp)
        part = Plan(whole.steps[: end + 1], whole.exact)
        program.plan = lambda path, part=part: part
        forward(engine, session, rows, range(len(rows)))
        cache = session._caches["full"]
        layer = owners[step.codes - 2 * len(program.caches)]
        keys = read_keys(cache.parts(layer)[0], 0, len(tokens))
        found.append(_missed(step, len(rows), len(tokens), keys))
    program.plan = plan
    return found


def _missed(step: LookUp, rows: int, length: int, keys: NDArray[np.float32]) -> tuple[float, float]:
    group, lost, best = step.query_heads // step.kv_heads, [], []
    for row in range(rows):
        queries = _memory(step.x + row * step.stride, step.query_heads * step.size, ctypes.c_float)
        stop = length - rows + row + 1
        end = (stop - step.window) // UNIT
        for head in range(step.kv_heads):
            at = step.chosen + 8 * (1 + step.most) * (row * step.kv_heads + head)
            chosen = _memory(at, 1 + step.most, ctypes.c_int64)
            own = queries.reshape(step.query_heads, step.size)[head * group : (head + 1) * group]
            scores = own @ keys[:stop, head].T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            shares = weights[:, UNIT : UNIT * end].reshape(group, -1, UNIT).sum(axis=(0, 2)) / group
            if (count := int(chosen[0])) < 0:
                count, kept = len(shares), shares.sum()
            else:
                kept = shares[chosen[1 : 1 + count] - 1].sum()
            lost.append(shares.sum() - kept)
            best.append(shares.sum() - np.sort(shares)[len(shares) - count :].sum())
    return float(np.mean(lost)), float(np.mean(best))


def _memory(address: int, count: int, kind: type[ctypes.c_float] | type[ctypes.c_int64]) -> NDArray[Any]:
    """A copy of the memory at an address."""
    return np.array((kind * count).from_address(address))


def compare(bundle: Bundle, texts: Sequence[Sequence[int]], threads: int) -> str:
    """Markdown."""
    rng, lines = np.random.default_rng(0), []
    needles = [with_needle(text, texts[i - 1], rng) for i, text in enumerate(texts) for _ in range(3)]
    exact: list[NDArray[np.float32]] = []
    for variant in VARIANTS:
        session, sums = variant.session(bundle, threads), Comparison()
        for number, text in enumerate(texts):
            half = len(text) // 2
            own = log_probabilities(session, text, half)
            if variant is VARIANTS[0]:
                exact.append(own)
            sums.add(own, exact[number], np.array(text[half + 1 :]))
        for text, needle in needles:
            sums.seek(log_probabilities(session, text, len(text) - len(needle)), needle)
        chooses = variant.lookup is not None and variant.lookup.mode == "lookup"
        left = [missed(session, text) for text in texts] if chooses else []
        parts = [f"{share:.3%}" for share in np.array(left).mean(axis=(0, 1))] if left else ["", ""]
        lines.append(
            [
                variant.name,
                f"{sums.divergence / sums.tokens:.5f}",
                f"{sums.same / sums.tokens:.2%}",
                f"{np.exp(sums.nats / sums.tokens):.3f}",
                *parts,
                f"{sums.found / sums.sought:.1%}",
            ]
        )
        session.engine.close()
    titles = ["attention", "KL, nats", "same likeliest", "perplexity", "left out", "at best", "needles"]
    return table(titles, lines, left={"attention"})


def read_texts(paths: Sequence[Path], tokenizer: Tokenizer, length: int, most: int) -> list[list[int]]:
    """The first `length` tokens of each text with at least so many."""
    texts = [tokenizer.encode(path.read_text("utf-8"))[:length] for path in paths]
    return [text for text in texts if len(text) == length][:most]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    library = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--text", type=Path, nargs="+", default=[library / f"{name}.py" for name in MODULES])
    parser.add_argument("--sequences", type=whole(1), default=8)
    add_threads(parser)
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    path = bundle.file(TOKENIZER)
    if path is None:
        raise SystemExit("this bundle has no tokenizer")
    tokenizer, length = Tokenizer.from_file(path, bundle.manifest.first_token_id), bundle.manifest.target.context_length
    texts = read_texts(arguments.text, tokenizer, min(length, LONGEST), arguments.sequences)
    if not texts:
        raise SystemExit(f"no text has {min(length, LONGEST)} tokens")
    print(compare(bundle, texts, arguments.threads))
    if bundle.manifest.drafter is not None:
        print(f"\n{compare_drafts(bundle, texts, arguments.threads)}")
    print(f"\n{len(texts)} texts of {len(texts[0])} tokens; {bundle.manifest.name}, {machine.processor_name()}")
    print(versions_line({"versions": versions(PACKAGES)}))


if __name__ == "__main__":
    run_command(main)
