"""Train heads for any Gemma 4 checkpoint: `python models/recipe/train_heads.py --target DIR --out DIR`.

It can be stopped and resumed at any time. Without a drafter next to the target, heads score the whole vocabulary.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from drafters.frozen_target import FrozenTarget
from drafters.heads import KINDS, Heads, Shape
from drafters.heads_card import write_card
from drafters.states import LENGTH, OWN_SHARE, text_stream, write_own, write_states
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from training.distillation import CENTROID_SHARE, Aim, aim, frozen_gradients, soft_loss
from training.precision import PRODUCTS
from training.run import Run, hardware, keep_options, spent_budget
from training.schedule import Budget

from benchmarks.command import run_command, whole

MODELS = Path(__file__).resolve().parent.parent
HELD_OUT = 16  # blocks that are never trained on
STEP_BLOCKS = 4
LOGITS = 1 << 23  # logits of the target held in memory at a time
DISCOUNT = 0.8  # a later offset counts less: it is reached less often
TOP = 4  # ranks in the card


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=MODELS / "reference" / "target", help="a checkpoint's directory")
    parser.add_argument("--out", type=Path, default=MODELS / "reference" / "heads", help="where the heads go")
    parser.add_argument("--name", help="of the target, to refuse another by (default: what its bundle is called)")
    parser.add_argument(
        "--drafter", type=Path, help="drafter whose clusters of tokens are used (default: drafter/ next to the target)"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files of text to begin from (default: Python's standard library)"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--offsets", type=whole(1), default=4, help="tokens that medusa and blockwise propose")
    parser.add_argument("--exit-layer", type=whole(0), help="default: the last with keys and values of its own")
    parser.add_argument("--blocks", type=whole(1), default=1024, help=f"of {LENGTH} tokens, to learn from")
    parser.add_argument("--tokens", type=whole(1), default=1_500_000, help="to train on, some of them several times")
    parser.add_argument("--work", type=Path, default=MODELS / ".work" / "heads", help="states and resumable runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Run every stage that is not finished."""
    args = parse_args()
    name = args.name or (args.target.parent.name if args.target.name == "target" else args.target.name)
    target = FrozenTarget.load(args.target, name, torch.device(args.device))
    layer = target.exit_layer if args.exit_layer is None else args.exit_layer
    work = args.work / f"{name}-{target.weights_sha256()[:12]}"
    work.mkdir(parents=True, exist_ok=True)
    text = [str(file.resolve()) for file in args.text or ()] or None
    drafter = args.drafter and str(args.drafter.resolve())
    shape_options = {"kinds": sorted(args.kinds), "offsets": args.offsets, "exit-layer": layer}
    keep_options(work, {**shape_options, "blocks": args.blocks, "text": text, "drafter": drafter})
    tokens = learnt_from(args, target, work)
    write_states(target, tokens, layer, work / "states.npy")
    hidden = target.config.hidden_size
    shape = Shape(hidden, args.offsets, 2 * hidden, layer)
    heads, top = new_heads(args, target, shape)
    shortlist = None if heads.centroids is None else {"clusters": len(heads.centroids.weight), "top": top}
    run = HeadsRun(heads, target, work, budget=spent_budget(work / "heads.pt", args.tokens), offsets=args.offsets)
    if run.budget.progress < 1:
        run.train()
    config = {
        "model_type": "ondevice_heads",
        "target": {
            "name": name,
            "hidden_size": hidden,
            "vocab_size": len(target.projection),
            "layers": target.config.num_hidden_layers,
            "weights_sha256": target.weights_sha256(),
        },
        "kinds": shape.config(args.kinds),
        "shortlist": shortlist,
    }
    save(heads, config, run, args.out)


def learnt_from(args: argparse.Namespace, target: FrozenTarget, work: Path) -> npt.NDArray[np.uint32]:
    """uint32[blocks, LENGTH]: blocks of the target's own text and of the given text, HELD_OUT of them at the end."""
    file = work / "tokens.npy"
    if file.exists():
        known: npt.NDArray[np.uint32] = np.load(file)
        return known
    stream = text_stream(target, args.target, args.text or ())
    own = round(OWN_SHARE * args.blocks)
    write_own(target, args.target, stream, own, work / "own.npy")
    random = np.random.default_rng(0)
    starts = random.integers(0, max(1, len(stream) - LENGTH), args.blocks - own)
    rows = np.concatenate(
        [np.load(work / "own.npy"), np.stack([np.resize(stream[s : s + LENGTH], LENGTH) for s in starts])]
    )
    rows = rows[random.permutation(len(rows))]
    np.save(file, rows)
    return rows


def new_heads(args: argparse.Namespace, target: FrozenTarget, shape: Shape) -> tuple[Heads, int]:
    """Untrained heads, and the number of clusters that they score, 0 for the whole vocabulary."""
    drafter = args.drafter or args.target.parent / "drafter"
    ordering, count, top = None, 0, 0
    config = json.loads((drafter / "config.json").read_text()) if (drafter / "config.json").is_file() else {}
    if config.get("use_ordered_embeddings"):
        count, top = config["num_centroids"], config["centroid_intermediate_top_k"]
        with safe_open(drafter / "model.safetensors", framework="pt") as tensors:
            ordering = tensors.get_tensor("masked_embedding.token_ordering")
    torch.manual_seed(0)
    final_norm, projection = target.decoder.norm.weight.float().cpu(), target.projection.float().cpu()
    return Heads(args.kinds, shape, final_norm, projection, ordering=ordering, count=count), top


@dataclass(frozen=True)
class HeadStates:
    """The states of a head at some rows.

    kind, place : of the head; place 0 is its first token
    states : [N, H], before the projection
    ahead : number of rows until the target predicts the same token
    """

    kind: str
    place: int
    states: Tensor
    ahead: int


class HeadsRun(Run):
    """Distillation from the frozen target's states."""

    step_tokens = STEP_BLOCKS * LENGTH

    def __init__(self, heads: Heads, target: FrozenTarget, work: Path, *, budget: Budget, offsets: int) -> None:
        self.states = np.load(work / "states.npy", mmap_mode="r")
        self.target = target
        self.taught: Any = heads
        self.offsets = 0 if list(heads.heads) == ["exit"] else offsets
        device = target.projection.device
        self.ordering = None if heads.ordering is None else heads.ordering.to(device)
        self.projection = target.projection.to(PRODUCTS)
        self.aim = torch.compile(aim, dynamic=False)
        self.gradients = torch.compile(partial(frozen_gradients, cap=target.cap), dynamic=False)
        super().__init__(heads.to(target.projection.device), work / "heads.pt", budget)

    def accumulate(self) -> float:
        """Gradients of one step, some rows at a time."""
        count = self.states.shape[1] - HELD_OUT
        epoch, place = divmod(self.step * STEP_BLOCKS, count)
        order = np.random.default_rng([0, epoch]).permutation(count)
        most = max(8, LOGITS // len(self.target.projection))
        usable = LENGTH - self.offsets
        total = 0.0
        for block in np.take(order, range(place, place + STEP_BLOCKS), mode="wrap"):
            for first in range(0, usable, most):
                rows = min(most, usable - first)
                loss = self.loss(int(block), first, rows) * (rows / usable / STEP_BLOCKS)
                loss.backward()
                total += loss.item()
        return total

    def lessons(self, block: int, first: int, rows: int) -> tuple[list[HeadStates], Tensor]:
        """The lessons of every kind and place, and the target's logits of these rows and the following ones."""
        device = self.target.projection.device
        last, lower = (
            torch.from_numpy(np.array(self.states[place, block, first : first + rows + self.offsets]))
            .to(device)
            .float()
            for place in (0, 1)
        )
        with torch.no_grad():
            teacher = self.target.logits(last)
        found = []
        for kind, head in self.taught.heads.items():
            ahead = 0 if kind == "exit" else 1
            with torch.autocast(device.type, PRODUCTS, enabled=torch.float32 != PRODUCTS):
                proposed = head((lower if kind == "exit" else last)[:rows])
            found += [HeadStates(kind, place, states, place + ahead) for place, states in enumerate(proposed)]
        return found, teacher

    def loss(self, block: int, first: int, rows: int) -> Tensor:
        """Weighted mean over kinds and places.

        The soft loss is the cross-entropy to the target's distribution, the hard one to its likeliest token, and the
        centroid loss the cross-entropy to the target's probability of each cluster.
        """
        lessons, teacher = self.lessons(block, first, rows)
        centroids = self.taught.centroids
        aims = Aim(*self.aim(teacher, self.ordering, 0 if centroids is None else centroids.out_features))
        total, weights = torch.zeros((), device=teacher.device), 0.0
        for lesson in lessons:
            aimed = aims.rows(lesson.ahead, rows)
            loss = soft_loss(self.gradients, lesson.states, self.projection, aimed.tokens)
            if centroids is not None:
                scored = centroids(lesson.states).float().log_softmax(dim=-1)
                loss = loss - CENTROID_SHARE * (aimed.clusters * scored).sum(dim=-1).mean()
            total = total + DISCOUNT**lesson.place * loss
            weights += DISCOUNT**lesson.place
        return total / weights

    @torch.no_grad()
    def figures(self, top: int) -> dict[str, Any]:
        """On held-out blocks: how often the target's likeliest token is among the first few, by kind and place."""
        hits: dict[str, dict[int, list[float]]] = {}
        together: dict[str, list[Tensor]] = {}
        count = self.states.shape[1]
        for block in range(count - HELD_OUT, count):
            alive: dict[str, Tensor] = {}
            lessons, teacher = self.lessons(block, 0, LENGTH - self.offsets)
            said = teacher.argmax(dim=-1)
            for lesson in lessons:
                kind, place = lesson.kind, lesson.place
                logits = self.target.logits(lesson.states)
                logits = logits.masked_fill(~self.shortlisted(lesson.states, top), -torch.inf)
                best, wanted = logits.topk(TOP, dim=-1).indices, said[lesson.ahead :][: len(logits)]
                found = (best == wanted[:, None]).float().cumsum(dim=-1).mean(dim=0)
                shares = hits.setdefault(kind, {}).setdefault(place, [0.0] * TOP)
                hits[kind][place] = [share + one / HELD_OUT for share, one in zip(shares, found.tolist(), strict=True)]
                taken = best[:, 0] == wanted
                alive[kind] = alive[kind] & taken if kind in alive else taken
                together.setdefault(kind, []).append(alive[kind].float().mean())
        return {
            kind: {
                "likeliest_among_first": [shares for _, shares in sorted(places.items())],
                "chain": torch.stack(together[kind]).view(HELD_OUT, -1).mean(dim=0).tolist(),
            }
            for kind, places in hits.items()
        }

    def shortlisted(self, states: Tensor, top: int) -> Tensor:
        """bool[N, V]: which tokens are scored."""
        heads = self.taught
        if heads.centroids is None:
            return torch.ones(len(states), len(self.target.projection), dtype=torch.bool, device=states.device)
        chosen = heads.centroids(states.float()).topk(top, dim=-1).indices
        clusters = torch.zeros(len(states), heads.centroids.out_features, dtype=torch.bool, device=states.device)
        clusters.scatter_(1, chosen, True)
        per_cluster = len(heads.ordering) // heads.centroids.out_features
        scored = torch.zeros(len(states), len(heads.ordering), dtype=torch.bool, device=states.device)
        scored[:, heads.ordering.to(states.device)] = clusters.repeat_interleave(per_cluster, dim=1)
        return scored


def save(heads: Heads, config: dict[str, Any], run: HeadsRun, out: Path) -> None:
    """Write the heads, their configuration, figures and card."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu() for name, value in heads.tensors().items()}, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shortlist = config["shortlist"]
    figures = {
        "training": {
            "states": int(run.states.shape[1] - HELD_OUT) * LENGTH,
            "own_share": OWN_SHARE,
            "tokens": run.budget.spent_tokens,
            "core_minutes": run.budget.core_seconds / 60,
            "loss": float(np.mean(run.losses[-100:])),
            "hardware": hardware(run.target.projection.device),
        },
        "held_out": HELD_OUT * LENGTH,
        "acceptance": run.figures(0 if shortlist is None else shortlist["top"]),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    write_card(out)


if __name__ == "__main__":
    run_command(main)
