"""The registry of drafters by name, which the command line, the options of a generation and benchmarks offer.

To add a drafter, write a file in this package and an entry in `_ENTRIES`. An application may also pass its own
`Drafter` to `Model.stream`, without an entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ondevice.errors import UsageError

if TYPE_CHECKING:  # the command line lists the names without importing numpy or numba
    from ondevice.engines.layer_path import SkipRecord
    from ondevice.engines.protocol import Engine
    from ondevice.generate.costs import Costs
    from ondevice.generate.drafters.draft_model import DraftModel, DraftSampling
    from ondevice.generate.drafters.protocol import Drafter

_log = logging.getLogger("ondevice")

NONE = "none"
AUTO = "auto"
AUTO_WITH = "auto+"
"""Prefix of a draft bundle's path: the draft model together with all drafters of the bundle."""


@dataclass(frozen=True)
class RegisteredDrafter:
    """A drafter by name.

    name : name on the command line and in options
    summary : one line for users
    make : creates the drafters for a sequence of an engine; the costs are this machine's
    obstacle : returns why it cannot draft for an engine's bundle, and what to do; None where it can
    loses : whether it is expected to be slower than plain decoding for an engine's bundle here. It is then used only
        where it is named, and neither offered nor a part of `auto`
    needs_grammar : whether it drafts only where a grammar constrains the reply
    unless_mtp : whether `auto` includes it only if the bundle has no MTP drafter. MTP tokens cost less and are right
        more often; trying drafters that it dominates took a fifth of the reference pair's first reply
    only_if_tuned : whether `auto` includes it only if `ondevice tune` measured that leaving blocks out pays. On dense
        models it cannot, and the search alone cost `auto` up to 7 % at temperature 1 (SmolLM2-135M)
    make_for_auto : creates those for `auto`, where that differs from `make`
    """

    name: str
    summary: str
    make: Callable[[Engine, Costs], Sequence[Drafter]]
    obstacle: Callable[[Engine], str | None] = lambda engine: None
    loses: Callable[[Engine], bool] = lambda engine: False
    needs_grammar: bool = False
    unless_mtp: bool = False
    only_if_tuned: bool = False
    make_for_auto: Callable[[Engine, Costs], Sequence[Drafter]] | None = None


def names() -> tuple[str, ...]:
    """The values of `--drafter`, besides paths of draft bundles."""
    return (*REGISTRY, NONE)


def draft_bundle(drafter: str) -> str | None:
    """The path of the draft bundle in a value of `--drafter`, with `auto+` removed; None for the name of a drafter."""
    if drafter in names() or not (location := drafter.removeprefix(AUTO_WITH)):
        return None
    return location


def with_draft_model(drafter: str, model: DraftModel, sampling: DraftSampling) -> RegisteredDrafter:
    """The entry for an opened draft bundle: the draft model alone, or with all of `auto` where `drafter` begins so.

    Raises:
        UsageError: the ratio rule beside other drafters, because their drafts are drawn with the target's noise.
    """

    def alone(engine: Engine, costs: Costs) -> Sequence[Drafter]:
        from ondevice.generate.drafters.draft_model import DraftModelDrafter

        return [DraftModelDrafter(model, costs, sampling)]

    def with_all(engine: Engine, costs: Costs) -> Sequence[Drafter]:
        return [*_auto(engine, costs), *alone(engine, costs)]

    if not drafter.startswith(AUTO_WITH):
        return RegisteredDrafter(f"{drafter} {sampling}", "a draft model", alone)
    if sampling == "ratio":
        raise UsageError("the ratio rule needs a draft model that drafts alone: leave auto+ or draft_sampling out")
    return RegisteredDrafter(drafter, "a draft model together with all drafters that the bundle offers", with_all)


def with_grammar(entry: RegisteredDrafter) -> RegisteredDrafter:
    """The entry for a reply that a grammar constrains: `auto` also gets the grammar drafter."""

    def make(engine: Engine, costs: Costs) -> Sequence[Drafter]:
        return [*_grammar(engine, costs), *entry.make(engine, costs)]

    if entry.name != AUTO and not entry.name.startswith(AUTO_WITH):
        return entry
    return replace(entry, name=f"{entry.name} with a grammar", make=make)


def entry(name: str, engine: Engine) -> RegisteredDrafter:
    """The entry of that name.

    Raises:
        UsageError: there is no such entry, or it cannot draft for this engine's bundle.
    """
    if name not in REGISTRY:
        raise UsageError(f"drafter must be one of {', '.join(names())}, not {name!r:.99}")
    if obstacle := REGISTRY[name].obstacle(engine):
        raise UsageError(obstacle)
    return REGISTRY[name]


def methods(engine: Engine) -> list[str]:
    """The names of single drafters that draft any text for this bundle: without `auto`, `grammar`, and those that are
    expected to lose.
    """
    return [
        name
        for name, each in REGISTRY.items()
        if name != AUTO and not each.needs_grammar and each.obstacle(engine) is None and not each.loses(engine)
    ]


def offered(engine: Engine) -> list[str]:
    """The names of drafters that can draft for this engine's bundle, with `auto` last if there are several."""
    found = methods(engine)
    return [*found, AUTO] if len(found) > 1 else found


# How drafters are made. Each function imports its drafter only when it is called.


def _mtp(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.mtp import MtpDrafter

    assert engine.drafter is not None
    target = engine.target
    return [MtpDrafter(target.vocab_size, acceptance=engine.drafter.acceptance, writes=target.mtp is not None)]


def _ngram(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.ngram import NgramDrafter

    return [NgramDrafter()]


def _grammar(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.grammar import GrammarDrafter

    return [GrammarDrafter()]


def _self(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.engines.layer_path import path_of
    from ondevice.generate.drafters.self_speculative import SkippingDrafter

    record = _tuned(engine)
    if record is None or not record.usable:
        return [SkippingDrafter("self", engine, None)]
    if not record.pays:
        _log.warning(
            "`ondevice tune` predicts %.2f times plain decoding for `self`, which drafts only where that pays: "
            "--num-assistant-tokens-schedule constant drafts always",
            record.speed_up,
        )
    costs.assume("self", record.draft_share)
    return [SkippingDrafter("self", engine, path_of(record.skips), record.survival[0])]


def _swift(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.self_speculative import SwiftDrafter

    return [SwiftDrafter(engine, costs)]


def _swift_for_auto(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.self_speculative import SEARCH_SHARE, SwiftDrafter

    return [SwiftDrafter(engine, costs, SEARCH_SHARE / 2)]


def _heads(kind: str) -> Callable[[Engine, Costs], Sequence[Drafter]]:
    def make(engine: Engine, costs: Costs) -> Sequence[Drafter]:
        from ondevice.generate.drafters.heads import HeadsDrafter

        return [HeadsDrafter(engine.heads[kind], engine.target)]

    return make


def _early_exit(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    from ondevice.generate.drafters.self_speculative import EarlyExitDrafter

    layer = engine.heads["exit"].layer
    assert layer is not None
    costs.assume("early-exit", (layer + 1) / len(engine.target.layers))
    return [EarlyExitDrafter(engine, layer + 1)]


def _auto(engine: Engine, costs: Costs) -> Sequence[Drafter]:
    entries = [REGISTRY[name] for name in methods(engine)]
    has_mtp = any(each.name == "mtp" for each in entries)
    pays = (record := _tuned(engine)) is not None and record.pays
    left_out = {each.name for each in entries if (has_mtp and each.unless_mtp) or (each.only_if_tuned and not pays)}
    chosen = [each.make_for_auto or each.make for each in entries if each.name not in left_out]
    return [drafter for make in chosen for drafter in make(engine, costs)]


# Why a drafter cannot run for the bundle of an engine.


def _no_mtp_drafter(engine: Engine) -> str | None:
    if engine.drafter is not None:
        return None
    return "this bundle has no MTP drafter: use --drafter ngram, or export with --drafter SOURCE"


def _tuned(engine: Engine) -> SkipRecord | None:
    return None if engine.paths is None else engine.paths.read(engine.paths.tuned_files)


def no_partial_forwards(engine: Engine) -> str | None:
    """Why an engine cannot run a part of the layers of its target; None if it can."""
    from ondevice.engines.layer_path import free_sub_layers

    if engine.target.states:
        return "rows of this model, which has states, pass all layers: use --drafter ngram"
    if engine.paths is not None:
        return None if free_sub_layers(engine.target) else "this model has too few layers for a draft to leave any out"
    return f"the {engine.name} engine cannot run only a part of the layers: use --engine simd"


def _no_tuned_layers(engine: Engine) -> str | None:
    if (obstacle := no_partial_forwards(engine)) is not None:
        return obstacle
    record = _tuned(engine)
    if record is None:
        return "the layers that a draft of this bundle can leave out are not known yet: run `ondevice tune BUNDLE`"
    return None if record.usable else "`ondevice tune` found no layers that a draft of this bundle could leave out"


def _loses_when_tuned(engine: Engine) -> bool:
    record = _tuned(engine)
    return record is not None and not record.pays


def _no_heads(kind: str) -> Callable[[Engine], str | None]:
    def obstacle(engine: Engine) -> str | None:
        if kind in engine.heads:
            return None
        return f"this bundle has no {kind} heads: use --drafter ngram, or train some and export with --heads DIR"

    return obstacle


def _no_exit_head(engine: Engine) -> str | None:
    partial = engine.paths is not None and not engine.target.states
    return _no_heads("exit")(engine) if partial else no_partial_forwards(engine)


# The entries.


_ENTRIES = (
    RegisteredDrafter(
        AUTO, "all drafters that the bundle offers; each round uses the one with the largest expected gain", _auto
    ),
    RegisteredDrafter(
        "mtp",
        "the bundle's multi-token-prediction drafter, which reads the model's hidden state and KV cache",
        _mtp,
        _no_mtp_drafter,
    ),
    RegisteredDrafter(
        "ngram",
        "what followed the longest earlier match in the prompt, this reply or earlier replies; costs microseconds",
        _ngram,
    ),
    RegisteredDrafter(
        "self",
        "the model itself, without the attention and MLP blocks that `ondevice tune` found dispensable",
        _self,
        _no_tuned_layers,
        _loses_when_tuned,
    ),
    RegisteredDrafter(
        "swift",
        "the model itself, without blocks that it finds dispensable while it generates",
        _swift,
        no_partial_forwards,
        make_for_auto=_swift_for_auto,
        unless_mtp=True,
        only_if_tuned=True,
    ),
    RegisteredDrafter(
        "medusa",
        "heads on the model's last hidden state, one for each of the next few tokens, as a tree",
        _heads("medusa"),
        _no_heads("medusa"),
        unless_mtp=True,
    ),
    RegisteredDrafter(
        "blockwise",
        "heads on the model's last hidden state that share a layer, as a chain",
        _heads("blockwise"),
        _no_heads("blockwise"),
        unless_mtp=True,
    ),
    RegisteredDrafter(
        "early-exit",
        "a head on the model's lower layers, whose results for drafted tokens the verification reuses",
        _early_exit,
        _no_exit_head,
        unless_mtp=True,
    ),
    RegisteredDrafter(
        "grammar",
        "the tokens that a grammar forces, such as a schema's keys; part of auto wherever a reply is constrained",
        _grammar,
        needs_grammar=True,
    ),
)

REGISTRY = {entry.name: entry for entry in _ENTRIES}
