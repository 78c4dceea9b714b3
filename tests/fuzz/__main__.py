"""`python -m tests.fuzz`: run mutants for a number of seconds and exit with 1 after a fault.

Each mutant must end in one of our errors, or in output that its change explains; anything else is a fault. A mutant
depends on its seed alone: `--seed N --count 1` reproduces it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import ondevice
from ondevice.options import GenerationKeywords
from ondevice_export import export
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.fixtures.tiny_families import save_family
from tests.fuzz import child
from tests.fuzz.bundles import IDS, Mutants
from tests.fuzz.exports import Exports, GgufExports
from tests.fuzz.media import Media
from tests.fuzz.options import Calls
from tests.fuzz.requests import SERVED, Requests
from tests.fuzz.values import Values
from tests.server.alone import served_alone

Fuzzed = Mutants | Exports | GgufExports | Calls | Media | Requests | Values

KINDS = {"bundles": 6, "mixtures": 4, "values": 4, "exports": 2, "gguf": 2, "options": 2, "media": 2, "requests": 6}
"""Kinds of mutants, and how often each is made in comparison with the others."""

PAIR = Path(__file__).parents[2] / "models" / "reference"
MIXTURE = "lfm2-moe"
"""A family of `tests.fixtures.tiny_families` with parts that the pair lacks: experts and convolutions."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: 60")
    parser.add_argument("--seed", type=int, help="seed of the first mutant; later ones count up (default: random)")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="most mutants")
    parser.add_argument("--only", choices=KINDS, help="one kind (default: all)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        bundle = export(PAIR / "target", room / "bundle")
        saved = child.run(partial(_save, room / "mixture"), 300)  # torch has threads, which a fork would lose
        assert saved.kind == "ok", saved
        mixture = export(room / "mixture", room / "mixtures")
        # load the kernels before forking, so that children inherit them; one thread, because a fork copies only one
        with ondevice.load(bundle, engine="simd", threads=1) as model:
            each: tuple[GenerationKeywords, ...] = (
                {"max_new_tokens": 8},
                {"max_new_tokens": 8, "temperature": 0.0},
                {"max_new_tokens": 8, "top_k": 5, "top_p": 0.9},
            )
            for options in each:
                model.generate(IDS, **options)
        with served_alone(write_chat_bundle(bundle, room / "chat", do_sample=True), room, *SERVED) as served:
            kinds: dict[str, Fuzzed] = {
                "bundles": Mutants(bundle, room),
                "mixtures": Mutants(mixture, room),
                "values": Values(bundle, room),
                "exports": Exports(PAIR, room),
                "gguf": GgufExports(PAIR, room),
                "options": Calls(bundle),
                "media": Media(),
                "requests": Requests(served),
            }
            names = [args.only] if args.only else [kind for kind, share in KINDS.items() for _ in range(share)]
            return _fuzz(kinds, names, seed, args)


def _save(path: Path) -> None:
    save_family(path, MIXTURE)


def _fuzz(kinds: dict[str, Fuzzed], names: list[str], seed: int, args: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    faulty = 0
    ends = time.monotonic() + args.seconds
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < ends and counts.total() < args.count:
            number = seed + counts.total()
            rng = random.Random(number)
            name, said, faults = kinds[rng.choice(names)].try_one(rng)
            counts[name] += 1
            faulty += bool(faults)
            for fault in faults:
                print(f"seed {number}: {name} ({said:.300})\n  {fault}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:7} {name}")
    print(f"{counts.total():7} mutants, {faulty} with faults")
    return 1 if faulty else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
