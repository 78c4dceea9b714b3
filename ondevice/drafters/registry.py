"""The drafters that there are, by name: what the command line, the options of a generation and benchmarks offer.

A new method is a file beside this one and an entry here. An application may also pass a `Drafter` of its own to
`Model.stream`, without an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.errors import UsageError

if TYPE_CHECKING:  # the command line lists the names, and needs neither numpy nor numba for that
    from ondevice.decoding.costs import Costs
    from ondevice.drafters.protocol import Drafter
    from ondevice.engines.protocol import Engine

NONE = "none"
AUTO = "auto"


@dataclass(frozen=True)
class DrafterEntry:
    """A way of drafting.

    name : what users call it
    summary : one line about it
    make : a new drafter for sequences of an engine, on a machine with these costs
    obstacle : why it cannot draft for an engine's bundle, and what to do; None where it can
    """

    name: str
    summary: str
    make: Callable[[Engine, Costs], Drafter]
    obstacle: Callable[[Engine], str | None] = lambda engine: None


def _mtp(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.mtp import MtpDrafter

    return MtpDrafter(engine.target.hidden_size, engine.target.vocab_size)


def _ngram(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.ngram import NgramDrafter

    return NgramDrafter()


def _auto(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.portfolio import Portfolio

    return Portfolio([REGISTRY[name].make(engine, costs) for name in methods(engine)], costs)


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
)

REGISTRY = {entry.name: entry for entry in _ENTRIES}


def names() -> tuple[str, ...]:
    """What `--drafter` takes."""
    return (*REGISTRY, NONE)


def entry(name: str, engine: Engine) -> DrafterEntry:
    """The entry of that name.

    Raises:
        UsageError: there is none, or it cannot draft for this engine's bundle.
    """
    if name not in REGISTRY:
        raise UsageError(f"drafter must be one of {', '.join(names())}, not {name!r}")
    if obstacle := REGISTRY[name].obstacle(engine):
        raise UsageError(obstacle)
    return REGISTRY[name]


def methods(engine: Engine) -> list[str]:
    """The names that can draft for this engine's bundle, but for what combines them."""
    return [name for name, each in REGISTRY.items() if name != AUTO and each.obstacle(engine) is None]


def offered(engine: Engine) -> list[str]:
    """The names that can draft for this engine's bundle, each method before what combines them."""
    found = methods(engine)
    return [*found, AUTO] if len(found) > 1 else found
