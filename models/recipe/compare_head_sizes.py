"""How many tokens should the head of a drafter score? As Markdown, for a drafter of `train_drafter.py`:

    python models/recipe/compare_head_sizes.py --target FILE.gguf --drafter DIR --work DIR [--sizes N...]

The drafter's layers stay as they are; its list is that of the most frequent tokens of the replies in `--work`. Tokens a
round and accepted drafts are those of the card, on the given prompts of `--held-out`. Then every drafter is exported
and run on this machine: rounds of one draft, eight of them in a call, take turns with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lesson, Lessons
from drafters.rounds import measure
from drafters.target_drafter import TargetDrafter, drafter_config, save_drafter, start_from_drafter
from pair.card import table
from torch import Tensor
from tqdm import tqdm
from train_drafter import count_tokens
from training.precision import PRODUCTS

from benchmarks.command import machine_lines, run_command, whole
from benchmarks.speed import multi_step
from ondevice.model import Model, load
from ondevice_export import export
from ondevice_export.checkpoint.source import locate

CPU = torch.device("cpu")
SIZES = (2048, 4096, 8192, 12288, 24576, 49152)
HEADER = ["head tokens", "of the replies", "T = 0: tokens a round", "accepted", "one draft, of plain"]
HEADER += ["T = 1: tokens a round", "accepted", "one draft, of plain"]
ONE_DRAFT, PLAIN = multi_step.DecodeSetting((1,), 8), multi_step.DecodeSetting((), 8)


def open_drafter(directory: Path, target: FrozenTarget) -> TargetDrafter:
    """A saved drafter of a target."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    shape = {"width": text["hidden_size"], "layers": text["num_hidden_layers"], "mlp": text["intermediate_size"]}
    drafter = TargetDrafter(drafter_config(target, **shape), target.rotation()).eval()
    start_from_drafter(drafter, directory)
    return drafter


def figures(
    drafter: TargetDrafter, target: FrozenTarget, lessons: Sequence[Lesson], head_tokens: Tensor
) -> dict[str, Any]:
    """Figures of `measure` by temperature, of all kinds, and `covered`, the share of the replies' tokens that the head
    scores.
    """
    head = target.projection[head_tokens].to(PRODUCTS)
    kinds = measure(drafter, target, lessons, head, head_tokens)
    found = {temperature: each["all"] for temperature, each in kinds.items()}
    replies = torch.cat([lesson.tokens[lesson.prompt :] for lesson in lessons])
    return found | {"covered": float(torch.isin(replies, head_tokens.to(replies.dtype)).float().mean())}


def speed_ups(models: Sequence[Model], repeats: int) -> list[dict[str, float]]:
    """Tokens per second with one draft in each round, as a multiple of plain decoding, by model and temperature."""
    ratios: list[dict[str, list[float]]] = [{"0": [], "1": []} for _ in models]
    turns = [(prompt, temperature) for prompt in multi_step.PROMPTS for temperature in ("0", "1")]
    for prompt, temperature in tqdm(turns * repeats, disable=None):
        for model, found in zip(models, ratios, strict=True):
            plain, drafted = (
                multi_step.measure(model, prompt, float(temperature), setting).tokens_per_s
                for setting in (PLAIN, ONE_DRAFT)
            )
            found[temperature].append(drafted / plain)
    return [{temperature: geometric_mean(each) for temperature, each in found.items()} for found in ratios]


def row(size: int, found: dict[str, Any], speed: dict[str, float]) -> list[str]:
    """A line of the table."""
    cells = [f"{size:,}", f"{found['covered']:.3f}"]
    for temperature in "01":
        own = found[temperature]
        cells += [f"{own['tokens']:.2f}", f"{own['accepted'][0]:.3f}", f"{speed[temperature]:.2f}"]
    return cells


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a GGUF file, or a checkpoint's directory")
    parser.add_argument("--drafter", type=Path, required=True, help="of train_drafter.py")
    parser.add_argument(
        "--work", type=Path, required=True, help="that of train_drafter.py, with replies to given prompts"
    )
    parser.add_argument("--sizes", type=whole(1), nargs="+", default=SIZES, metavar="N", help="tokens of the head")
    parser.add_argument("--replies", type=whole(1), default=64, metavar="N", help="replies to given prompts, at most")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="times that each prompt is run")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    args = parse_args()
    locate(str(args.target))  # a mistake is one line
    if not (args.drafter / "config.json").is_file():
        raise SystemExit(f"--drafter {args.drafter} is not a drafter: it has no config.json")
    if not list((args.work / "held-out").glob("replies-*.safetensors")):
        raise SystemExit(f"{args.work} has no replies to given prompts: name the --work of a training with --held-out")
    target = FrozenTarget.read(args.target, CPU)
    drafter, given = open_drafter(args.drafter, target), Lessons(args.work / "held-out", CPU)
    lessons = [given[index] for index in range(0, len(given), -(-len(given) // max(1, args.replies)))]
    ranked = count_tokens(Lessons(args.work, CPU), len(target.projection))
    sizes = sorted({min(size, len(ranked)) for size in args.sizes})
    with tempfile.TemporaryDirectory() as root:
        found = []
        for size in tqdm(sizes, disable=None):
            head_tokens = ranked[:size].sort().values
            found.append(figures(drafter, target, lessons, head_tokens))
            save_drafter(drafter, target, head_tokens, Path(root, f"drafter-{size}"))
            export(args.target, Path(root, str(size)), drafter=str(Path(root, f"drafter-{size}")))
        models = [load(Path(root, str(size))) for size in sizes]
        speeds = speed_ups(models, args.repeats)
        print(table(HEADER, [row(size, *each) for size, *each in zip(sizes, found, speeds, strict=True)]))
        print(f"\n{machine_lines(args.target.name, models[0].threads)}")
        for model in models:
            model.close()


if __name__ == "__main__":
    run_command(main)
