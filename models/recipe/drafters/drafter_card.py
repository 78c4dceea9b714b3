"""Write the card of a drafter trained for a target, from `figures.json` and `config.json` in the same directory."""

import json
from pathlib import Path
from typing import Any

from pair.card import parameters, table

CARD = """\
---
{licence}tags: [speculative-decoding]
---
# An MTP drafter for {name}

Drafts for `{name}` alone: it reads that model's token table, states and the cache of its last
full-attention layer, and scores {head:,} frequent tokens with that model's own head. It has the form of Gemma 4's
assistants, `Gemma4AssistantForCausalLM`, with that head as the one addition: {parameters:.2f} M parameters,
{megabytes:.1f} MB.

```
ondevice export FILE.gguf --drafter DIRECTORY
```

| | |
| --- | ---: |
| width, layers, MLP units | {width}, {layers}, {mlp} |
| tokens of the head | {head:,} of {vocabulary:,} |
| query heads, KV heads of the target's cache | {heads}, {kv_heads} |

## Data

{replies:,} replies of {reply_tokens:,} tokens that the target wrote itself, half of them at temperature 1, a quarter
at 0.7, a quarter at 0. {own:.0%} of the prompts are the target's own, the others come from templates of this project,
with passages that the target wrote, and passages and functions of Python's standard library and manual (Python Software
Foundation License). No other model's or person's answers were used. {held_out:,} of the replies were held out.

## Training

`models/recipe/train_drafter.py`: {rounds:,} rounds of {steps} draft steps, {core_minutes:.0f} minutes of CPU time
({hardware}), loss `{loss}`. The layers began as {start}.

{curve}

## Figures

"Accepted to" is the share of positions at which all drafts up to a step are accepted, "tokens a round" those that
rounds of {drafts} drafts bring one after the other, the target's own token included. At T = 1 drafts are drawn under
the target's noise, as the runtime does it. Computed from the target's replies, without the runtime.

Held-out replies, to prompts like those of the training:

{replies_table}

Replies that it was trained on. Where these have far more, further replies would help, and further rounds on the same
would not:

{learnt_table}

Replies to prompts that were given with `--held-out`:

{prompts_table}
"""


def write_card(directory: Path) -> None:
    """Write `README.md`."""
    figures, config = (json.loads((directory / name).read_text()) for name in ("figures.json", "config.json"))
    text = config["text_config"]
    card = CARD.format(
        licence=f"license: {figures['licence']}\n" if figures.get("licence") else "",
        name=config["target"]["name"],
        head=config["num_head_tokens"],
        parameters=parameters(directory) / 1e6,
        megabytes=(directory / "model.safetensors").stat().st_size / 1e6,
        width=text["hidden_size"],
        layers=text["num_hidden_layers"],
        mlp=text["intermediate_size"],
        vocabulary=text["vocab_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        curve=curve_table(figures["curve"]),
        learnt_table=figures_table({t: {"all": kinds["all"]} for t, kinds in figures["learnt"].items()}),
        replies_table=figures_table(figures["replies"]),
        prompts_table=figures_table(figures["prompts"]) if figures["prompts"] else "None were given.",
        **figures["training"],
    )
    (directory / "README.md").write_text(card)


def curve_table(curve: list[dict[str, Any]]) -> str:
    """Tokens of a round on held-out replies at some moments of the training."""
    chosen = [curve[round(place * (len(curve) - 1) / 11)] for place in range(12)] if len(curve) > 12 else curve
    rows = [[f"{each['tokens']:,}", *(round_tokens(each, temperature) for temperature in "01")] for each in chosen]
    return table(["rounds trained", "tokens a round, T = 0", "T = 1"], rows)


def round_tokens(moment: dict[str, Any], temperature: str) -> str:
    """Tokens of a round at a moment of the curve."""
    found = moment["figures"].get(temperature)
    return "-" if found is None else f"{found['tokens']:.2f}"


def figures_table(measured: dict[str, Any]) -> str:
    """A row for each temperature and kind of text."""
    rows = [
        [
            f"T = {temperature}, {kind}",
            str(each["replies"]),
            f"{each['tokens']:.2f}",
            *(f"{x:.2f}" for x in each["accepted"]),
        ]
        for temperature, kinds in measured.items()
        for kind, each in kinds.items()
    ]
    steps = len(next(iter(next(iter(measured.values())).values()))["accepted"])
    header = ["", "replies", "tokens a round", *(f"accepted to {step}" for step in range(1, steps + 1))]
    return table(header, rows)
