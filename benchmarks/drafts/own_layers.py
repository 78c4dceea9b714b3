"""How much do drafts with the target's own layers cost, and which acceptance do they need?

    python -m benchmarks.drafts.own_layers BUNDLE                            # the table of costs
    python -m benchmarks.drafts.own_layers BUNDLE --simulate 0.6 0.75 0.9    # early exit with simulated acceptance

A drafted token is a forward of one row along a path. Without an exit head in the bundle, an MTP step is run in its
place. Seconds are medians, each measured alternately with a whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.command import add_threads, command_line, run_command, share, whole
from benchmarks.drafts.speculation import AUTO, Bench
from benchmarks.forwards import read
from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.engines.layer_path import WHOLE, LayerPath, free_sub_layers, path_of
from ondevice.engines.protocol import Engine, Rows, Session, TokenTree
from ondevice.engines.simd.engine import SimdEngine
from ondevice.generate.drafters.self_speculative import EarlyExitDrafter, NextLogits

PROMPT_TOKENS = 64
RUNS = 15
MOST = 8
"""Tokens of a draft."""

LENGTHS = ("2", "4", AUTO)


def early_exit(engine: Engine, stop: int) -> EarlyExitDrafter:
    """An early-exit drafter that runs its head, or without one an MTP step in its place."""
    if "exit" in engine.heads:
        return EarlyExitDrafter(engine, stop)
    anything = np.zeros(engine.target.hidden_size, np.float32)

    def head(session: Session, hidden: Float32Array) -> NextLogits:
        step = session.draft_step(0, anything)
        return NextLogits(step.logits, step.candidates)

    return EarlyExitDrafter(engine, stop, head)


class Timings:
    """Seconds of forwards after a prompt."""

    def __init__(self, engine: Engine, prompt_ids: Sequence[int]) -> None:
        self.engine = engine
        self.session = engine.open_session()
        read(engine, self.session, prompt_ids)
        self._turn = 0

    def share(self, work: Callable[[list[int]], None]) -> float:
        """Time of `work` on tokens that were not used before, relative to a whole row's time."""
        shares = []
        for _ in range(RUNS):
            tokens = self._tokens()
            started = perf_counter()
            work(tokens)
            worked = perf_counter()
            self.forward(self._tokens()[:1])
            shares.append((worked - started) / (perf_counter() - worked))
        return median(shares[1:])

    def forward(self, tokens: Sequence[int], path: LayerPath = WHOLE) -> None:
        wanted = range(len(tokens)) if path.is_whole else [len(tokens) - 1]
        self.engine.forward([Rows(self.session, TokenTree.chain(tokens), wanted, path)])

    def verified(self, tokens: Sequence[int], path: LayerPath) -> float:
        """Time to verify tokens of which all but the last were drafted along a path, relative to a whole row's."""
        shares = []
        for _ in range(RUNS):
            for count in range(1, len(tokens)):
                self.forward(tokens[:count], path)
            started = perf_counter()
            self.forward(tokens)
            verified = perf_counter()
            self.forward(self._tokens()[:1])
            shares.append((verified - started) / (perf_counter() - verified))
        return median(shares[1:])

    def _tokens(self) -> list[int]:
        self._turn += 1
        return [self._turn % 1000 + extra for extra in range(MOST + 1)]


def methods(engine: Engine, stop: int) -> Iterator[tuple[str, LayerPath | None]]:
    """The paths of drafted rows by name; None for the MTP drafter."""
    free = free_sub_layers(engine.target)
    attention = frozenset(sub for sub in free if sub[0] == "attention")
    half = frozenset(sub for number, sub in enumerate(free) if number // 2 % 2)
    yield "mtp", None
    yield "self: nothing left out", path_of(frozenset())
    yield "self: no attention", path_of(attention)
    yield "self: every second layer", path_of(half)
    yield "self: no mlp", path_of(frozenset(free) - attention)
    yield "self: neither", path_of(frozenset(free))
    yield f"early exit before layer {stop}", LayerPath(stop=stop)


def costs(engine: Engine, prompt_ids: Sequence[int], stop: int) -> str:
    """Markdown: a method in each line."""
    timings, hidden = Timings(engine, prompt_ids), np.zeros(engine.target.hidden_size, np.float32)
    whole = [timings.share(lambda tokens, rows=rows: timings.forward(tokens[:rows])) for rows in (1, 3, 5, 9)]  # type: ignore[misc]
    forwards = np.interp(range(1, MOST + 2), (1, 3, 5, 9), whole).tolist()
    drafter, lines = early_exit(engine, stop), []
    for name, path in methods(engine, stop):
        if path is None:
            token = timings.share(lambda tokens: _step(timings.session, tokens[0], hidden))
            lines.append([name, f"{token:.3f}", f"{whole[2]:.2f}", _break_even(forwards, token)])
            continue
        if path.stop is None:
            token = timings.share(lambda tokens, path=path: timings.forward(tokens[:1], path))  # type: ignore[misc]
        else:
            token = timings.share(lambda tokens: _exit(drafter, timings.session, tokens[:1]))
        verified = timings.verified([7, 5, 3, 9, 4], path)
        scale = verified / whole[2]
        lines.append([name, f"{token:.3f}", f"{verified:.2f}", _break_even([scale * each for each in forwards], token)])
    timings.session.close()
    titles = ["draft", "a drafted token", "verifying 4 of them", "breaks even at acceptance"]
    return table(titles, lines, left={"draft"})


def _step(session: Session, token: int, hidden: Float32Array) -> None:
    session.draft_step(token, hidden)


def _exit(drafter: EarlyExitDrafter, session: Session, tokens: list[int]) -> None:
    drafter.scores(session, tokens)


def _break_even(forwards: Sequence[float], token: float) -> str:
    """The least acceptance at which some draft length is as fast as plain decoding."""
    for percent in range(101):
        survival = accumulate([percent / 100] * MOST, lambda one, other: one * other)
        tokens = list(accumulate(survival, initial=1.0))[1:]
        if any(each >= forwards[count] + count * token for count, each in enumerate(tokens, 1)):
            return f"{percent / 100:.2f}"
    return "never"


def simulated(bench: Bench, acceptances: Sequence[float], lengths: Sequence[str]) -> str:
    """Markdown: speed relative to plain decoding by acceptance and draft length, and tokens per round."""
    blocks = list(bench.measure(acceptances, lengths, 2))
    different = sum(
        run.token_ids != bench.continuation for block in blocks for cell in block.cells for run in cell.runs
    )
    cells = [
        [
            f"{block.acceptance:g}",
            *(f"{block.speed_up(cell):.2f} ({cell.tokens_per_round:.2f})" for cell in block.cells),
        ]
        for block in blocks
    ]
    titles = ["acceptance", *(cell.length for cell in blocks[0].cells)]
    return f"{table(titles, cells, left=())}\n\n{different} runs did not emit what plain decoding does"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    add_threads(parser)
    parser.add_argument("--simulate", type=share, nargs="+", metavar="P", help="acceptance of an early exit's drafts")
    parser.add_argument("--tokens", type=whole(1), default=48, help="per simulated run (default: 48)")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, metavar="K", help="of drafts: numbers, or auto")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    engine = SimdEngine(bundle, arguments.threads)
    layers = engine.target.layers
    shared = [index for index, layer in enumerate(layers) if layer.mixer.kv_source is not None]
    stop = shared[0] if shared else len(layers) // 3
    if (head := engine.heads.get("exit")) is not None and head.layer is not None:
        stop = head.layer + 1
    prompt_ids = np.random.default_rng(0).integers(engine.target.vocab_size, size=PROMPT_TOKENS).tolist()
    if arguments.simulate:
        bench = Bench.prepare(engine, prompt_ids, arguments.tokens, early_exit(engine, stop))
        print(simulated(bench, arguments.simulate, arguments.lengths))
    else:
        print(costs(engine, prompt_ids, stop))
    facts = setup(bundle.manifest, "simd", arguments.threads)
    print(f"\n{setup_line(facts)}\n{versions_line(facts)}")
    engine.close()


if __name__ == "__main__":
    run_command(main)
