"""How much does a grammar cost per token, and how much do drafts of its forced tokens bring?

    python -m benchmarks.speed.grammar BUNDLE [--pair BUNDLE]

The first bundle gives the size of the vocabulary and the time of a forward; random weights are enough, and E2B's shape
is the important one (`python -m benchmarks.bundles.shape`). If it has no tokenizer, one is made of pairs of the
reference pair's tokens. The reference pair writes JSON.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ondevice
from benchmarks.command import command_line, run_command, whole
from benchmarks.forwards import read, timed
from ondevice.bundle import TOKENIZER, Bundle
from ondevice.cli.bench.tables import table
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.masks import keep_allowed
from ondevice.generate.sampling.sampler import Sampler
from ondevice.grammar.matcher import Compiler, Matcher
from ondevice.grammar.response_format import ToolChoice, answer_grammar
from ondevice.model import Model
from ondevice.text.tokenizer import Tokenizer

LONGEST = 12
"""Characters of a made-up token at most."""

SPACE = "\u0120"
"""A space in the reference pair's tokenizer."""

REPLY = '{"name": "Johann Wolfgang von Goethe", "born": 1749, "works": ["Faust", "Die Leiden des jungen Werthers"]}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "works": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "born", "works"],
    "additionalProperties": False,
}
PROMPTS = ("def person():\n    return ", "import json\n\nDATA = ", "class Person:\n    default = ", "print(json.dumps(")
FORWARDS = 8
TOKENS = 120


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--pair", type=Path, default=Path("bundles/reference"))
    parser.add_argument("--threads", type=whole(1))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure_costs(args.bundle, args.pair, Path(directory), args.threads)
    with ondevice.load(args.pair, threads=args.threads) as model:
        measure_drafts(model)


def measure_costs(bundle: Path, pair: Path, directory: Path, threads: int | None) -> None:
    opened = Bundle.open(bundle)
    vocab_size = opened.manifest.target.vocab_size
    path = opened.file(TOKENIZER) or made_up(Bundle.open(pair), vocab_size, directory)
    tokenizer = Tokenizer.from_file(path)
    compiler = Compiler(tokenizer, vocab_size, opened.manifest.eos_token_ids or (1,))
    index_s = timed(lambda: constrained(compiler, SCHEMA).mask([]))
    with ondevice.load(bundle, threads=threads) as model:
        forward_s = forward_seconds(model)
    print(f"{vocab_size} tokens, forward of one row {1e3 * forward_s:.2f} ms")
    print(f"index, once for a model, with the first grammar: {index_s:.2f} s")
    tokens = tokenizer.encode(REPLY, add_special_tokens=False)
    logits = np.random.default_rng(0).standard_normal(vocab_size, np.float32)
    lines = []
    for name, schema in (("strings of any length", without_bounds(SCHEMA)), ("strings with maxLength", SCHEMA)):
        times = np.array(costs_by_token(constrained(compiler, schema), tokens, logits))
        forced = constrained(compiler, schema)
        count = 0
        for token in tokens:
            count += forced.forced([]) is not None
            forced.take([token])
        mean, usual, most = times.mean(), np.median(times), times.max()
        figures = (f"{1e6 * each:.0f}" for each in (mean, usual, most))
        lines.append([name, *figures, f"{mean / forward_s:.2%}", str(count)])
    titles = ["schema", "us per token: mean", "median", "largest", "mean, of a step", "forced"]
    print(f"\n{table(titles, lines, left={'schema'})}\n")
    mask, out = np.full((vocab_size + 31) // 32, 0xA5A5A5A5, np.uint32), np.empty_like(logits)
    applied = min(timed(lambda: keep_allowed(logits, mask, out)) for _ in range(50))
    print(f"{len(tokens)} tokens; applying a mask of every other token: {1e6 * applied:.0f} us")
    compiler.close()


def constrained(compiler: Compiler, schema: dict[str, Any]) -> Matcher:
    answer = answer_grammar({"type": "json_schema", "json_schema": {"schema": schema}})
    constraint = compiler.constraint(answer, ToolChoice("free"), False, [2])
    assert constraint is not None
    return constraint


def without_bounds(schema: Any) -> Any:
    """The schema without `maxLength`."""
    if isinstance(schema, dict):
        return {name: without_bounds(value) for name, value in schema.items() if name != "maxLength"}
    return schema


def costs_by_token(constraint: Matcher, tokens: Sequence[int], logits: np.ndarray) -> list[float]:
    """Seconds that the grammar adds to choosing each token: computing its mask, applying it, and advancing by the
    chosen token.
    """
    options = SamplingOptions(top_k=64, top_p=0.95, seed=0)
    limited, plain = Sampler(options, constraint=constraint), Sampler(options)
    context, times = [2], []
    for token in tokens:
        seconds = timed(lambda: limited.choose(logits, context))
        seconds += timed(partial(constraint.take, [token]))
        times.append(seconds - timed(lambda: plain.choose(logits, context)))
        context.append(token)
    return times


def made_up(pair: Bundle, vocab_size: int, directory: Path) -> Path:
    """A tokenizer.json with this many tokens: those of the pair, and compounds of its words. Punctuation is as rare as
    in a large vocabulary, because tokens with quotes take most of a mask's time.
    """
    source = pair.file(TOKENIZER)
    assert source is not None
    whole = json.loads(source.read_text("utf-8"))
    vocab, merges, rng = whole["model"]["vocab"], whole["model"]["merges"], random.Random(0)
    words = [word for word in vocab if word.removeprefix(SPACE).isalpha()]
    while len(vocab) < vocab_size:
        left, right = rng.choice(words), rng.choice(words)
        if right[0] != SPACE and len(left + right) <= LONGEST and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
            words.append(left + right)
    path = directory / TOKENIZER
    path.write_text(json.dumps(whole), "utf-8")
    return path


def forward_seconds(model: Model) -> float:
    session = model.engine.open_session()
    times = []
    for token in range(FORWARDS):
        times.append(timed(partial(read, model.engine, session, [5 + token])))
    session.close()
    return median(times[1:])


def measure_drafts(model: Model) -> None:
    answer = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    lines = []
    for temperature in (0.0, 1.0):
        expected: list[tuple[int, ...]] = []
        for drafter in ("none", "ngram", "mtp", "grammar", "auto"):
            rounds = tokens = drafted = taken = 0
            seconds = 0.0
            for turn in range(3):  # the first turn only learns
                replies = []
                for seed, prompt in enumerate(PROMPTS):
                    model.forget()
                    replies.append(
                        model.generate(
                            prompt, response_format=answer, temperature=temperature, seed=seed, drafter=drafter,
                            max_new_tokens=TOKENS,
                        )
                    )  # fmt: skip
                ids = [reply.token_ids for reply in replies]
                expected = expected or ids
                if ids != expected:
                    raise SystemExit(f"{drafter} changed a reply")
                if not turn:
                    continue
                rounds += sum(reply.stats.target_forwards for reply in replies)
                tokens += sum(len(reply.token_ids) - 1 for reply in replies)
                seconds += sum(reply.stats.decode_s for reply in replies)
                for reply in replies:
                    if (found := reply.stats.by_source.get("grammar")) is not None:
                        drafted += found.num_draft_tokens
                        taken += found.num_accepted_tokens
            figures = [f"{tokens / rounds:.2f}", f"{tokens / seconds:.0f}", f"{drafted}, {taken}"]
            lines.append([f"T={temperature:g} {drafter}", *figures])
    titles = ["drafter", "tokens/round", "tokens/s", "of the grammar: drafted, taken"]
    print(f"\n{table(titles, lines, left={'drafter'})}")


if __name__ == "__main__":
    run_command(main)
