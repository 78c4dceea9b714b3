"""Ten replies of SmolLM2-135M-Instruct to common questions, good and bad, as they are.

    python -m models.replies > models/smollm2_replies.md

The bundle is that of `make demo`. Replies are greedy: `ondevice` writes the same ones on every CPU.
"""

from __future__ import annotations

import ondevice
from benchmarks.command import run_command

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "What is 17 plus 25?",
    "Write a Python function that returns the largest number of a list.",
    "Translate into French: Good morning, my friend.",
    "Give me three names for a small bakery.",
    "How many legs has a spider, and how many has an ant?",
    "Explain recursion to a child of eight.",
    "Rewrite politely: Send me the report now.",
)
MAX_TOKENS = 200


def main() -> None:
    print(f"""# Ten replies of SmolLM2-135M-Instruct

Printed by `python -m models.replies` with the bundle of `make demo`: greedy, at most {MAX_TOKENS} tokens, good and bad
as they are. The model has 135 million parameters.""")
    with ondevice.load("bundles/smollm2") as model:
        for question in QUESTIONS:
            reply = model.generate([{"role": "user", "content": question}], temperature=0.0, max_new_tokens=MAX_TOKENS)
            cut = " […]" if reply.finish_reason == "length" else ""
            quoted = (reply.text + cut).replace("\n", "\n> ")
            print(f"\n## {question}\n\n> {quoted}")


if __name__ == "__main__":
    run_command(main)
