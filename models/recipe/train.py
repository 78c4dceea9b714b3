"""Train the reference pair: `python models/recipe/train.py --out models/reference`. Can be stopped and resumed at any
time.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import evaluate, load_pair
from pair.card import write_card
from pair.checkpoint import earlier, keep_start, save_drafter, save_target
from pair.drafter import PairDrafterRun, new_drafter
from pair.owntext import write_own_text
from pair.repetition import RAW_TEXT, UnlikelihoodRun
from pair.target import target_after_corpus, target_run, trained_target
from text.corpus import HELD_OUT_PERCENT, PACKAGE_BYTES
from text.dataset import CHAT_SHARE, LIBRARY_REPEATS, LIBRARY_TEST_REPEATS, prepare
from text.tokenizer import save_tokenizer
from tokenizers import Tokenizer
from training.run import hardware, spent_budget
from training.workers import launch

from benchmarks.command import run_command, whole

MODELS = Path(__file__).resolve().parent.parent
RUNS = {"target": target_run, "unlikelihood": UnlikelihoodRun, "drafter": PairDrafterRun}
UNLIKELIHOOD_TOKENS = 330_000  # of the corpus, and as many of the target's own text
STAGES = ("data", "target", "raw-text", "unlikelihood", "own-text", "drafter", "card")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODELS / "reference", help="where the pair and its card go")
    parser.add_argument("--work", type=Path, default=MODELS / ".work", help="token streams and resumable states")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    parser.add_argument("--begin-from", type=Path, help="a pair whose training goes on, in place of new weights")
    parser.add_argument("--tokens", type=whole(1), default=150_000_000, help="tokens to train the target on")
    parser.add_argument("--drafter-tokens", type=whole(1), default=10_000_000, help="tokens to train the drafter on")
    parser.add_argument(
        "--own-batches", type=whole(1), default=8, help="batches of 128 texts that the target writes, twice"
    )
    parser.add_argument(
        "--finish", choices=list(RUNS), help="only tell a run to let its learning rate fall now, and end"
    )
    return parser.parse_args()


def main() -> None:
    """Run every stage that is not finished."""
    args = parse_args()
    if args.finish:
        (args.work / f"{args.finish}.finish").touch()
        return
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES[: STAGES.index(args.until) + 1]:
        run_stage(stage, args, torch.device(name))


def run_stage(stage: str, args: argparse.Namespace, device: torch.device) -> None:
    """Run one stage; a finished one returns at once."""
    processes = 1 if device.type == "cuda" else min(4, os.cpu_count() or 1)
    if stage == "data":
        if args.begin_from:
            keep_start(args.begin_from, args.work)
        prepare(args.work)
    elif stage == "raw-text":
        write_own_text(target_after_corpus(args.work), args.work, args.work / RAW_TEXT, args.own_batches, device)
    elif stage == "own-text":
        write_own_text(trained_target(args.work), args.work, args.work / "own.npy", args.own_batches, device)
    elif stage == "card":
        export(args.work, args.out)
        describe(args.work, args.out, device)
    else:
        tokens = {"target": args.tokens, "unlikelihood": UNLIKELIHOOD_TOKENS, "drafter": args.drafter_tokens}[stage]
        if spent_budget(state(args.work, stage), tokens).progress < 1:
            launch(train, processes, args.work / "store", stage, args.work, device, tokens)


def state(work: Path, stage: str) -> Path:
    """The file of a run's state."""
    return work / f"{stage}.pt"


def train(stage: str, work: Path, device: torch.device, tokens: int) -> None:
    """Train in this process, together with the others if there are several."""
    RUNS[stage](work, device, spent_budget(state(work, stage), tokens)).train()


def export(work: Path, out: Path) -> None:
    """Write both checkpoints in bfloat16, with the tokenizer in the target's directory."""
    target = trained_target(work)
    drafter = new_drafter(target)
    drafter.load_state_dict(torch.load(state(work, "drafter"), weights_only=True, map_location="cpu")["model"])
    save_drafter(drafter, out / "drafter")
    save_target(target, out / "target")
    save_tokenizer(Tokenizer.from_file(str(work / "tokenizer.json")), out / "target")


def describe(work: Path, out: Path, device: torch.device) -> None:
    """Measure the exported pair; write `figures.json` and the card."""
    figures = evaluate(load_pair(out), np.load(work / "held_out.npy"))
    figures["training"] = {stage: training(work, stage, device) for stage in RUNS}
    figures["corpus"] = {
        "python": platform.python_version(),
        "chat_percent": round(100 * CHAT_SHARE),
        "held_out_percent": HELD_OUT_PERCENT,
        "package_mb": PACKAGE_BYTES // 10**6,
        "library_repeats": LIBRARY_REPEATS,
        "test_repeats": LIBRARY_TEST_REPEATS,
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    write_card(out)


def training(work: Path, stage: str, device: torch.device) -> dict[str, Any]:
    """Tokens and core hours of a finished run, including those it was continued from, and the mean loss of its last
    hundred steps.
    """
    run, before = torch.load(state(work, stage), weights_only=True, map_location="cpu"), earlier(work, stage)
    return {
        "tokens": before["tokens"] + run["budget"]["spent_tokens"],
        "core_hours": before["core_hours"] + run["budget"]["core_seconds"] / 3600,
        "loss": float(np.mean(run["losses"][-100:])),
        "hardware": hardware(device),
    }


if __name__ == "__main__":
    run_command(main)
