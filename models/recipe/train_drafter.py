"""Train a drafter for a dense decoder with full attention:

    python models/recipe/train_drafter.py --target FILE.gguf --out DIR

The target writes replies to prompts, which are kept on disk with its states, and the drafter learns from these. The
command can be killed at any time and run again; with more `--replies` or `--tokens` it continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafters.drafter_card import write_card
from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lesson, Lessons
from drafters.replies import (
    HELD_OUT_TOKENS,
    EngineWriter,
    are_answered,
    held_out,
    write_held_out,
    write_replies,
)
from drafters.replies_on_device import DeviceWriter, write_replies_on_device
from drafters.rounds import MEASURED_STEPS, ROUNDS, Order, make_blocks, measure, places_of, rounds_of
from drafters.target_drafter import (
    TargetDrafter,
    drafter_config,
    save_drafter,
    start_from_drafter,
    start_from_target,
)
from torch import Tensor
from torch.nn import functional
from training import workers
from training.distillation import acceptance, both, cross_entropy, frozen_gradients, soft_loss
from training.precision import PRODUCTS
from training.run import Run, hardware, other_options, spent_budget

from benchmarks.command import run_command, whole
from ondevice.bundle import Bundle, sha256
from ondevice_export import export as export_bundle
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.models import open_checkpoint
from ondevice_export.checkpoint.source import locate
from ondevice_export.families import read_target
from ondevice_export.gguf.checkpoint import GgufCheckpoint

MODELS = Path(__file__).resolve().parent.parent
STEP_DISCOUNT = 0.85  # a later step counts less: it is reached less often
STATE_SHARE = 0.2  # weight of the distance to the target's next state
ALWAYS = 1024  # most frequent tokens, which every forward's loss compares
SAMPLE = 400  # conversations from which the drafter is initialised
MEASURED, DESCRIBED = 48, 256  # held-out replies, while it trains and in the card
LOSSES = {"kl": cross_entropy, "lk": acceptance, "both": both}


@dataclass(frozen=True)
class Pace:
    """Sizes that suit a device.

    update, forward : blocks of ROUNDS rounds of an update, and of these of a forward
    steps : draft steps of a round. On two cores of an AMD EPYC 1,500 rounds/s have two and 1,000 have three; on two of
        an Intel Xeon with AMX 3,400 have two
    sampled : tokens of the head that a forward's loss compares
    peak : of the learning rates. On a CPU SmolLM2's drafter had, after 400,000 rounds, 1.645 tokens a round at
        temperature 0 and 1.506 at 1 with 0.07, 1.640 and 1.493 with 0.15, 1.601 and 1.473 with 0.3, 1.621 and 1.502
        with 0.035; after 1.2 million 1.785 and 1.538 with 0.07, 1.770 and 1.538 with 0.15
    further : the same for a drafter that is trained already. In 150,000 rounds on a CPU SmolLM2's lost 0.07 tokens a
        round at 0.15, on greedy replies to given prompts, and none at 0.02; in 6.9 million at 0.05 it gained 0.02, and
        0.04 at temperature 1
    """

    update: int
    forward: int
    steps: int
    sampled: int
    peak: float
    further: float

    @property
    def parts(self) -> int:
        """Forwards of an update: processes share them, and each must have one."""
        return self.update // self.forward


PACES = {"cpu": Pace(4, 1, 2, 3072, 0.07, 0.05), "cuda": Pace(32, 32, 3, 16_384, 0.3, 0.06)}
SHAPE = {"width": "hidden_size", "layers": "num_hidden_layers", "mlp": "intermediate_size"}
"""Options of a drafter's shape, and their names in its configuration."""
SHOW_SECONDS, SHOW_SHARE = 60, 0.05  # time between two lines with figures, and most of it that they may take


class DrafterRun(Run):
    """Distillation from the target's kept states."""

    def __init__(
        self,
        args: argparse.Namespace,
        target: FrozenTarget,
        drafter: TargetDrafter,
        lessons: Lessons,
        head_tokens: Tensor,
    ) -> None:
        work, self.pace = args.work, PACES[args.device.type]
        self.step_tokens = self.pace.update * ROUNDS
        self.peak = self.pace.peak if args.start is None else self.pace.further
        self.args, self.target, self.lessons = args, target, lessons
        self.trained, self.held_out = lessons.split()
        self.order = Order(lessons.lengths, self.trained)
        self.head_tokens = head_tokens
        self.head = target.projection[head_tokens].to(PRODUCTS)
        self.place_of = places_of(head_tokens, len(target.projection))
        self.frequent = torch.from_numpy(np.load(work / f"{args.run}-frequent.npy")[:ALWAYS]).to(args.device)
        self.gradients = partial(frozen_gradients, cap=target.cap, distance=LOSSES[args.loss])
        self.next_line = 0.0
        super().__init__(drafter, work / f"{args.run}.pt", spent_budget(work / f"{args.run}.pt", args.tokens))

    def accumulate(self) -> float:
        """Gradients of one step, some blocks at a time."""
        total, pace = torch.zeros((), device=self.args.device), self.pace
        for part in range(workers.rank(), pace.parts, workers.count()):
            first = self.step * pace.update + part * pace.forward
            loss = self.loss(range(first, first + pace.forward)) / pace.parts
            loss.backward()
            total += loss.detach()
        return total.item()

    def loss(self, numbers: range) -> Tensor:
        """Weighted mean over the steps of the rounds of some blocks."""
        rows = [[self.lessons[index] for index in self.order.block(number)] for number in numbers]
        random = [np.random.default_rng([1, number]) for number in numbers]
        steps = range(1, self.pace.steps + 1)
        possible = [draws.permutation(rounds_of(row, steps[-1])) for draws, row in zip(random, rows, strict=True)]
        rounds = torch.from_numpy(np.stack([np.sort(np.resize(places, ROUNDS)) for places in possible]))
        blocks = make_blocks(rows, self.target, rounds, PRODUCTS)
        following = torch.stack([blocks.tokens_after(step + 1) for step in steps])
        chosen, bias = self.chosen(following, random[0])
        gradients = partial(self.gradients, bias=bias)
        head, mask = self.head[chosen], blocks.mask(PRODUCTS)
        states, total, weights = blocks.hidden_after(0), torch.zeros((), device=self.args.device), 0.0
        for step in steps:
            wanted_state = blocks.hidden_after(step).flatten(0, 1)
            with torch.no_grad():
                wanted = self.likely(wanted_state, head, bias)
            with torch.autocast(states.device.type, PRODUCTS, enabled=torch.float32 != PRODUCTS):
                embedded = self.target.embed(blocks.tokens_after(step))
                states = self.model(embedded, states, blocks.cache, mask, blocks.positions)
            found = states.flatten(0, 1)
            loss = soft_loss(gradients, found, head, wanted)
            scale = self.model.output_scale
            apart = functional.smooth_l1_loss(found.float() / scale, wanted_state.float() / scale)
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
        """The tokens that a forward's loss compares, as places in the head's list, int64[S], and the number to add to
        the logit of each, float32[S].

        The tokens are the next ones of the forward's rounds, the most frequent ones, and a random sample of the others,
        whose added number makes each stand for several.
        """
        count, device = len(self.head_tokens), self.args.device
        if count <= self.pace.sampled:
            return torch.arange(count, device=device), torch.zeros(count, device=device)
        places = self.place_of[following.flatten()]
        first = torch.cat([places[places >= 0], self.frequent]).unique()
        others = np.setdiff1d(random.permutation(count), first.cpu().numpy(), assume_unique=True)
        some = torch.from_numpy(others[: max(1, self.pace.sampled - len(first))]).to(device)
        stands_for = torch.full((len(some),), len(others) / len(some), device=device)
        return torch.cat([first, some]), torch.cat([torch.ones(len(first), device=device), stands_for]).log()

    def update(self) -> float:
        """One step, and from time to time a line with the tokens of a round on held-out replies."""
        loss = super().update()
        if workers.rank() == 0 and (started := time.monotonic()) >= self.next_line:
            self.show(loss)
            ended = time.monotonic()
            self.next_line = ended + max(SHOW_SECONDS, (ended - started) / SHOW_SHARE)
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
    parser.add_argument(
        "--replies", type=whole(1), default=2_000_000, help="tokens that the target writes to learn from"
    )
    parser.add_argument(
        "--first", type=whole(0), default=0, help="number of the first message: with --start, one beyond its"
    )
    parser.add_argument(
        "--tokens", type=whole(1), default=8_000_000, help="rounds to train on, most of them several times"
    )
    parser.add_argument("--head-tokens", type=whole(1), default=8192, help="frequent tokens that the drafter scores")
    parser.add_argument("--width", type=whole(1), help="of the drafter (default: that of --start, or the target's)")
    parser.add_argument("--layers", type=whole(1), help="default: those of --start, or 1")
    parser.add_argument(
        "--mlp", type=whole(1), help="units of the feed-forward blocks (default: those of --start, or the target's)"
    )
    parser.add_argument("--start", type=Path, help="a drafter to begin with (default: the target's last layers)")
    parser.add_argument("--loss", choices=list(LOSSES), default="lk")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="JSON lines of prompts to measure on")
    parser.add_argument("--licence", help="of the target and so of the drafter, for the card")
    parser.add_argument(
        "--device",
        choices=list(PACES),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda if there is one",
    )
    parser.add_argument("--run", default="drafter", help="name of the saved run in --work")
    parser.add_argument(
        "--work", type=Path, default=MODELS / ".work" / "target-drafter", help="replies, states and runs of one target"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is none here that PyTorch can use")
    if args.start is not None:
        if not (args.start / "model.safetensors").is_file():
            parser.error(f"--start {args.start} is not a drafter: it has no model.safetensors")
        shape = read_json(args.start / "config.json")["text_config"]
        for name, field in SHAPE.items():
            if getattr(args, name) not in (None, shape[field]):
                parser.error(f"--{name} {getattr(args, name)}: --start {args.start} has {shape[field]}")
            setattr(args, name, shape[field])
    if others := other_options(args.work / f"{args.run}.json", begun_with(args)):
        parser.error(f"the run {args.run} in {args.work} began with {others}: give another --run and another --out")
    args.device = torch.device(args.device)
    return args


def begun_with(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a run keeps from its beginning to its end."""
    start = None if args.start is None else str(args.start.resolve())
    kept = {"width": args.width, "layers": args.layers, "mlp": args.mlp, "head-tokens": args.head_tokens}
    return kept | {"loss": args.loss, "start": start}


def main() -> None:
    """Run every stage that is not finished."""
    args = parse_args()
    prepare(args)
    count = min(os.cpu_count() or 1, PACES[args.device.type].parts)
    workers.launch(train, count, args.work / "store", args)


def prepare(args: argparse.Namespace) -> None:
    """Write the lessons to learn from, and those of given prompts. The target's memory is free again afterwards: the
    training opens the target anew.

    Raises:
        SystemExit: the target's layers are not such as a drafter begins with, the directory of the work is that of
            another target, or has replies to other given prompts; or there are too few replies.
    """
    refuse_other_layers(args.target)
    args.work.mkdir(parents=True, exist_ok=True)
    bundle, given, known = args.work / "bundle", args.work / "held-out", args.work / "target.sha256"
    found = digest(locate(str(args.target)).path)
    if not known.exists():
        known.write_text(found)
    elif known.read_text() != found:
        raise SystemExit(f"{args.work} has the replies of another target: name another --work for {args.target}")
    if not bundle.exists():
        export_bundle(args.target, bundle, drafter="none", heads="none")
    messages = held_out(args.held_out)
    if given.exists():
        if messages and not are_answered(given, messages):
            raise SystemExit(f"{given} has replies to other prompts than those of --held-out: name another --work")
        messages = []
    if args.device.type == "cpu":
        write_replies(bundle, args.work, args.replies, args.first)
        if messages:
            write_held_out(EngineWriter(bundle, HELD_OUT_TOKENS).lessons(iter(messages)), messages, given)
    else:
        writer = DeviceWriter.open(load_target(args.target, args.device), Bundle.open(bundle))
        write_replies_on_device(writer, args.work, args.replies, args.first)
        if messages:
            torch.manual_seed(0)
            write_held_out(writer.lessons(messages, HELD_OUT_TOKENS), messages, given)
    trained, kept_back = Lessons(args.work, torch.device("cpu")).split()
    if not trained or not kept_back:
        raise SystemExit("there are too few replies to train on some and measure on others: give a larger --replies")


def refuse_other_layers(target: Path) -> None:
    """Raise SystemExit unless a target has keys and values that a drafter can read, and no drafter of its own."""
    with open_checkpoint(locate(str(target)), tokenizer=False) as (_, checkpoint):
        form = read_target(checkpoint.config, checkpoint.origin).target
    if form.states:
        raise SystemExit(f"{target} has states in place of attention: such models have an MTP layer of their own")
    if form.last_kv_layer("full") is None:
        raise SystemExit(f"{target} has no layer with full attention, whose keys and values a drafter reads")


def digest(target: Path) -> str:
    """The sha256 of a GGUF model, or of a checkpoint's configuration, tokenizer and weights: names may be alike."""
    if target.is_file():
        with GgufCheckpoint(target) as checkpoint:
            return checkpoint.sha256()
    kinds = {".json", ".jinja", ".safetensors"}
    hashes = [sha256(path) for path in sorted(target.iterdir()) if path.suffix in kinds]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def load_target(path: Path, device: torch.device) -> FrozenTarget:
    """The whole target of a GGUF file or a checkpoint's directory."""
    return FrozenTarget.load_gguf(path, device) if path.is_file() else FrozenTarget.load(path, path.name, device)


def count_tokens(lessons: Lessons, vocabulary: int) -> Tensor:
    """int64[V]: all tokens, the most frequent of the lessons to learn from first."""
    counts = np.zeros(vocabulary, np.int64)
    for index in lessons.split()[0]:
        counts += np.bincount(lessons[index].tokens.cpu(), minlength=vocabulary)
    return torch.from_numpy(np.argsort(-counts, kind="stable"))


def mlp_units(target: FrozenTarget) -> int:
    """The units of the feed-forward block that a drafter's begins with; of a mixture those that a token uses."""
    feed = target.form.layers[target.source].feed_forward
    return feed.width if feed.experts is None else feed.width + feed.experts.top * feed.experts.intermediate_size


def train(args: argparse.Namespace) -> None:
    """Train in this process, together with the other ones."""
    target = FrozenTarget.read(args.target, args.device)
    lessons = Lessons(args.work, args.device)
    kept = args.work / f"{args.run}-head.npy"
    if not kept.exists() and workers.rank() == 0:
        ranked = count_tokens(lessons, len(target.projection)).numpy()
        chosen = np.sort(ranked[: args.head_tokens])
        np.save(args.work / f"{args.run}-frequent.npy", np.searchsorted(chosen, ranked[: args.head_tokens]))
        np.save(kept, chosen)
        (args.work / f"{args.run}.json").write_text(json.dumps(begun_with(args)))
    workers.total(0.0)  # wait for it
    shape = {
        "width": args.width or target.form.hidden_size,
        "layers": args.layers or 1,
        "mlp": args.mlp or mlp_units(target),
    }
    torch.manual_seed(0)
    drafter = TargetDrafter(drafter_config(target, **shape), target.rotation()).to(args.device)
    if not (args.work / f"{args.run}.pt").exists():
        start_from_target(drafter, target, [lessons[index] for index in lessons.split()[0][:SAMPLE]])
        if args.start is not None:
            start_from_drafter(drafter, args.start)
    run = DrafterRun(args, target, drafter, lessons, torch.from_numpy(np.load(kept)).to(args.device))
    run.train()
    if workers.rank() == 0:
        describe(run, args)


def describe(run: DrafterRun, args: argparse.Namespace) -> None:
    """Write `figures.json` and the card."""
    run.model.eval()
    given = Lessons(args.work / "held-out", args.device)
    facts, lengths = run.lessons.facts, run.lessons.lengths
    figures = {
        "licence": args.licence,
        "training": {
            "replies": len(facts),
            "reply_tokens": sum(length - fact[3] for fact, length in zip(facts, lengths, strict=True)),
            "own": float(np.mean([fact[1] == "own" for fact in facts])),
            "held_out": len(run.held_out),
            "rounds": run.budget.spent_tokens,
            "steps": run.pace.steps,
            "drafts": MEASURED_STEPS,
            "core_minutes": run.budget.core_seconds / 60,
            "hardware": hardware(args.device),
            "loss": args.loss,
            "start": "the target's last" if args.start is None else f"those of {args.start.name}",
        },
        "curve": [json.loads(line) for line in run.file.with_suffix(".curve").read_text().splitlines()],
        "learnt": run.figures(run.trained[:DESCRIBED]),
        "replies": run.figures(run.held_out[:DESCRIBED]),
        "prompts": run.figures_of(given[index] for index in range(len(given))),
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_acceptance(args.out, figures["prompts"] or figures["replies"])
    write_card(args.out)


def write_acceptance(directory: Path, measured: dict[str, Any]) -> None:
    """Write the share of first drafts that the target accepts into the drafter's `config.json`, where an export finds
    what to expect of it: the mean of temperatures 0 and 1.
    """
    file = directory / "config.json"
    config = json.loads(file.read_text())
    accepted = float(np.mean([kinds["all"]["accepted"][0] for kinds in measured.values()]))
    config["acceptance"] = max(round(accepted, 2), 0.01)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    run_command(main)
