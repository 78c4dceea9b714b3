"""Write the card of trained heads from `config.json` and `figures.json` in the same directory."""

import json
from pathlib import Path
from typing import Any

from pair.card import table

CARD = """\
---
tags: [gemma4, speculative-decoding]
---
# Heads of {name}

Heads that draft from the hidden states of `{name}` without a second model: `ondevice export TARGET --heads DIR` puts
them into its bundle. They were trained for these weights only; an export with other weights is an error. They use the
target's own vocabulary projection{shortlist}.

{kinds}

## Training

Distilled from the frozen target by `models/recipe/train_heads.py`: {states:,} hidden states, {own:.0%} of them of text
that the target generated; {tokens:,} tokens in {minutes:.0f} core minutes ({hardware}), final loss {loss:.3f}. Their
licence is the target's.

## Figures

On {held_out:,} states of held-out blocks: how often the target's likeliest token is the first proposal for its
position, or among the first few, independent of the proposals before; and how often a chain of first proposals is right
up to this position.

{figures}
"""

WHAT = {
    "medusa": "reads the state after the final norm; one ResBlock for each of {offsets} tokens after the next",
    "blockwise": "reads the same state; one dense-relu-dense of {width} for {offsets} tokens after the next",
    "exit": "reads the residual stream after layer {layer}; one ResBlock, for the next token itself",
}


def write_card(directory: Path) -> None:
    """Write `README.md`."""
    config, figures = (json.loads((directory / name).read_text()) for name in ("config.json", "figures.json"))
    training, shortlist = figures["training"], config["shortlist"]
    text = CARD.format(
        name=config["target"]["name"],
        kinds="\n".join(f"- **{kind}**: {WHAT[kind].format(**fields)}" for kind, fields in config["kinds"].items()),
        shortlist=""
        if shortlist is None
        else f", and score the tokens of the best {shortlist['top']} of {shortlist['clusters']} clusters",
        states=training["states"],
        own=training["own_share"],
        tokens=training["tokens"],
        minutes=training["core_minutes"],
        hardware=training["hardware"],
        loss=training["loss"],
        held_out=figures["held_out"],
        figures=figures_table(figures["acceptance"]),
    )
    (directory / "README.md").write_text(text)


def figures_table(acceptance: dict[str, Any]) -> str:
    """A row for every kind and position."""
    ranks = len(next(iter(acceptance.values()))["likeliest_among_first"][0])
    header = ["kind, position", *(f"in {rank}" for rank in range(1, ranks + 1)), "chain up to here"]
    rows = [
        [f"{kind} {place + 1}", *(f"{share:.1%}" for share in shares), f"{figures['chain'][place]:.1%}"]
        for kind, figures in acceptance.items()
        for place, shares in enumerate(figures["likeliest_among_first"])
    ]
    return table(header, rows)
