"""The families of models that can be exported: one file each, with what `config.json` leaves to the code of a model.

Read `llama` first, then `family`, which all of them use; `rows` is for checkpoints with rows in another order.
`read_target` chooses a family by the checkpoint's architecture.
Nothing outside this folder knows a family: its models are data (`ondevice.bundle_format.decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ondevice.bundle_format.model_config import Target
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import architecture
from ondevice_export.families import (
    exaone4,
    gemma3,
    gemma4,
    gemma4_assistant,
    gpt_oss,
    granite,
    lfm2,
    llama,
    neighbours,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from ondevice_export.families.family import Config, Family, decoder

FAMILIES: tuple[Family, ...] = (
    *gemma4.FAMILIES,
    *gemma3.FAMILIES,
    *llama.FAMILIES,
    *qwen2.FAMILIES,
    *qwen2_moe.FAMILIES,
    *qwen3.FAMILIES,
    *phi3.FAMILIES,
    *gpt_oss.FAMILIES,
    *granite.FAMILIES,
    *lfm2.FAMILIES,
    *exaone4.FAMILIES,
    *olmo.FAMILIES,
    *neighbours.FAMILIES,
    *qwen3_5.FAMILIES,
    *qwen3_next.FAMILIES,
)


class Described(NamedTuple):
    """A target's family, its configuration in the newer spelling, and the decoder that both describe."""

    family: Family
    config: Config
    target: Target


def read_target(data: Mapping[str, Any], origin: str, context: int | None = None) -> Described:
    """Read the configuration of a target.

    Args:
        data: `config.json`, or what another kind of checkpoint has in its place.
        origin: what error messages call it.
        context: the longest text that a user asks for, in tokens; a model may end before. Where it is longer than the
            original length of a `longrope`, all texts are computed with the frequencies of long ones.

    Raises:
        CheckpointError: the architecture is not supported, or the configuration is damaged or not supported.
    """
    family = _find_family(architecture(data), origin)
    config = family.config(data, origin, context)
    return Described(family, config, decoder(family, config))


def _find_family(name: str, origin: str) -> Family:
    for family in FAMILIES:
        if name in family.architectures:
            return family
    hint = ": this is a drafter, pass it with --drafter" if name in gemma4_assistant.ARCHITECTURES else ""
    known = ", ".join(each for family in FAMILIES for each in family.architectures)
    raise CheckpointError(f"{origin}: architecture {name!r} is not supported{hint} (supported: {known})")
