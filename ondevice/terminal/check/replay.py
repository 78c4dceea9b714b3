"""A prompt generated plainly and with a drafter, and where the two part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.drafters import registry
from ondevice.terminal.comparison import first_difference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.prompt import Prompt

    Floats = NDArray[np.float32]

DRAFT_TOKENS = 4
"""Per round: a schedule that drafts only where it pays might not draft at all, and would prove nothing."""


@dataclass(frozen=True)
class Difference:
    """The first token that differs.

    prompt : its index
    drafter : who drafted
    position : index among the generated tokens
    plain, drafted : the two token ids there; None where that text had ended
    logit_gap : the plain token's logit less the drafted one's, after a fresh prefill of all before it; None where
        either is missing
    """

    prompt: int
    drafter: str
    position: int
    plain: int | None
    drafted: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class Replay:
    """One prompt with one drafter. `tokens` were compared, `num_draft_tokens` drafted."""

    drafter: str
    tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    difference: Difference | None


def replay(
    model: Model, number: int, prompt: Prompt, drafters: Sequence[str], options: GenerationKeywords
) -> Iterator[Replay]:
    """Generate a prompt plainly once, and with every drafter.

    Args:
        number: the prompt's index.
        options: keywords of `Model.stream` but for drafting; a seed among them, unless greedy.
    """
    model.forget()
    plainly: GenerationKeywords = {**options, "drafter": registry.NONE}
    plain = model.generate(prompt, **plainly).token_ids
    for drafter in drafters:
        model.forget()
        chosen: GenerationKeywords = {
            **options,
            "drafter": drafter,
            "num_assistant_tokens": DRAFT_TOKENS,
            "num_assistant_tokens_schedule": "constant",
        }
        reply = model.generate(prompt, **chosen)
        stats, drafted = reply.stats, reply.token_ids
        difference = None
        if drafted != plain:
            position = first_difference(plain, drafted)
            one, other = _at(plain, position), _at(drafted, position)
            gap = None
            if one is not None and other is not None:
                gap = _logit_gap(model, [*model.encode(prompt), *plain[:position]], one, other)
            difference = Difference(number, drafter, position, one, other, gap)
        yield Replay(drafter, len(plain), stats.num_draft_tokens, stats.num_accepted_tokens, difference)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _logit_gap(model: Model, context: list[int], one: int, other: int) -> float:
    """How much likelier the target finds a token than another after `context`, in logits."""
    rows: list[Floats] = []

    def look(logits: Floats, context: Sequence[int]) -> Floats:
        rows.append(logits.copy())
        return logits

    model.forget()
    model.generate(context, max_new_tokens=1, temperature=0.0, drafter=registry.NONE, logits_processors=[look])
    return float(rows[0][one] - rows[0][other])
