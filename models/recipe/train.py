"""Makes the reference pair: `python models/recipe/train.py --out models/reference`. Stop and repeat it at will."""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import write_card
from checkpoint import save_drafter, save_target
from corpus import HELD_OUT_PERCENT
from dataset import CHAT_SHARE, prepare
from drafter import DrafterRun, new_drafter
from evaluate import evaluate, load_pair
from owntext import write_own_text
from run import finished
from schedule import Budget
from target import TargetRun, trained_target
from tokenizer import save_tokenizer
from tokenizers import Tokenizer
from workers import launch

MODELS = Path(__file__).resolve().parent.parent


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODELS / "reference", help="where the pair and its card go")
    parser.add_argument("--work", type=Path, default=MODELS / ".work", help="token streams and resumable states")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens to train the target on")
    parser.add_argument("--minutes", type=float, default=75, help="end the target's training after this time")
    parser.add_argument("--drafter-tokens", type=int, default=6_000_000, help="tokens to train the drafter on")
    parser.add_argument("--drafter-minutes", type=float, default=30, help="end the drafter's training after this time")
    parser.add_argument("--own-batches", type=int, default=3, help="batches of 128 texts that the target writes")
    return parser.parse_args()


def main() -> None:
    """Run every stage that is not done yet."""
    args = parse_args()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    device = torch.device(name)
    processes = 1 if device.type == "cuda" else min(4, os.cpu_count() or 1)
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.work)
    budget = Budget(args.tokens, args.minutes)
    if not finished(args.work / "target.pt", budget):
        launch(train_target, processes, args.work / "meeting", args.work, device, budget)
    write_own_text(trained_target(args.work), args.work, args.own_batches, device)
    budget = Budget(args.drafter_tokens, args.drafter_minutes)
    if not finished(args.work / "drafter.pt", budget):
        launch(train_drafter, processes, args.work / "meeting", args.work, device, budget)
    export(args.work, args.out)
    figures = evaluate(load_pair(args.out), np.load(args.work / "held_out.npy"))
    figures["training"] = {name: training(args.work / f"{name}.pt", device) for name in ("target", "drafter")}
    figures["corpus"] = {
        "python": platform.python_version(),
        "chat_percent": round(100 * CHAT_SHARE),
        "held_out_percent": HELD_OUT_PERCENT,
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    write_card(args.out)


def train_target(work: Path, device: torch.device, budget: Budget) -> None:
    """Train the target in this process, with others where there are several."""
    TargetRun(work, device, budget).train()


def train_drafter(work: Path, device: torch.device, budget: Budget) -> None:
    """Train the drafter likewise."""
    DrafterRun(work, device, budget).train()


def export(work: Path, out: Path) -> None:
    """Write both checkpoints, bfloat16, with the tokenizer beside the target."""
    target = trained_target(work)
    drafter = new_drafter(target)
    drafter.load_state_dict(torch.load(work / "drafter.pt", weights_only=True, map_location="cpu")["model"])
    save_drafter(drafter, out / "drafter")
    save_target(target, out / "target")
    save_tokenizer(Tokenizer.from_file(str(work / "tokenizer.json")), out / "target")


def training(state: Path, device: torch.device) -> dict[str, Any]:
    """What a finished run has spent, and the mean loss of its last hundred steps."""
    run = torch.load(state, weights_only=True, map_location="cpu")
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {
        "tokens": run["budget"]["spent_tokens"],
        "minutes": run["budget"]["spent_seconds"] / 60,
        "loss": float(np.mean(run["losses"][-100:])),
        "hardware": hardware,
    }


if __name__ == "__main__":
    main()
