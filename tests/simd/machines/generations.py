"""Prints the token ids of a bundle's replies with every drafter, to compare processes.

python -m tests.simd.machines.generations BUNDLE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import ondevice
from ondevice.engines.protocol import KVCacheType

DRAFTERS = ("none", "mtp", "ngram", "medusa", "blockwise", "early-exit", "auto")
PROMPT = [5, 9, 12, 7, 5, 9, 12, 8, 5, 9]
"""A repetitive prompt, so that the n-gram drafter finds matches."""

DRAFTS = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
"""A constant draft length: the default schedule would stop drafting for tiny and for emulated models."""

SAMPLINGS: list[tuple[dict[str, float], tuple[str, ...]]] = [
    ({"temperature": 0.0}, DRAFTERS),
    ({"temperature": 0.9}, DRAFTERS),
    ({"temperature": 1.2, "top_p": 0.9}, ("none", "mtp")),
    ({"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, ("none", "mtp")),
]
"""Options of replies, each with the drafters of some."""


def replies(bundle: Path) -> dict[str, list[int]]:
    """The token ids of replies, by cache type, sampling and drafter."""
    found = {}
    for kind in get_args(KVCacheType):
        with ondevice.load(bundle, engine="simd", threads=2, kv_cache=kind) as model:
            for sampling, drafters in SAMPLINGS:
                for drafter in drafters:
                    options: dict[str, Any] = {"drafter": drafter, "seed": 11, "max_new_tokens": 24} | sampling
                    options |= {} if drafter == "none" else DRAFTS
                    model.forget()
                    reply = model.generate(PROMPT, **options)
                    found[f"{kind} {sampling} {drafter}"] = list(reply.token_ids)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(replies(Path(sys.argv[1]))))
