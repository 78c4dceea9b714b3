"""How far a model's next-token distributions are from those of a reference: KL divergence, likeliest token, perplexity.

The definitions are those of `llama-perplexity --kl-divergence`, so that figures can be compared: a text is cut into
chunks of 512 tokens, the first token of each is replaced by the one that begins a text, if the model has one, and the
second half of a chunk counts, where every token follows at least 256 others. Two things differ. llama.cpp stores the
reference's log-probabilities in 16 bits and leaves out tokens below e**-16; here both are exact.

`measure` runs two engines over the chunks, and a `Comparison` collects what it finds for every token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float32Array
from ondevice.bundle import TOKENIZER, Bundle
from ondevice.engines.protocol import Engine, Rows, Session, TokenTree
from ondevice.errors import BundleCorruptError, PromptError, UsageError
from ondevice.progress import Progress, counted, silent
from ondevice.text.codec import vocabulary_difference
from ondevice.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("quality_text.txt")
"""The text that is compared by default, some 12,000 tokens: pages and code of this project, under its licence,
Apache-2.0, and the beginning of Arthur Conan Doyle's "A Scandal in Bohemia" (1891), which is in the public domain."""

CHUNK = 512
"""Tokens of a chunk; llama.cpp's default."""

PIECE = 64
"""Rows of a forward whose logits are wanted: those of both models take 134 MB for a vocabulary of 262,144."""


@dataclass(frozen=True)
class Figure:
    """A measured value with its standard error over the tokens."""

    value: float
    error: float


@dataclass(frozen=True)
class Quality:
    """A comparison of two models' next-token distributions.

    tokens : number of tokens whose distributions were compared
    kl : KL divergence of the model from the reference, mean per token in nats
    kl_median, kl_999 : its median and its 99.9th percentile
    same_top : share of tokens where both find the same token likeliest
    change : root mean square of the change of the probability of the text's token
    perplexity, reference_perplexity : of the text
    ratio : their quotient; its error takes into account that both vary together
    """

    tokens: int
    kl: Figure
    kl_median: float
    kl_999: float
    same_top: Figure
    change: Figure
    perplexity: Figure
    reference_perplexity: Figure
    ratio: Figure


class Comparison:
    """Collects the differences of two models token by token."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float, float]] = []

    def add(self, logits: Float32Array, reference: Float32Array, following: Sequence[int]) -> None:
        """Compare rows of logits [R, V] of both models, `following` being the token of the text after each row."""
        for row, token in enumerate(following):
            self._rows.append(_compared(logits[row], reference[row], token))

    def quality(self) -> Quality:
        """The figures over all tokens that were added, at least one."""
        kl, same, loss, reference_loss = np.array(self._rows).T
        changes = (np.exp(-loss) - np.exp(-reference_loss)) ** 2
        mean_change = math.sqrt(float(changes.mean()))
        share = float(same.mean())
        return Quality(
            tokens=len(kl),
            kl=Figure(float(kl.mean()), _standard_error(kl)),
            kl_median=float(np.median(kl)),
            kl_999=float(np.quantile(kl, 0.999)),
            same_top=Figure(share, math.sqrt(share * (1 - share) / max(1, len(kl) - 1))),
            change=Figure(mean_change, _standard_error(changes) / (2 * mean_change) if mean_change else 0.0),
            perplexity=_exponential(loss),
            reference_perplexity=_exponential(reference_loss),
            ratio=_exponential(loss - reference_loss),
        )


def text_ids(text: str, bundle: Bundle, reference: Bundle) -> list[int]:
    """Token ids of a text, for two bundles with the same tokens.

    Raises:
        UsageError: the bundles have different tokens, or no tokenizer.
    """
    if (difference := vocabulary_difference(reference, bundle)) is not None:
        raise UsageError(f"{reference.manifest.name} cannot be the reference of this model: {difference}")
    path = bundle.file(TOKENIZER) or reference.file(TOKENIZER)
    if path is None:
        raise UsageError("a text cannot be compared without a tokenizer, and neither of the two models has one")
    return Tokenizer.from_file(path, bundle.manifest.first_token_id).encode(text, parse_special=False)


def measure(
    engine: Engine,
    reference: Engine,
    token_ids: Sequence[int],
    first_token: int | None,
    progress: Progress = silent,
) -> Quality:
    """Run both engines over a text and compare them.

    Args:
        engine: the engine of the model that is judged.
        reference: an engine with the same vocabulary.
        token_ids: the text; what is left after the last whole chunk is not used.
        first_token: the token that begins each chunk, in place of its own; None keeps that.
        progress: called with the number of tokens done and in total.

    Raises:
        PromptError: the text has less than one chunk.
        BundleCorruptError: a model computes NaN or infinity in place of logits.
    """
    size = min(CHUNK, engine.context_length, reference.context_length)
    if len(token_ids) < size:
        raise PromptError(f"the text has {len(token_ids)} tokens, a comparison needs {size}: give a longer --text")
    chunks = [list(token_ids[start : start + size]) for start in range(0, len(token_ids) - size + 1, size)]
    advance, comparison = counted(progress, size * len(chunks)), Comparison()
    for chunk in chunks:
        begun = chunk if first_token is None else [first_token, *chunk[1:]]
        with closing(engine.open_session()) as own, closing(reference.open_session()) as other:
            for start, stop in _pieces(own, other, size):
                wanted = range(max(size // 2 - start, 0), min(stop, size - 1) - start)
                logits, expected = (
                    _forward(model, session, begun[start:stop], wanted)
                    for model, session in ((engine, own), (reference, other))
                )
                comparison.add(logits, expected, chunk[start + wanted.start + 1 : start + wanted.stop + 1])
                advance(stop - start)
    found = comparison.quality()
    if not math.isfinite(found.kl.value):
        raise BundleCorruptError("a model computes NaN or infinity in place of logits: export it again")
    return found


def _pieces(own: Session, other: Session, size: int) -> Iterator[tuple[int, int]]:
    """Cut a chunk into ranges of rows for forwards: large ones in the first half, of which no logits are wanted."""
    start = 0
    while start < size:
        most = size // 2 - start if start < size // 2 else PIECE
        stop = min(size, start + min(most, own.max_rows(), other.max_rows()))
        yield start, stop
        start = stop


def _forward(engine: Engine, session: Session, tokens: Sequence[int], wanted: range) -> Float32Array:
    """Run and commit the next tokens of a session; the logits of the wanted rows."""
    [outputs] = engine.forward([Rows(session, TokenTree.chain(tokens), wanted)])
    session.commit(range(len(tokens)))
    return outputs.logits


def _compared(logits: Float32Array, reference: Float32Array, following: int) -> tuple[float, float, float, float]:
    """KL divergence, 1 if the likeliest tokens are the same, and both losses of the following token, for logits [V].

    Exponentials are float32 and sums float64, a quarter of the time of float64 for both.
    """
    own, other = logits - logits.max(), reference - reference.max()
    weights = np.exp(other)
    own_sum, other_sum = (float(each.sum(dtype=np.float64)) for each in (np.exp(own), weights))
    normaliser, other_normaliser = math.log(own_sum), math.log(other_sum)
    kl = float((weights * (other - own)).sum(dtype=np.float64)) / other_sum + normaliser - other_normaliser
    same = float(logits.argmax() == reference.argmax())
    kl = 0.0 if kl < 0 else kl  # a divergence is not negative, its rounding may be; NaN stays
    return kl, same, normaliser - float(own[following]), other_normaliser - float(other[following])


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std()) / math.sqrt(max(1, len(values) - 1))


def _exponential(losses: NDArray[np.float64]) -> Figure:
    """The exponential of a mean, with its standard error to first order."""
    value = math.exp(float(losses.mean()))
    return Figure(value, value * _standard_error(losses))
