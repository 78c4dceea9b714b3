"""Compares a bundle with the checkpoint it was exported from, on real text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ondevice.bundle import TOKENIZER, Bundle
from ondevice.bundle_format.manifest import AS_TRAINED, MIXED, Quantization
from ondevice.bundle_format.weight_format import MXFP4
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Engine, Rows, TokenTree
from ondevice.errors import PromptError
from ondevice.quality import Comparison, Quality
from ondevice.text.prompt_file import load_prompts
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.export_options import WEIGHT_FORMATS
from ondevice_export.original import Original, check_installed

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
        largest_logit_error: largest absolute difference of a logit over all positions and tokens.
        quality: how the distributions of the next token differ, over all positions that have one.
        drafts: number of single draft steps that were compared; 0 without a drafter.
        drafter_agreement: share of these steps where both drafters propose the same token; None without a drafter.
    """

    tolerance: Tolerance
    prompts: int
    largest_logit_error: float
    quality: Quality
    drafts: int
    drafter_agreement: float | None

    @property
    def failures(self) -> list[str]:
        """One phrase per measure that is outside the tolerance."""
        allowed, found = self.tolerance, []
        if not self.quality.ratio.value <= allowed.perplexity:
            found.append(f"the perplexity grew by more than {allowed.perplexity - 1:.1%}")
        if not self.quality.same_top.value >= allowed.top1_agreement:
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
        allowed, quality = self.tolerance, self.quality
        largest = "" if allowed.logit_error is None else f"{allowed.logit_error}"
        before, after = quality.reference_perplexity.value, quality.perplexity.value
        rows = [
            ("prompts, tokens", f"{self.prompts}, {quality.tokens}", ""),
            ("largest logit error", f"{self.largest_logit_error:.4g}", largest),
            ("KL divergence, mean", f"{quality.kl.value:.5f} ± {quality.kl.error:.5f}", ""),
            ("same top token", f"{quality.same_top.value:.2%}", f"{allowed.top1_agreement:.1%} or more"),
            ("perplexity before, after", f"{before:.3f}, {after:.3f}", f"up to {allowed.perplexity * before:.3f}"),
        ]
        if self.drafter_agreement is not None:
            rows.append((f"drafter top-1 agreement ({self.drafts} drafts)", f"{self.drafter_agreement:.2%}", ""))
        lines = [f"| {name} | {value} | {limit} |" for name, value, limit in rows]
        return "\n".join(["| verified against the original | | passes |", "|---|---|---|", *lines])


@dataclass
class _Sums:
    """Sums over all prompts."""

    comparison: Comparison = field(default_factory=Comparison)
    error: float = 0.0
    drafts: int = 0
    draft_matches: int = 0


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
        prompts: token ids of each prompt; each is cut to 256 tokens, or to the bundle's longest text.
        threads: number of threads of the bundle's engine.

    Raises:
        MissingDependencyError: torch, transformers or optimum is not installed.
        PromptError: no prompt has two tokens.
    """
    bundle = Bundle.open(bundle_path)
    context = bundle.manifest.target.context_length
    usable = [list(prompt[: min(_MAX_TOKENS, context)]) for prompt in prompts if len(prompt) > 1]
    if not usable:
        raise PromptError("there is nothing to verify with: every prompt is shorter than two tokens")
    check_installed()
    original = Original(target, drafter, context)
    engine = OrtEngine(bundle, threads)
    total = _Sums()
    for prompt in usable:
        _compare(engine, original, prompt, total)
    engine.close()
    return Verification(
        tolerance=tolerance_of(bundle.manifest.quantization),
        prompts=len(usable),
        largest_logit_error=total.error,
        quality=total.comparison.quality(),
        drafts=total.drafts,
        drafter_agreement=total.draft_matches / total.drafts if total.drafts else None,
    )


def tolerance_of(quantization: Quantization) -> Tolerance:
    """The tolerance of a bundle with these weight formats. Matrices that stay in MXFP4 differ from no original."""
    if quantization.weights == AS_TRAINED:
        return TOLERANCES[32, 32]
    rounded = quantization.weights.removeprefix(f"{MXFP4.name}+")
    layers, head = 4 if rounded == MIXED else WEIGHT_FORMATS[rounded].bits, quantization.head_bits
    return TOLERANCES[min(layers, head), head]


def _compare(engine: Engine, original: Original, prompt: list[int], total: _Sums) -> None:
    """Run a prompt through both models in chunks; after each, both drafters draft one token after the next token."""
    reference = original.run(prompt)
    session = engine.open_session()
    for start, stop in _chunks(len(prompt)):
        [outputs] = engine.forward([Rows(session, TokenTree.chain(prompt[start:stop]), range(stop - start))])
        session.commit(range(stop - start))
        logits, hidden = outputs.logits, outputs.hidden[-1]
        expected = reference.logits[start:stop]
        following = prompt[start + 1 : stop + 1]  # none after the last row
        total.comparison.add(logits[: len(following)], expected[: len(following)], following)
        error = float(np.abs(logits - expected).max())
        total.error = error if not error <= total.error else total.error  # NaN stays
        if original.has_drafter and engine.drafter is not None and stop < len(prompt):
            step = session.draft_step(prompt[stop], hidden)
            proposed = int(step.candidates[step.logits.argmax()])
            total.drafts += 1
            total.draft_matches += int(proposed == original.draft(reference, stop, prompt[stop]))
    session.close()


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))
