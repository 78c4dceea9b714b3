"""The drafters that there are, by name: what the command line, the options of a generation and benchmarks offer.

A new method is a file beside this one and an entry here. An application may also pass a `Drafter` of its own to
`Model.stream`, without an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ondevice.errors import UsageError

if TYPE_CHECKING:  # the command line lists the names, and needs neither numpy nor numba for that
    from ondevice.decoding.costs import Costs
    from ondevice.drafters.draft_model import DraftModel, DraftSampling
    from ondevice.drafters.protocol import Drafter
    from ondevice.engines.protocol import Engine

NONE = "none"
AUTO = "auto"
BESIDE = "auto+"
"""Before a draft bundle's path: that one and all that the bundle offers."""


@dataclass(frozen=True)
class DrafterEntry:
    """A way of drafting.

    name : what users call it
    summary : one line about it
    make : a new drafter for sequences of an engine, on a machine with these costs
    obstacle : why it cannot draft for an engine's bundle, and what to do; None where it can
    needs_grammar : whether it drafts only where a grammar limits the reply
    """

    name: str
    summary: str
    make: Callable[[Engine, Costs], Drafter]
    obstacle: Callable[[Engine], str | None] = lambda engine: None
    needs_grammar: bool = False


def _mtp(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.mtp import MtpDrafter

    return MtpDrafter(engine.target.hidden_size, engine.target.vocab_size)


def _ngram(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.ngram import NgramDrafter

    return NgramDrafter()


def _grammar(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.grammar import GrammarDrafter

    return GrammarDrafter()


def _auto(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.portfolio import Portfolio

    return Portfolio(_methods(engine, costs), costs)


def _methods(engine: Engine, costs: Costs) -> list[Drafter]:
    return [REGISTRY[name].make(engine, costs) for name in methods(engine)]


def _without_model(engine: Engine) -> str | None:
    if engine.has_drafter:
        return None
    return "this bundle has no MTP drafter: use --drafter ngram, or export with --drafter SOURCE"


_ENTRIES = (
    DrafterEntry(AUTO, "all that the bundle offers, round by round the one that expects to gain more", _auto),
    DrafterEntry(
        "mtp",
        "the bundle's own multi-token-prediction drafter: reads the model's hidden state and KV cache, has none itself",
        _mtp,
        _without_model,
    ),
    DrafterEntry(
        "ngram",
        "what followed the longest earlier match in the prompt, this reply or earlier replies; costs microseconds",
        _ngram,
    ),
    DrafterEntry(
        "grammar",
        "what a grammar forces (a schema's keys, say); in auto wherever a reply is constrained",
        _grammar,
        needs_grammar=True,
    ),
)

REGISTRY = {entry.name: entry for entry in _ENTRIES}


def names() -> tuple[str, ...]:
    """What `--drafter` takes, beside the path of a draft bundle."""
    return (*REGISTRY, NONE)


def draft_bundle(drafter: str) -> str | None:
    """The path that follows no name, or `auto+`; None where there is none."""
    if drafter in names() or not (location := drafter.removeprefix(BESIDE)):
        return None
    return location


def with_draft_model(drafter: str, model: DraftModel, sampling: DraftSampling) -> DrafterEntry:
    """The entry of a draft bundle's path, which was opened: alone, or with `auto+` before it as one of a portfolio.

    Raises:
        UsageError: the ratio rule in a portfolio, whose other drafts are drawn with the target's noise.
    """

    def alone(engine: Engine, costs: Costs) -> Drafter:
        from ondevice.drafters.draft_model import DraftModelDrafter

        return DraftModelDrafter(model, costs, sampling)

    def beside(engine: Engine, costs: Costs) -> Drafter:
        from ondevice.drafters.portfolio import Portfolio

        return Portfolio([*_methods(engine, costs), alone(engine, costs)], costs)

    if not drafter.startswith(BESIDE):
        return DrafterEntry(f"{drafter} {sampling}", "a draft model", alone)
    if sampling == "ratio":
        raise UsageError("the ratio rule needs a draft model that drafts alone: leave auto+ or draft_sampling out")
    return DrafterEntry(drafter, "a draft model beside all that the bundle offers", beside)


def beside_grammar(entry: DrafterEntry) -> DrafterEntry:
    """The entry for a reply that a grammar limits: a portfolio also drafts what that forces."""

    def make(engine: Engine, costs: Costs) -> Drafter:
        from ondevice.drafters.portfolio import Portfolio

        drafter = entry.make(engine, costs)
        if not isinstance(drafter, Portfolio):
            return drafter
        return Portfolio([_grammar(engine, costs), *drafter.drafters], costs)

    return replace(entry, name=f"{entry.name} with a grammar", make=make)


def entry(name: str, engine: Engine) -> DrafterEntry:
    """The entry of that name.

    Raises:
        UsageError: there is none, or it cannot draft for this engine's bundle.
    """
    if name not in REGISTRY:
        raise UsageError(f"drafter must be one of {', '.join(names())}, not {name!r:.99}")
    if obstacle := REGISTRY[name].obstacle(engine):
        raise UsageError(obstacle)
    return REGISTRY[name]


def methods(engine: Engine) -> list[str]:
    """The names that can draft any text for this engine's bundle, but for what combines them."""
    return [
        name
        for name, each in REGISTRY.items()
        if name != AUTO and not each.needs_grammar and each.obstacle(engine) is None
    ]


def offered(engine: Engine) -> list[str]:
    """The names that can draft for this engine's bundle, each method before what combines them."""
    found = methods(engine)
    return [*found, AUTO] if len(found) > 1 else found
