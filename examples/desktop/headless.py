"""The desktop application without its window: answers one question on standard output.

python -m examples.desktop.headless BUNDLE "Why is the sky blue?"
"""

from __future__ import annotations

import sys

import ondevice


def main() -> None:
    bundle, question = sys.argv[1:]
    with ondevice.load(bundle) as model:
        for step in model.stream([{"role": "user", "content": question}], max_new_tokens=64, seed=0):
            print(step.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
