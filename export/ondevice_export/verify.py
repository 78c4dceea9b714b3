"""Compares a bundle with the checkpoint it was exported from, on real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ondevice.bundle import TOKENIZER, Bundle
from ondevice.bundle_format.manifest import AS_TRAINED, Quantization
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.errors import PromptError
from ondevice.text.prompt_file import load_prompts
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.export_options import WEIGHT_FORMATS
from ondevice_export.original import Original, check_installed

FloatArray = npt.NDArray[np.float32]

_MAX_TOKENS = 256
"""Longer prompts are cut to this many tokens: 256 rows of logits over a vocabulary of 262,144 take 268 MB."""
_CHUNK = 16
"""Tokens per forward of the bundle; the drafters are compared once per chunk."""


@dataclass(frozen=True)
class Tolerance:
    """How far a correctly exported bundle may differ from its original.

    Attributes:
        perplexity: maximum ratio of the bundle's perplexity to the original's.
        top1_agreement: minimum share of positions where both find the same token most likely.
        logit_error: maximum absolute difference of a logit; None where weights are quantised, which changes logits.
    """

    perplexity: float
    top1_agreement: float
    logit_error: float | None = None


TOLERANCES = {
    (32, 32): Tolerance(1.001, 0.995, 0.01),
    (8, 8): Tolerance(1.03, 0.94),
    (4, 8): Tolerance(1.10, 0.85),
    (4, 4): Tolerance(1.15, 0.75),
}
"""Tolerances by (bits of the layers, bits of the head). A 4-bit head implies the last row, whatever the layers have.

Measured on the reference pair (120 tokens), in the order of the rows: the perplexity grows by 0, 0, -1 and -4 %; 100,
99, 92 and 85 % of the tokens agree; with float32 weights, a logit is off by 0.00001. For comparison, 78 % agree if the
attention of one layer is left out.
"""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        tolerance: the limits within which the bundle passes.
        prompts: number of prompts that were run.
        tokens: number of positions that were compared.
        largest_logit_error: largest absolute difference of a logit over all positions and tokens.
        top1_agreement: share of positions where both models find the same token most likely.
        perplexity_before: the original's perplexity on the prompts.
        perplexity_after: the bundle's perplexity on the prompts.
        drafts: number of single draft steps that were compared; 0 without a drafter.
        drafter_agreement: share of these steps where both drafters propose the same token; None without a drafter.
    """

    tolerance: Tolerance
    prompts: int
    tokens: int
    largest_logit_error: float
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    drafts: int
    drafter_agreement: float | None

    @property
    def failures(self) -> list[str]:
        """One phrase per measure that is outside the tolerance."""
        allowed, found = self.tolerance, []
        if not self.perplexity_after <= allowed.perplexity * self.perplexity_before:
            found.append(f"the perplexity grew by more than {allowed.perplexity - 1:.1%}")
        if not self.top1_agreement >= allowed.top1_agreement:
            found.append(f"fewer than {allowed.top1_agreement:.1%} of the likeliest tokens agree")
        if allowed.logit_error is not None and not self.largest_logit_error <= allowed.logit_error:
            found.append(f"a logit is off by more than {allowed.logit_error}")
        return found

    @property
    def passes(self) -> bool:
        return not self.failures

    def verdict(self) -> str:
        """One line that says whether the bundle passes."""
        if self.passes:
            return "The bundle passes: it is as close to the original as its weights allow."
        return f"THE BUNDLE FAILS: {', '.join(self.failures)}. Do not use it; please report this."

    def table(self) -> str:
        """The measures and their limits as a Markdown table."""
        allowed = self.tolerance
        largest = "" if allowed.logit_error is None else f"{allowed.logit_error}"
        rows = [
            ("prompts, tokens", f"{self.prompts}, {self.tokens}", ""),
            ("largest logit error", f"{self.largest_logit_error:.4g}", largest),
            ("top-1 agreement", f"{self.top1_agreement:.2%}", f"{allowed.top1_agreement:.1%} or more"),
            (
                "perplexity before, after",
                f"{self.perplexity_before:.3f}, {self.perplexity_after:.3f}",
                f"up to {allowed.perplexity * self.perplexity_before:.3f}",
            ),
        ]
        if self.drafter_agreement is not None:
            rows.append((f"drafter top-1 agreement ({self.drafts} drafts)", f"{self.drafter_agreement:.2%}", ""))
        lines = [f"| {name} | {value} | {limit} |" for name, value, limit in rows]
        return "\n".join(["| verified against the original | | passes |", "|---|---|---|", *lines])


@dataclass(frozen=True)
class _Sums:
    """Counts of one prompt, which can be added to those of other prompts."""

    tokens: int = 0
    error: float = 0.0
    matches: int = 0
    loss_before: float = 0.0
    loss_after: float = 0.0
    drafts: int = 0
    draft_matches: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        merged = {
            field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)
        }
        return _Sums(**{**merged, "error": max(self.error, other.error)})


def read_prompts(bundle_path: Path, path: Path | None) -> list[list[int]]:
    """Token ids of a file's prompts, or of a few built-in prompts if `path` is None.

    Raises:
        PromptError: the file is unreadable, or the bundle has no tokenizer.
    """
    bundle = Bundle.open(bundle_path)
    tokenizer_path = bundle.file(TOKENIZER)
    if tokenizer_path is None:
        raise PromptError("--verify needs a tokenizer, and the checkpoint has no tokenizer.json")
    tokenizer = Tokenizer.from_file(tokenizer_path, bundle.manifest.first_token_id)
    texts = [prompt for prompt in load_prompts(path, None, as_chat=False) if isinstance(prompt, str)]
    return [tokenizer.encode(text) for text in texts]


def verify(
    bundle_path: Path, target: Path, drafter: Path | None, prompts: Sequence[Sequence[int]], *, threads: int = 2
) -> Verification:
    """Run the original in float32 and the bundle over the same tokens, and compare their outputs.

    Args:
        bundle_path: the bundle's directory.
        target: the directory of the checkpoint that the bundle was exported from.
        drafter: the directory of the drafter's checkpoint; None if the bundle has no drafter.
        prompts: token ids of each prompt; each is cut to 256 tokens.
        threads: number of threads of the bundle's engine.

    Raises:
        MissingDependencyError: torch, transformers or optimum is not installed.
        PromptError: no prompt has two tokens.
    """
    usable = [list(prompt[:_MAX_TOKENS]) for prompt in prompts if len(prompt) > 1]
    if not usable:
        raise PromptError("there is nothing to verify with: every prompt is shorter than two tokens")
    check_installed()
    original = Original(target, drafter)
    bundle = Bundle.open(bundle_path)
    engine = OrtEngine(bundle, threads)
    total = sum((_compare(engine, original, prompt) for prompt in usable), _Sums())
    engine.close()
    predicted = total.tokens - len(usable)
    return Verification(
        tolerance=tolerance_of(bundle.manifest.quantization),
        prompts=len(usable),
        tokens=total.tokens,
        largest_logit_error=total.error,
        top1_agreement=total.matches / total.tokens,
        perplexity_before=float(np.exp(total.loss_before / predicted)),
        perplexity_after=float(np.exp(total.loss_after / predicted)),
        drafts=total.drafts,
        drafter_agreement=total.draft_matches / total.drafts if total.drafts else None,
    )


def tolerance_of(quantization: Quantization) -> Tolerance:
    """The tolerance of a bundle with these weight formats."""
    if quantization.weights == AS_TRAINED:
        return TOLERANCES[32, 32]
    layers, head = WEIGHT_FORMATS[quantization.weights].bits, quantization.head_bits
    return TOLERANCES[min(layers, head), head]


def _compare(engine: Engine, original: Original, prompt: list[int]) -> _Sums:
    """Run a prompt through both models in chunks; after each, both drafters draft one token after the next token."""
    reference = original.run(prompt)
    session = engine.open_session()
    total = _Sums()
    for start, stop in _chunks(len(prompt)):
        [outputs] = engine.forward([Rows(session, TokenTree.chain(prompt[start:stop]), range(stop - start))])
        session.commit(range(stop - start))
        logits, hidden = outputs.logits, outputs.hidden[-1]
        expected = reference.logits[start:stop]
        following = np.array(prompt[start + 1 : stop + 1], np.int64)
        total += _Sums(
            tokens=stop - start,
            error=float(np.abs(logits - expected).max()),
            matches=int((logits.argmax(-1) == expected.argmax(-1)).sum()),
            loss_before=_loss(expected, following),
            loss_after=_loss(logits, following),
        )
        if original.has_drafter and engine.has_drafter and stop < len(prompt):
            step = session.draft_step(prompt[stop], hidden)
            proposed = int(step.candidates[step.logits.argmax()])
            total += _Sums(drafts=1, draft_matches=int(proposed == original.draft(reference, stop, prompt[stop])))
    session.close()
    return total


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))


def _loss(logits: FloatArray, following: npt.NDArray[np.int64]) -> float:
    """Sum of the negative log-likelihoods of the following tokens; a prompt's last row has no following token."""
    rows = logits[: len(following)].astype(np.float64)
    peak = rows.max(-1)
    normaliser = peak + np.log(np.exp(rows - peak[:, None]).sum(-1))
    return float((normaliser - rows[np.arange(len(following)), following]).sum())
