"""Train a draft model for any Gemma 4 checkpoint: `python models/recipe/train_draft_model.py --target DIR --out DIR`.

It can be stopped and resumed at any time. Export it for `ondevice generate --drafter`.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from drafters.draft_model import OWN, TEXT, draft_model_run, trained_draft_model
from drafters.frozen_target import FrozenTarget
from drafters.states import LENGTH, text_stream, write_own
from pair.card import parameters, table
from pair.checkpoint import save
from training.run import hardware, keep_options, spent_budget
from training.workers import launch
from transformers import AutoConfig, Gemma4ForCausalLM, Gemma4TextConfig

from benchmarks.command import run_command, whole

MODELS = Path(__file__).resolve().parent.parent
HELD_OUT = 16  # blocks of the target's own text that are never trained on
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # files of a checkpoint

CARD = """\
---
tags: [gemma4, speculative-decoding]
---
# A draft model for {name}

A `Gemma4ForCausalLM` with the tokens of `{name}`, which drafts for it and reads the text itself: `ondevice export` it,
then `ondevice generate BUNDLE --drafter ITS_BUNDLE`. `models/recipe/train_draft_model.py` trained it, alternately on
the target's training text and on text that the target generated. Its licence is the target's.

{figures}
"""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=MODELS / "reference" / "target", help="a checkpoint's directory")
    parser.add_argument("--out", type=Path, default=MODELS / "reference" / "draft-model", help="where the model goes")
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files of text to learn from (default: Python's standard library)"
    )
    parser.add_argument("--blocks", type=whole(1), default=512, help=f"of {LENGTH} tokens that the target writes")
    parser.add_argument("--tokens", type=whole(1), default=10_000_000, help="to train on")
    parser.add_argument("--work", type=Path, default=MODELS / ".work" / "draft-model", help="texts and the run's state")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Run every stage that is not finished."""
    args = parse_args()
    name = args.target.parent.name if args.target.name == "target" else args.target.name
    device = torch.device(args.device)
    target = FrozenTarget.load(args.target, name, device)
    work = args.work / f"{name}-{target.weights_sha256()[:12]}"
    work.mkdir(parents=True, exist_ok=True)
    text = [str(file.resolve()) for file in args.text or ()] or None
    keep_options(work, {"blocks": args.blocks, "text": text})
    held_out = write_streams(args, target, work)
    if spent_budget(work / "draft-model.pt", args.tokens).progress < 1:
        processes = 1 if args.device == "cuda" else min(4, os.cpu_count() or 1)
        launch(train, processes, work / "store", args.target, work, device, args.tokens)
    model = trained_draft_model(target.config, work)
    agreement = agreed(model.to(device), target, held_out)
    export(model.cpu(), target, args.target, args.out)
    describe(work, name, agreement, out=args.out, device=device)


def write_streams(args: argparse.Namespace, target: FrozenTarget, work: Path) -> npt.NDArray[np.uint32]:
    """Write both streams as files; returns held-out blocks of the target's text: uint32[HELD_OUT, LENGTH]."""
    if not (work / TEXT).exists():
        np.save(work / TEXT, text_stream(target, args.target, args.text or ()))
    written = work / "written.npy"
    write_own(target, args.target, np.load(work / TEXT), args.blocks + HELD_OUT, written)
    rows: npt.NDArray[np.uint32] = np.load(written)
    np.save(work / OWN, rows[:-HELD_OUT])
    return rows[-HELD_OUT:]


def train(target: Path, work: Path, device: torch.device, tokens: int) -> None:
    """Train in this process, together with the others if there are several."""
    config: Gemma4TextConfig = AutoConfig.from_pretrained(target).get_text_config()
    draft_model_run(config, work, device, spent_budget(work / "draft-model.pt", tokens)).train()


@torch.no_grad()
def agreed(model: Gemma4ForCausalLM, target: FrozenTarget, rows: npt.NDArray[np.uint32]) -> float:
    """Share of the positions of rows [B, T] at which both have the same likeliest token."""
    same = []
    for row in rows.astype(np.int64):
        ids = torch.from_numpy(row[None]).to(target.projection.device)
        wanted = target.logits(target.decoder(input_ids=ids, use_cache=False).last_hidden_state).argmax(dim=-1)
        same.append((model(input_ids=ids, use_cache=False).logits.argmax(dim=-1) == wanted).float().mean().item())
    return float(np.mean(same))


def export(model: Gemma4ForCausalLM, target: FrozenTarget, directory: Path, out: Path) -> None:
    """Write the checkpoint, with the target's tokenizer and sampling defaults."""
    model.generation_config = target.model.generation_config
    save(model, out)
    for name in COPIED:
        if (directory / name).exists():
            shutil.copyfile(directory / name, out / name)


def describe(work: Path, name: str, agreement: float, *, out: Path, device: torch.device) -> None:
    """Write `figures.json` and the card."""
    state: dict[str, Any] = torch.load(work / "draft-model.pt", weights_only=True, map_location="cpu")
    figures = {
        "parameters": parameters(out),
        "tokens": state["budget"]["spent_tokens"],
        "core_minutes": state["budget"]["core_seconds"] / 60,
        "loss": float(np.mean(state["losses"][-100:])),
        "agreement": agreement,
        "hardware": hardware(device),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    rows = [
        ["parameters", f"{figures['parameters'] / 1e6:.2f} M"],
        ["tokens seen", f"{figures['tokens'] / 1e6:.1f} M"],
        ["core minutes", f"{figures['core_minutes']:.0f}, {figures['hardware']}"],
        ["final training loss, nats per token", f"{figures['loss']:.3f}"],
        ["the target's likeliest token is its own, in text that the target wrote", f"{figures['agreement']:.1%}"],
    ]
    (out / "README.md").write_text(CARD.format(name=name, figures=table(["", ""], rows)))


if __name__ == "__main__":
    run_command(main)
