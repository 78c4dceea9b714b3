"""How fast are two published models on ondevice and on llama.cpp, from the same GGUF file on the same cores?

    pip install xllamacpp
    python -m benchmarks.speed.published_models [--models smollm2 gemma3] [--rounds 5] [--threads 2] [--json FILE]

`ondevice` runs an export of the file that keeps what the file has (`--quantize keep`). Measured: reading 512 tokens,
writing 128, forwards of 1, 5 and 8 rows after 64 tokens of context, a reply to chat prompts with drafts and without,
the time from the start of a process to its first token, and the peak of its memory. Both engines take turns within each
round, so that other load slows both. A forward of llama.cpp computes the logits of its last row only, and ours those of
every row, as a verification does. The speed of its drafts is that of its best kind of n-gram drafts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

import ondevice
from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.forwards import read
from benchmarks.memory.start import start
from benchmarks.peers.xllamacpp_worker import PLAIN, LlamaProcess, Speculation
from benchmarks.speed.rows import seconds
from models.published import fetch
from ondevice import Model, machine
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench.measure import load_scenarios
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice_export import export

MODELS = ("smollm2", "gemma3")
CONTEXT, PREFILL, WRITTEN, ROWS = 64, 512, 128, (1, 5, 8)
KINDS = (PLAIN.type, "NGRAM_SIMPLE", "NGRAM_MOD", "NGRAM_CACHE")
"""llama.cpp without drafts, and its kinds of n-gram drafts."""
TIMES = 3
"""Short forwards in a round, since other load may disturb all of a single one."""
DRAFT_PROMPTS = 8
TEMPERATURES = (0.0, 1.0)
STARTS = 3


@dataclass
class Measured:
    """All measurements of an engine with a model.

    forwards : rows -> seconds
    writing : seconds of a token
    replies : temperature and drafts -> tokens per second of each prompt, the median over the rounds
    """

    forwards: dict[int, list[float]] = field(default_factory=dict)
    writing: list[float] = field(default_factory=list)
    replies: dict[str, list[float]] = field(default_factory=dict)
    start_s: float = 0.0
    peak_bytes: int = 0

    def forward_ms(self, rows: int) -> float:
        return 1e3 * median(self.forwards[rows])

    @property
    def decode(self) -> float:
        return 1 / median(self.writing)

    def add_reply(self, temperature: float, drafts: str, found: list[float]) -> None:
        self.replies.setdefault(f"T = {temperature:g}, {drafts}", []).append(median(found))

    def reply(self, temperature: float, drafts: str) -> float:
        return geometric_mean(self.replies[f"T = {temperature:g}, {drafts}"])


def measure(gguf: Path, bundle: Path, threads: int, rounds: int) -> tuple[Measured, Measured, dict[str, object]]:
    """Ours, llama.cpp's, and the facts of the measurement."""
    with ExitStack() as stack:
        model = stack.enter_context(ondevice.load(bundle, threads=threads, cache_bytes=0))
        processes = {kind: stack.enter_context(LlamaProcess(gguf, threads, Speculation(kind))) for kind in KINDS}
        llama = processes[PLAIN.type]
        ours, theirs = Measured(), Measured()
        _forwards(model, llama, 1, Measured(), Measured())  # a warm-up
        _forwards(model, llama, rounds, ours, theirs)
        _replies(model, processes, rounds, ours, theirs)
        facts = setup(model.manifest, model.engine.name, model.threads)
        facts["versions"] |= {"xllamacpp": llama.version}
    _starts(gguf, bundle, threads, ours, theirs)
    return ours, theirs, facts


def _forwards(model: Model, llama: LlamaProcess, rounds: int, ours: Measured, theirs: Measured) -> None:
    """Forwards of `ROWS` and `PREFILL` tokens after the context, and writing, alternately."""
    rng = np.random.default_rng(0)
    most = model.manifest.target.vocab_size
    session = model.engine.open_session()
    context = rng.integers(256, most, CONTEXT).tolist()
    read(model.engine, session, context)
    counts = (*TIMES * ROWS, PREFILL)
    for _ in range(rounds):
        for rows in counts:
            ours.forwards.setdefault(rows, []).append(seconds(model.engine, session, rows, rng))
        stats = model.generate(context, max_new_tokens=WRITTEN + 1, temperature=0.0, drafter="none").stats
        ours.writing.append(stats.decode_s / (stats.new_tokens - 1))  # of a token, since a reply may end early
        for rows in counts:
            tokens = rng.integers(256, most, rows).tolist()
            llama.ask(context, n_predict=1, cache_prompt=True)
            timings = llama.ask([*context, *tokens], n_predict=1, cache_prompt=True)
            if timings["prompt_n"] != rows:
                raise SystemExit(f"llama.cpp read {timings['prompt_n']} tokens instead of {rows}")
            theirs.forwards.setdefault(rows, []).append(timings["prompt_ms"] / 1e3)
        timings = llama.ask(context, n_predict=WRITTEN + 1, temperature=0.0, cache_prompt=False)
        theirs.writing.append(timings["predicted_ms"] / 1e3 / timings["predicted_n"])
    session.close()


def _replies(model: Model, processes: dict[str, LlamaProcess], rounds: int, ours: Measured, theirs: Measured) -> None:
    """Replies to chat prompts, each with a new seed per round: with the same one, n-grams of the round before would
    propose the whole reply.
    """
    scenarios = load_scenarios(DRAFT_PROMPTS, as_chat=CHAT_TEMPLATE in model.manifest.files)
    (chat,) = (scenario for scenario in scenarios if scenario.name == "chat")
    for temperature in TEMPERATURES:
        for prompt in chat.prompts:
            ids = model.encode(prompt)
            taken: dict[str, list[float]] = {"none": [], "auto": []}
            for seed in range(rounds if temperature else 1):
                for drafter, speeds in taken.items():
                    stats = model.generate(
                        ids, max_new_tokens=WRITTEN, temperature=temperature, seed=seed, drafter=drafter
                    ).stats
                    speeds.append((stats.new_tokens - 1) / stats.decode_s)
            for drafter, speeds in taken.items():
                ours.add_reply(temperature, drafter, speeds)
            for kind, process in processes.items():
                found = []
                for seed in range(rounds if temperature else 1):
                    options = {"temperature": temperature, "seed": seed, "cache_prompt": False}
                    timings = process.ask(ids, n_predict=WRITTEN, **options)
                    found.append(timings["predicted_n"] / timings["predicted_ms"] * 1e3)
                theirs.add_reply(temperature, kind, found)


def _starts(gguf: Path, bundle: Path, threads: int, ours: Measured, theirs: Measured) -> None:
    """A first token of each in a process of its own, three times, after the file is in the page cache."""
    command = [sys.executable, "-m", "ondevice", "generate", str(bundle), "--ids", "1", "--max-new-tokens", "1"]
    command += ["--json", "--threads", str(threads)]
    own, other = [], []
    for _ in range(STARTS):
        own.append(start(command, machine.cache_directory()))
        with LlamaProcess(gguf, threads) as llama:
            other.append((llama.start_s, llama.ask([1], n_predict=1)["peak_bytes"]))
    ours.start_s = median(each.first_token_s for each in own)
    ours.peak_bytes = max(each.peak_rss_bytes for each in own)
    theirs.start_s = median(seconds for seconds, _ in other)
    theirs.peak_bytes = max(peak for _, peak in other)


def report(ours: Measured, theirs: Measured) -> str:
    """Markdown: each figure of both, and their ratio, over 1 where `ondevice` is better."""
    lines = []

    def line(name: str, own: float, other: float, digits: int, *, less_is_better: bool) -> None:
        ratio = other / own if less_is_better else own / other
        lines.append([name, f"{own:.{digits}f}", f"{other:.{digits}f}", f"{ratio:.2f}"])

    line(f"reading {PREFILL}, tokens/s", PREFILL / ours.forward_ms(PREFILL) * 1e3,
         PREFILL / theirs.forward_ms(PREFILL) * 1e3, 0, less_is_better=False)  # fmt: skip
    line(f"writing {WRITTEN}, tokens/s", ours.decode, theirs.decode, 1, less_is_better=False)
    for rows in ROWS:
        line(f"forward of {rows}, ms", ours.forward_ms(rows), theirs.forward_ms(rows), 2, less_is_better=True)
    for temperature in TEMPERATURES:
        line(f"chat, T = {temperature:g}, plain, tokens/s", ours.reply(temperature, "none"),
             theirs.reply(temperature, PLAIN.type), 1, less_is_better=False)  # fmt: skip
        line(f"chat, T = {temperature:g}, best of drafts, tokens/s", ours.reply(temperature, "auto"),
             max(theirs.reply(temperature, kind) for kind in KINDS), 1, less_is_better=False)  # fmt: skip
    line("first token of a process, s", ours.start_s, theirs.start_s, 2, less_is_better=True)
    line("peak memory, MB", ours.peak_bytes / 1e6, theirs.peak_bytes / 1e6, 0, less_is_better=True)
    return table(["", "ondevice", "llama.cpp", "ratio"], lines, left={""})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=whole(1), default=5, metavar="N", help="default: 5")
    add_threads(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file too")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.models:
        gguf = fetch(name, lambda message: print(message, file=sys.stderr))
        with tempfile.TemporaryDirectory() as directory:
            bundle = export(gguf, Path(directory) / name)
            ours, theirs, facts = measure(gguf, bundle, arguments.threads, arguments.rounds)
        found[name] = {"facts": facts, "ondevice": asdict(ours), "llama.cpp": asdict(theirs)}
        print(f"\n{gguf.name}\n\n{report(ours, theirs)}\n\n{setup_line(facts)}\n{versions_line(facts)}")
        five = {name: each.forward_ms(5) / each.forward_ms(1) for name, each in (("ours", ours), ("theirs", theirs))}
        print(f"five rows cost {five['ours']:.2f} of one ({five['theirs']:.2f} on llama.cpp)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, default=str, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
