"""Write the model card; every figure in it comes from `figures.json`."""

import json
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from text.packages import PACKAGES

LAYOUT = (
    ("hidden width", "hidden_size"),
    ("layers", "num_hidden_layers"),
    ("layers that read another layer's K and V", "num_kv_shared_layers"),
    ("MLP width", "intermediate_size"),
    ("query heads", "num_attention_heads"),
    ("KV heads", "num_key_value_heads"),
    ("head width, sliding layers", "head_dim"),
    ("head width, full layers", "global_head_dim"),
    ("sliding window", "sliding_window"),
    ("per-layer embedding width", "hidden_size_per_layer_input"),
    ("logit soft cap", "final_logit_softcapping"),
    ("vocabulary", "vocab_size"),
    ("context", "max_position_embeddings"),
)

CARD = """\
---
license: psf-2.0
library_name: transformers
tags: [gemma4, speculative-decoding, test-model]
---
# The reference pair

A tiny target and its MTP drafter of exactly the Gemma 4 E2B architecture, trained from scratch for this project. The
demo and the tests use them, and they give real acceptance figures where no larger weights are available. They share
nothing with Google's weights. `target/` loads as `Gemma4ForCausalLM`, `drafter/` as
`Gemma4AssistantForCausalLM` (transformers 5.22.2).

## Architecture

{layout}

Three quarters of the head are not rotated in full-attention layers (proportional RoPE), the head is tied to the
embedding, and the MLPs of KV-sharing target layers are twice as wide. The drafter has the ordered head: {clusters}
clusters of {cluster_size} tokens, of which it scores the best {top_k} ({candidates} candidates). The clusters are a
balanced k-means of the target's embedding.

## Data and licence

Python source: the standard library (CPython {python}, Python Software Foundation License), {library_repeats} times per
epoch, its test packages {test_repeats} times, and these packages from the Python package index, all under permissive
licences, at most {package_mb} MB of each:

{packages}

About {chat_percent} % of the tokens are conversations made from that source: functions to write, complete and explain,
some with a thought before the answer, conversion of literals to JSON and back, and calls of functions as tools. Modules
whose path hashes into the held-out {held_out_percent} % were not trained on, nor were copies of them in packages. The
tokenizer is a byte-level BPE of {vocabulary} tokens, trained on the same text; line breaks and digits are tokens of
their own.

## Training

{training}

"Unlikelihood" is training against repetition: in text that the target generated, tokens that continue a repetition are
made less likely, while training on the corpus continues. `python models/recipe/train.py` repeats all stages: tokenizer,
target, the target's own text, unlikelihood, its own text again, drafter, figures, this card.

## Figures

Held-out modules: **{loss:.3f} nats per token, {bits:.3f} bits per byte** ({tokens:,} tokens in blocks of {block:,}).

{looping} of {texts} greedy continuations of held-out prompts ({continued} tokens each) contain the same line {repeats}
times in a row; {circling:.0%} of their tokens belong to a repetition of one or more lines (of up to {period} tokens).

Acceptance on held-out prompts with {draft_tokens} drafts per round, on the target's greedy text, and on text sampled at
temperature 1 without top-k or top-p. For sampled text, drafts are the drafter's likeliest tokens, or "coupled": draws
with the target's own noise, as `ondevice` does it:

{acceptance}

Coupled rounds of {fewer} drafts give {tokens_of_fewer:.2f} tokens. "Accepted" is the share of all rounds in which the
draft at this position is accepted, "once reached" the same share of the rounds in which all drafts before it are.

The likeliest token of the target is within the drafter's {top_k} clusters at {reach:.1%} of positions of the greedy
text. Rounds computed in parallel, as in training, differ from the reference's one-query forward by at most
{error:.1e}.

## Samples

Temperature 0.6, each cut after its first function or class:

{samples}

Asked "{question}" in the chat template, it answers:

{answer}

## Limits

This is a test and demo model. It writes text that looks like Python and must not be relied on for anything; it knows no
other language and no facts. With greedy decoding it writes a few sensible lines and then repeats itself, and it uses
names that were never defined. Its acceptance shows how the draft/verify loop behaves, not what a large Gemma would
reach.
"""


def write_card(directory: Path) -> None:
    """Write `README.md` next to `figures.json` in the pair's directory."""
    figures = json.loads((directory / "figures.json").read_text())
    target, drafter = (json.loads((directory / name / "config.json").read_text()) for name in ("target", "drafter"))
    greedy = figures["greedy"]
    text = CARD.format(
        layout=layout_table(directory, target, drafter["text_config"]),
        clusters=drafter["num_centroids"],
        cluster_size=target["vocab_size"] // drafter["num_centroids"],
        top_k=drafter["centroid_intermediate_top_k"],
        candidates=drafter["centroid_intermediate_top_k"] * target["vocab_size"] // drafter["num_centroids"],
        vocabulary=target["vocab_size"],
        training=training_table(figures["training"]),
        loss=figures["held_out"]["loss"],
        bits=figures["held_out"]["bits_per_byte"],
        tokens=figures["held_out"]["tokens"],
        block=figures["held_out"]["block"],
        looping=figures["loops"]["looping"],
        texts=figures["loops"]["texts"],
        continued=figures["loops"]["tokens"],
        repeats=figures["loops"]["repeats"],
        circling=figures["loops"]["circling"],
        period=figures["loops"]["longest_period"],
        draft_tokens=len(greedy["accepted_up_to"]),
        acceptance=acceptance_table([greedy, figures["sampled"], figures["coupled"]]),
        fewer=figures["coupled"]["fewer"],
        tokens_of_fewer=figures["coupled"]["tokens_per_round_of_fewer"],
        reach=greedy["centroid_reach"],
        error=figures["one_query_error"],
        question=figures["question"],
        answer="\n".join(f"> {line}".rstrip() for line in figures["answer"].split("\n")),
        packages=table(["package", "version", "licence"], [[p.name, p.version, p.licence] for p in PACKAGES]),
        samples="\n\n".join(f"```python\n{sample}\n```" for sample in figures["samples"]),
        **figures["corpus"],
    )
    (directory / "README.md").write_text(text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose first column is words and whose others are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def layout_table(directory: Path, target: dict[str, Any], drafter: dict[str, Any]) -> str:
    """Both configurations side by side."""
    rows = [[words, str(target[key]), str(drafter[key] or "-")] for words, key in LAYOUT]
    counts = [f"{parameters(directory / name) / 1e6:.2f} M" for name in ("target", "drafter")]
    return table(["", "target", "drafter"], [["parameters", *counts], *rows])


def parameters(checkpoint: Path) -> int:
    """Number of trained parameters in a checkpoint, without its integer tables."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.offset_keys() if "token_ordering" not in name]
    return sum(prod(shape) for shape in shapes)


def training_table(training: dict[str, dict[str, Any]]) -> str:
    """Tokens, core hours, loss and hardware of each training."""
    rows = [
        [name, f"{run['tokens'] / 1e6:.1f} M", f"{run['core_hours']:.1f}", f"{run['loss']:.3f}", run["hardware"]]
        for name, run in training.items()
    ]
    return table(["", "tokens seen", "core hours", "final training loss", "hardware"], rows)


def acceptance_table(kinds: list[dict[str, Any]]) -> str:
    """Shares by draft position: rounds that reach it, and drafts accepted once it is reached.

    kinds : figures of greedy text, of sampled text, and of sampled text with coupled drafts
    """
    names = "greedy text", "sampled", "coupled"
    header = ["draft position", *(f"{name}: {share}" for name in names for share in ("accepted", "once reached"))]
    shares = [kind[share] for kind in kinds for share in ("accepted_up_to", "accepted_if_reached")]
    rows = [
        [str(place), *(f"{share:.1%}" for share in at_place)]
        for place, at_place in enumerate(zip(*shares, strict=True), start=1)
    ]
    rows.append(["tokens per round", *(cell for kind in kinds for cell in (f"**{kind['tokens_per_round']:.2f}**", ""))])
    return table(header, rows)
