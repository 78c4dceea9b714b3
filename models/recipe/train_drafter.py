"""Train a drafter for any decoder with full attention:

    python models/recipe/train_drafter.py --target FILE.gguf --out DIR

The target writes replies to prompts, its states over them are kept on disk, and the drafter learns from these. The
command can be killed at any time and run again; with more `--replies` or `--tokens` it continues from there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafters.drafter_card import write_card
from drafters.lessons import Lesson, Lessons, write_lessons
from drafters.replies import write_held_out, write_replies
from drafters.rounds import MEASURED_STEPS, ROUNDS, STEPS, Order, make_block, measure, rounds_of
from drafters.states import FrozenTarget
from drafters.target_drafter import TargetDrafter, drafter_config, save_drafter, start_from_target
from torch import Tensor
from torch.nn import functional
from training import workers
from training.distillation import acceptance, both, cross_entropy, frozen_gradients, soft_loss
from training.precision import PRODUCTS
from training.run import Run, hardware, spent_budget

from ondevice_export import export as export_bundle

MODELS = Path(__file__).resolve().parent.parent
STEP_BLOCKS = 4
STEP_DISCOUNT = 0.85  # a later step counts less: it is reached less often
STATE_SHARE = 0.2  # weight of the distance to the target's next state
SAMPLED = 3072  # tokens of the head that a block's loss compares
ALWAYS = 1024  # of these, the most frequent ones
SAMPLE = 400  # conversations from which the drafter is initialised
MEASURED = 48  # held-out replies, while it trains
HELD_OUT_TOKENS = 128  # of a reply to a given prompt
LOSSES = {"kl": cross_entropy, "lk": acceptance, "both": both}


class DrafterRun(Run):
    """Distillation from the target's kept states."""

    step_tokens = STEP_BLOCKS * ROUNDS
    peak = 0.15  # at 0.6, layers that started as the target's were lost

    def __init__(
        self,
        args: argparse.Namespace,
        target: FrozenTarget,
        drafter: TargetDrafter,
        lessons: Lessons,
        head_tokens: Tensor,
    ) -> None:
        work = args.work
        self.args, self.target, self.lessons = args, target, lessons
        self.trained, self.held_out = lessons.split()
        self.order = Order(lessons.lengths, self.trained)
        self.head_tokens = head_tokens
        self.head = target.projection[head_tokens].to(PRODUCTS)
        self.rank_of = torch.full((len(target.projection),), -1).scatter_(
            0, head_tokens, torch.arange(len(head_tokens))
        )
        self.frequent = torch.from_numpy(np.load(work / f"{args.run}-frequent.npy")[:ALWAYS])
        self.gradients = partial(frozen_gradients, cap=target.cap, distance=LOSSES[args.loss])
        self.shown = time.monotonic() - 60
        super().__init__(drafter, work / f"{args.run}.pt", spent_budget(work / f"{args.run}.pt", args.tokens))

    def accumulate(self) -> float:
        """Gradients of one step, a block at a time."""
        total = 0.0
        for part in range(workers.rank(), STEP_BLOCKS, workers.count()):
            loss = self.loss(self.step * STEP_BLOCKS + part) / STEP_BLOCKS
            loss.backward()
            total += loss.item()
        return total

    def loss(self, number: int) -> Tensor:
        """Weighted mean over the steps of a block's rounds."""
        lessons = [self.lessons[index] for index in self.order.block(number)]
        random = np.random.default_rng([1, number])
        possible = rounds_of(lessons, STEPS)
        rounds = torch.from_numpy(np.sort(np.resize(random.permutation(possible), ROUNDS)))
        block = make_block(lessons, self.target, rounds, PRODUCTS)
        following = torch.stack([block.tokens[block.rounds + step + 1] for step in range(1, STEPS + 1)])
        chosen, bias = self.chosen(following, random)
        gradients = partial(self.gradients, bias=bias)
        head, mask = self.head[chosen], block.mask(PRODUCTS)
        table = self.target.model.get_input_embeddings()
        states, total, weights = block.hidden[block.rounds][None], torch.zeros(()), 0.0
        for step in range(1, STEPS + 1):
            wanted_state = block.hidden[block.rounds + step]
            with torch.no_grad():
                wanted = self.likely(wanted_state, head, bias)
            embeddings = table(block.tokens[block.rounds + step])[None]
            with torch.autocast(states.device.type, PRODUCTS, enabled=torch.float32 != PRODUCTS):
                states = self.model(embeddings, states, block.cache, mask, block.positions)
            loss = soft_loss(gradients, states[0], head, wanted)
            scale = self.model.output_scale
            apart = functional.smooth_l1_loss(states[0].float() / scale, wanted_state.float() / scale)
            total = total + STEP_DISCOUNT ** (step - 1) * (loss + STATE_SHARE * apart)
            weights += STEP_DISCOUNT ** (step - 1)
        return total / weights

    def likely(self, states: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        """The target's distribution among some of the tokens: PRODUCTS[R, S]."""
        logits = (states @ head.T).float()
        if self.target.cap is not None:
            logits = self.target.cap * torch.tanh(logits / self.target.cap)
        return (logits + bias).softmax(dim=-1).to(PRODUCTS)

    def chosen(self, following: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Places in the head's list, int64[S]: of a block's next tokens, of the most frequent ones, and of others by
        chance; and what is added to their logits, float32[S], so that the latter stand for all others.
        """
        places = self.rank_of[following.flatten()]
        first = torch.cat([places[places >= 0], self.frequent]).unique()
        others = np.setdiff1d(random.permutation(len(self.head_tokens)), first.numpy(), assume_unique=True)
        some = torch.from_numpy(others[: max(1, SAMPLED - len(first))])
        stands_for = torch.full((len(some),), len(others) / len(some))
        return torch.cat([first, some]), torch.cat([torch.ones(len(first)), stands_for]).log()

    def update(self) -> float:
        """One step, and every minute a line with the tokens of a round on held-out replies."""
        loss = super().update()
        if workers.rank() == 0 and time.monotonic() - self.shown >= 60:
            self.show(loss)
            self.shown = time.monotonic()
        return loss

    def show(self, loss: float) -> None:
        """Print a line, and append the figures to the file ending in `.curve`."""
        self.model.eval()
        found = self.figures(self.held_out[:MEASURED])
        self.model.train()
        parts = [f"{time.strftime('%H:%M:%S')} {self.budget.spent_tokens:,} rounds, loss {loss:.3f}"]
        for temperature, kinds in found.items():
            shares = " ".join(f"{share:.3f}" for share in kinds["all"]["accepted"])
            parts.append(f"T={temperature}: {kinds['all']['tokens']:.3f} tokens a round, accepted {shares}")
        print("; ".join(parts), flush=True)
        with self.file.with_suffix(".curve").open("a") as curve:
            kept = {
                temperature: {name: value for name, value in kinds["all"].items() if name != "each"}
                for temperature, kinds in found.items()
            }
            curve.write(json.dumps({"tokens": self.budget.spent_tokens, "figures": kept}) + "\n")

    def figures(self, indices: list[int]) -> dict[str, Any]:
        """The figures of `measure` on some lessons."""
        return self.figures_of(self.lessons[index] for index in indices)

    def figures_of(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """The figures of `measure`."""
        return measure(self.model, self.target, lessons, self.head, self.head_tokens)

    def save(self) -> None:
        super().save()
        save_drafter(self.model, self.target, self.head_tokens, self.args.out)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a GGUF file, or a checkpoint's directory")
    parser.add_argument("--out", type=Path, required=True, help="where the drafter goes")
    parser.add_argument("--replies", type=int, default=2_000_000, help="tokens that the target writes to learn from")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="rounds to train on, most of them several times")
    parser.add_argument("--head-tokens", type=int, default=8192, help="frequent tokens that the drafter scores")
    parser.add_argument("--width", type=int, help="of the drafter (default: the target's)")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--mlp", type=int, help="units of the feed-forward blocks (default: the target's)")
    parser.add_argument("--loss", choices=list(LOSSES), default="both")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="JSON lines of prompts to measure on")
    parser.add_argument("--licence", help="of the target and so of the drafter, for the card")
    parser.add_argument("--run", default="drafter", help="name of the saved run in --work")
    parser.add_argument("--work", type=Path, default=MODELS / ".work" / "target-drafter", help="replies, states, runs")
    return parser.parse_args()


def main() -> None:
    """Run every stage that is not finished."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bundle = args.work / "bundle"
    if not bundle.exists():
        export_bundle(args.target, bundle, drafter="none", heads="none")
    write_replies(bundle, args.work, args.replies)
    if args.held_out:
        write_held_out(bundle, args.held_out, args.work / "held-out" / "replies-0.jsonl", HELD_OUT_TOKENS)
    target = open_target(args.target)
    for directory in (args.work, args.work / "held-out"):
        write_lessons(target, sorted(directory.glob("replies-*.jsonl")))
    workers.launch(train, os.cpu_count() or 1, args.work / "meeting", args)


def open_target(path: Path) -> FrozenTarget:
    """The target of a GGUF file or a checkpoint's directory, on the CPU."""
    device = torch.device("cpu")
    return (
        FrozenTarget.load_gguf(path, device) if path.suffix == ".gguf" else FrozenTarget.load(path, path.name, device)
    )


def count_tokens(lessons: Lessons, vocabulary: int) -> Tensor:
    """int64[V]: all tokens, the most frequent of the lessons to learn from first."""
    counts = np.zeros(vocabulary, np.int64)
    for index in lessons.split()[0]:
        counts += np.bincount(lessons[index].tokens, minlength=vocabulary)
    return torch.from_numpy(np.argsort(-counts, kind="stable"))


def train(args: argparse.Namespace) -> None:
    """Train in this process, together with the other ones."""
    target = open_target(args.target)
    lessons = Lessons(args.work)
    config = target.config
    kept = args.work / f"{args.run}-head.npy"
    if not kept.exists() and workers.rank() == 0:
        ranked = count_tokens(lessons, len(target.projection)).numpy()
        chosen = np.sort(ranked[: args.head_tokens])
        np.save(args.work / f"{args.run}-frequent.npy", np.searchsorted(chosen, ranked[: args.head_tokens]))
        np.save(kept, chosen)
    workers.total(0.0)  # wait for it
    shape = {
        "width": args.width or config.hidden_size,
        "layers": args.layers,
        "mlp": args.mlp or config.intermediate_size,
    }
    torch.manual_seed(0)
    drafter = TargetDrafter(drafter_config(config, **shape))
    if not (args.work / f"{args.run}.pt").exists():
        start_from_target(drafter, target, [lessons[index] for index in lessons.split()[0][:SAMPLE]])
    run = DrafterRun(args, target, drafter, lessons, torch.from_numpy(np.load(kept)))
    run.train()
    if workers.rank() == 0:
        describe(run, args)


def describe(run: DrafterRun, args: argparse.Namespace) -> None:
    """Write `figures.json` and the card."""
    run.model.eval()
    given = Lessons(args.work / "held-out")
    facts, lengths = run.lessons.facts, run.lessons.lengths
    figures = {
        "licence": args.licence,
        "training": {
            "replies": len(facts),
            "reply_tokens": sum(length - fact[3] for fact, length in zip(facts, lengths, strict=True)),
            "own": float(np.mean([fact[1] == "own" for fact in facts])),
            "held_out": len(run.held_out),
            "rounds": run.budget.spent_tokens,
            "steps": STEPS,
            "drafts": MEASURED_STEPS,
            "core_minutes": run.budget.core_seconds / 60,
            "hardware": hardware(torch.device("cpu")),
            "loss": args.loss,
        },
        "curve": [json.loads(line) for line in run.file.with_suffix(".curve").read_text().splitlines()],
        "replies": run.figures(run.held_out),
        "prompts": run.figures_of(given[index] for index in range(len(given))),
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_card(args.out)


if __name__ == "__main__":
    main()
