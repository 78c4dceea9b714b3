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
    from ondevice.engines.path_memory import SkipRecord
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
    in_place_of_model : whether `auto` has it only where the bundle has no MTP drafter, whose tokens cost less and are
        right more often: trying what it dominates took a fifth of the reference pair's first reply
    make_beside : a new one for a portfolio, where that is made in another way
    """

    name: str
    summary: str
    make: Callable[[Engine, Costs], Drafter]
    obstacle: Callable[[Engine], str | None] = lambda engine: None
    needs_grammar: bool = False
    in_place_of_model: bool = False
    make_beside: Callable[[Engine, Costs], Drafter] | None = None


def _mtp(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.mtp import MtpDrafter

    return MtpDrafter(engine.target.hidden_size, engine.target.vocab_size)


def _ngram(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.ngram import NgramDrafter

    return NgramDrafter()


def _grammar(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.grammar import GrammarDrafter

    return GrammarDrafter()


def _self(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.self_draft import SkippingDrafter
    from ondevice.engines.path_memory import path_of

    record = _tuned(engine)
    if record is None or not record.pays:
        return SkippingDrafter("self", engine, None)
    costs.assume("self", record.draft_share)
    return SkippingDrafter("self", engine, path_of(record.skips), record.survival[0])


def _swift(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.swift import SwiftDrafter

    return SwiftDrafter(engine, costs)


def _swift_beside(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.swift import SHARE, SwiftDrafter

    return SwiftDrafter(engine, costs, SHARE / 2)


def _medusa(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.medusa import MedusaDrafter

    return MedusaDrafter(engine.heads["medusa"], engine.target)


def _blockwise(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.blockwise import BlockwiseDrafter

    return BlockwiseDrafter(engine.heads["blockwise"], engine.target)


def _early_exit(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.early_exit import EarlyExitDrafter

    layer = engine.heads["exit"].layer
    assert layer is not None
    costs.assume("early-exit", (layer + 1) / len(engine.target.layers))
    return EarlyExitDrafter(engine, layer + 1)


def _auto(engine: Engine, costs: Costs) -> Drafter:
    from ondevice.drafters.portfolio import Portfolio

    return Portfolio(_methods(engine, costs), costs)


def _methods(engine: Engine, costs: Costs) -> list[Drafter]:
    entries = [REGISTRY[name] for name in methods(engine)]
    has_model = any(each.name == "mtp" for each in entries)
    return [
        (each.make_beside or each.make)(engine, costs) for each in entries if not (has_model and each.in_place_of_model)
    ]


def _without_model(engine: Engine) -> str | None:
    if engine.has_drafter:
        return None
    return "this bundle has no MTP drafter: use --drafter ngram, or export with --drafter SOURCE"


def _tuned(engine: Engine) -> SkipRecord | None:
    return None if engine.paths is None else engine.paths.read(engine.paths.tuned_files)


def _all_layers(engine: Engine) -> str | None:
    from ondevice.engines.path_memory import free_sub_layers

    if engine.paths is not None:
        return None if free_sub_layers(engine.target) else "this model has too few layers for a draft to leave any out"
    return f"the {engine.name} engine runs all layers or none, and drafts with some of them need --engine simd"


def _nothing_to_skip(engine: Engine) -> str | None:
    if (obstacle := _all_layers(engine)) is not None:
        return obstacle
    record = _tuned(engine)
    if record is None:
        return "nobody knows yet which layers of this bundle a draft can do without: run `ondevice tune BUNDLE`"
    return None if record.pays else "`ondevice tune` found no layers that a draft could leave out with a gain here"


def _without_heads(kind: str) -> Callable[[Engine], str | None]:
    def obstacle(engine: Engine) -> str | None:
        if kind in engine.heads:
            return None
        return f"this bundle has no {kind} heads: use --drafter ngram, or train some and export with --heads DIR"

    return obstacle


def _no_way_out(engine: Engine) -> str | None:
    return _without_heads("exit")(engine) if engine.paths is not None else _all_layers(engine)


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
        "self",
        "the model itself, without the attention and MLP blocks that `ondevice tune` found it can draft without",
        _self,
        _nothing_to_skip,
    ),
    DrafterEntry(
        "swift",
        "the same, with blocks that are found while it generates, in a share of the time",
        _swift,
        _all_layers,
        make_beside=_swift_beside,
        in_place_of_model=True,
    ),
    DrafterEntry(
        "medusa",
        "heads on the model's last hidden state, one for each of the next few tokens, as a tree",
        _medusa,
        _without_heads("medusa"),
        in_place_of_model=True,
    ),
    DrafterEntry(
        "blockwise",
        "heads on the model's last hidden state that share a layer, as a chain",
        _blockwise,
        _without_heads("blockwise"),
        in_place_of_model=True,
    ),
    DrafterEntry(
        "early-exit",
        "a head behind the model's lower layers, whose work on drafted tokens verification takes over",
        _early_exit,
        _no_way_out,
        in_place_of_model=True,
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
