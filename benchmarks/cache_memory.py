"""Anonymous memory of a process beside its budget for finished sequences, and what is left after `forget` and `close`.

    python -m benchmarks.cache_memory BUNDLE [--generations 300] [--callers 4] [--cache-mb 512] [--json]

Threads generate six tokens after prompts of 100 to 8,000 random characters, so that keys and values of many lengths are
kept and dropped. Linux only: the figures are RssAnon of `/proc/self/status`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ondevice
from benchmarks.memory_watch import Memory
from ondevice.cli.bench.tables import table

CHARACTERS = "abcdefghij klmnop\n(){}=+"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--generations", type=int, default=300)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--cache-mb", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    stages = measured(args.bundle, args.generations, args.callers, args.cache_mb << 20)
    if args.json:
        print(json.dumps(stages))
    else:
        print(
            table(
                ["stage", "anonymous MB"],
                [[stage, f"{size / 1e6:.0f}"] for stage, size in stages.items()],
                left={"stage"},
            )
        )


def measured(bundle: Path, generations: int, callers: int, cache_bytes: int) -> dict[str, int]:
    """Anonymous bytes of this process: loaded, after the generations, after `forget`, and after `close`."""
    stages = {}
    with ondevice.load(bundle, engine="simd", threads=1, cache_bytes=cache_bytes) as model:

        def generate(number: int) -> None:
            rng = random.Random(number)
            prompt = "".join(rng.choices(CHARACTERS, k=rng.randrange(100, 8_000)))
            model.generate(prompt, max_new_tokens=6, temperature=0.0)

        generate(0)
        stages["loaded"] = anonymous_bytes()
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(generate, range(1, generations + 1)))
        stages["generated"] = anonymous_bytes()
        model.forget()
        stages["forgot"] = anonymous_bytes()
    stages["closed"] = anonymous_bytes()
    return stages


def anonymous_bytes() -> int:
    gc.collect()
    memory = Memory.parse(Path("/proc/self/status").read_text())
    if memory is None:
        raise SystemExit("this system does not say how much memory a process has")
    return memory.anonymous


if __name__ == "__main__":
    main()
