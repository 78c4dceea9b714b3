"""How much faster does each drafter make real text, greedy and sampled, and how fast is llama.cpp?

    python -m benchmarks.drafts.real_text BUNDLE [--human-eval FILE.jsonl] [--turns 3] [--kinds chat summary]
        [--draft-model DRAFT] [--gguf FILE [--mtp-gguf FILE --mtp-drafts 1 2 3]] [--json FILE] [--quick]
    python -m benchmarks.drafts.real_text BUNDLE --instructions --gguf FILE.gguf --tokens 128 --json FILE
    python -m benchmarks.drafts.real_text BUNDLE --settings mtp --before 27000 --busy 1    # long context, busy core
    python -m benchmarks.drafts.real_text --merge FILE FILE     # the tables of several runs, as of one

Bundles of `benchmarks.bundles.widened` have the reference pair's text and acceptance, and the cost of E2B's shape.
Drafters that leave layers out are not measured with them: most of the widened layers add nothing, so that such drafts
would look better than they are. With `--instructions`, the prompts are 12 of each of seven kinds, for a published model
that follows instructions, and replies at temperature 1 are sampled from the whole distribution. Every reply has to be
that of plain decoding; if one is not, the run fails.

All settings run a prompt before the next one starts, each time beginning with another setting, and are compared turn by
turn. The file of `--json` is written after each prompt; a run that was ended goes on after the prompts that it has.

`--gguf` measures llama.cpp too, by the package `xllamacpp`: without drafts, with each of its n-gram drafts, and, with
`--mtp-gguf`, with MTP drafts of each length: of this length, ended by the least probability of `P_MIN`, and sampled.
Each setting has a process of its own, which is started for a prompt and ended: several with a large model would not fit
into memory.

Greedy text of small models often repeats itself, which flatters every drafter. So all means are also taken over the
prompts whose greedy reply does not: less than a quarter of its tokens lie in an 8-gram that occurs more than once.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from benchmarks.command import add_threads, command_line, run_command, whole
from benchmarks.drafts.real_text_tables import (
    DRAFT_MODEL,
    LLAMA,
    PLAIN_NAME,
    SHORTEST,
    TEMPERATURES,
    Record,
    merge,
    repeated_share,
    report,
    seen_grams,
    write,
)
from benchmarks.peers.xllamacpp_worker import PLAIN as LLAMA_PLAIN
from benchmarks.peers.xllamacpp_worker import LlamaProcess, Speculation, mtp_ways
from benchmarks.speed.busy import busy_processes
from ondevice import load
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench.measure import (
    PLAIN,
    SCENARIOS,
    SEPARATOR,
    Configuration,
    Run,
    Scenario,
    Variant,
    load_scenarios,
    run_in_turns,
)
from ondevice.cli.bench.tables import setup
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import Drafter
from ondevice.text.prompt_file import load_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

HUMAN_EVAL = "HumanEval"
INSTRUCTIONS = Path(__file__).with_name("instructions")
INSTRUCTED = ("chat", "code", "summary", "translation", "maths", "extraction", "writing")
"""Names of the kinds of instructions, and of their files."""

KINDS = (*SCENARIOS, HUMAN_EVAL, *(kind for kind in INSTRUCTED if kind not in SCENARIOS))

LEFT_OUT = ("self", "swift", "early-exit")
"""Drafters that run a part of the layers."""
LENGTHS = ("2", "4", "6", "8")
"""Constant numbers of tokens in MTP drafts, as trees and as chains."""

SAMPLED = {"top_k": 64, "top_p": 0.95}
UNFILTERED = {"top_k": 0, "top_p": 1.0}
"""How replies at temperature 1 are sampled: from Gemma's default, or from the whole distribution."""

LLAMA_NGRAMS = ("NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MOD", "NGRAM_CACHE")
"""llama.cpp's kinds of drafts without a model; its lookahead decoding is not in the package."""
P_MIN = 0.75
"""The least probability of a drafted token, where llama.cpp's drafts have one: its own default until it became 0."""

BUSY_S = 7200
"""Busy processes end after this time at the latest."""

QUICK = {"limit": 1, "tokens": 32, "turns": 1}
"""Options that `--quick` sets."""


@dataclass(frozen=True)
class Chains(Configuration):
    """MTP drafts without siblings."""

    own: Drafter = field(compare=False)

    def options(self) -> GenerationKeywords:
        return {**super().options(), "drafter": self.own}


def configurations(
    model: Model, draft_model: Path | None = None, left_out: Sequence[str] = LEFT_OUT
) -> list[Configuration]:
    """Plain decoding, every measured drafter with lengths of its own choice, MTP with constant ones, and `auto`.

    Args:
        draft_model: a bundle, measured alone and beside all of `auto`.
        left_out: drafters that are not measured.
    """
    found = [name for name in registry.methods(model.engine) if name not in left_out]
    lengths = LENGTHS if "mtp" in found else ()
    target = model.manifest.target
    chains = [MtpDrafter(target.vocab_size, branches=1) for _ in lengths]
    prefixes = ("", registry.AUTO_WITH) if draft_model is not None else ()
    return [
        PLAIN,
        *(Configuration(name, "auto") for name in found),
        *(Configuration("mtp", length) for length in lengths),
        *(Chains("mtp", length, own) for length, own in zip(lengths, chains, strict=True)),
        *(Configuration(f"{prefix}{draft_model}", "auto") for prefix in reversed(prefixes)),
        Configuration(registry.AUTO, "auto"),
    ]


def setting_name(configuration: Configuration) -> str:
    """The setting's name in tables: the drafter, and the length of its drafts if that is constant."""
    drafter = configuration.drafter
    if configuration == PLAIN:
        return PLAIN_NAME
    if registry.draft_bundle(drafter) is not None:
        return f"auto+ {DRAFT_MODEL}" if drafter.startswith(registry.AUTO_WITH) else DRAFT_MODEL
    if isinstance(configuration, Chains):
        drafter += " chain"
    return drafter if configuration.length == "auto" else f"{drafter} {configuration.length}"


def scenarios(model: Model, human_eval: Path | None) -> list[Scenario]:
    """The prompts of `ondevice bench --scenarios`, and of HumanEval if there is a file."""
    found = load_scenarios(None, as_chat=CHAT_TEMPLATE in model.manifest.files)
    if human_eval is not None:
        found.append(Scenario(HUMAN_EVAL, tuple(load_prompts(human_eval, None, as_chat=False))))
    return found


def instructions() -> list[Scenario]:
    """The prompts for a model that follows instructions, each a user's message."""
    texts = {kind: (INSTRUCTIONS / f"{kind}.txt").read_text("utf-8").split(SEPARATOR) for kind in INSTRUCTED}
    return [
        Scenario(kind, tuple([{"role": "user", "content": text.strip()}] for text in own))
        for kind, own in texts.items()
    ]


def behind_source(model: Model, prompt: Prompt, characters: int) -> Prompt:
    """The token ids of a prompt after this many characters of Python source."""
    if not characters:
        return prompt
    start, *ids = model.encode(prompt)
    source = model.encode(inspect.getsource(argparse)[:characters])
    return [start, *source[1:], *ids]


Processes = Mapping[str, Callable[[], AbstractContextManager[LlamaProcess]]]
"""Functions that start llama.cpp, by the name of the setting."""


def measure(
    model: Model,
    chosen: Sequence[Configuration],
    kinds: Iterable[Scenario],
    *,
    tokens: int,
    turns: int,
    skip: int = 0,
    sampled: Mapping[str, Any] = SAMPLED,
    known: Sequence[Record] = (),
    llama: Processes | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[list[Record]]:
    """Measure every prompt in every setting, greedy and sampled; yields the records of one prompt after another.

    Args:
        chosen: the settings; plain decoding is one of them.
        tokens: of a reply, at most.
        skip: number of each kind's prompts that come before the given ones, for the records.
        sampled: keywords of `Model.stream` at temperatures above 0.
        known: records of prompts that are left out.
        llama: llama.cpp's settings.
        progress: called after every reply of ours.

    Raises:
        SystemExit: a reply differs from that of plain decoding.
    """
    variants, left_out = [Variant(model, each) for each in chosen], {(each.kind, each.prompt) for each in known}
    for kind in kinds:
        for number, prompt in enumerate(kind.prompts, skip):
            if (kind.name, number) in left_out:
                continue
            start = number % len(variants)
            rotated = [*variants[start:], *variants[:start]]
            repeated, records = 0.0, list[Record]()
            cases = [_case(kind.name, number, temperature, tokens, sampled) for temperature in TEMPERATURES]
            for case in cases:
                found = list(run_in_turns(rotated, [prompt], case.options, turns, progress))
                runs = {setting_name(each.configuration): [turn[each] for turn in found] for each in variants}
                check_equal(f"{kind.name}, prompt {number}", runs)
                if case.temperature == 0:
                    repeated = repeated_share(runs[PLAIN_NAME][0].token_ids)
                records += [_record(case, setting, replies, repeated) for setting, replies in runs.items()]
            for setting, begin in (llama or {}).items():
                with begin() as process:
                    ids = model.encode(prompt)
                    records += _llama_records(process, setting, cases, ids, turns=turns, repeated=repeated)
            yield records


class Case(NamedTuple):
    """A prompt, by its number among those of its kind, at a temperature; `options` are keywords of `Model.stream`."""

    kind: str
    prompt: int
    temperature: float
    options: GenerationKeywords


def _case(kind: str, prompt: int, temperature: float, tokens: int, sampled: Mapping[str, Any]) -> Case:
    """A prompt at a temperature. Each prompt has a seed of its own: with a common one, their draws would be alike."""
    options: Any = {"max_new_tokens": tokens, "temperature": temperature, "seed": 1000 * KINDS.index(kind) + prompt}
    return Case(kind, prompt, temperature, options | sampled if temperature else options)


def check_equal(prompt: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """Check that all replies to a prompt are those of plain decoding.

    Args:
        prompt: for the message.
        runs: by setting and turn.

    Raises:
        SystemExit: one is not; the message names prompt, turn, setting and the first token that differs.
    """
    wanted = runs[PLAIN_NAME][0].token_ids
    for setting, replies in runs.items():
        for turn, found in enumerate(reply.token_ids for reply in replies):
            if found != wanted:
                differ = (at for at, (own, other) in enumerate(zip(found, wanted, strict=False)) if own != other)
                first = next(differ, min(len(found), len(wanted)))
                raise SystemExit(
                    f"{prompt}, turn {turn}: the reply of {setting} differs from plain decoding's from token {first} on"
                )


def _record(case: Case, setting: str, runs: Sequence[Run], repeated: float) -> Record:
    stats = [run.stats for run in runs]
    positions = (
        [getattr(one, name) for one in stats] for name in ("num_drafts_per_pos", "num_accepted_tokens_per_pos")
    )
    drafted, taken = (tuple(map(sum, zip_longest(*each, fillvalue=0))) for each in positions)
    return Record(
        kind=case.kind,
        prompt=case.prompt,
        temperature=case.temperature,
        setting=setting,
        tokens=stats[0].new_tokens - 1,
        seconds=tuple(one.decode_s for one in stats),
        rounds=sum(one.target_forwards for one in stats),
        drafted=drafted,
        taken=taken,
        repeated=repeated,
        grams=seen_grams(runs[0].token_ids),
        target_s=sum(one.target_s for one in stats),
        draft_s=sum(one.draft_s for one in stats),
        control_s=sum(one.control_s for one in stats),
    )


def _llama_records(
    process: LlamaProcess, setting: str, cases: Sequence[Case], ids: Sequence[int], *, turns: int, repeated: float
) -> Iterator[Record]:
    """The same prompt on llama.cpp; its replies are its own, as its arithmetic is.

    Each turn has another seed, and a greedy reply is made once: some of its n-grams remember what they wrote, and would
    propose a whole reply that they have seen.
    """
    for case in cases:
        options: dict[str, Any] = {"min_p": 0.0, **case.options}
        tokens, seed = options.pop("max_new_tokens"), options["seed"]
        replies = [
            process.complete(ids, {**options, "n_predict": tokens, "seed": seed + 100_000 * turn})
            for turn in range(turns if case.temperature else 1)
        ]
        length = replies[0].tokens
        seconds = [reply.seconds * length / reply.tokens for reply in replies]
        yield Record(
            kind=case.kind,
            prompt=case.prompt,
            temperature=case.temperature,
            setting=f"{LLAMA}{setting}",
            tokens=length - 1,
            seconds=tuple(seconds if case.temperature else seconds * turns),
            rounds=sum(reply.rounds for reply in replies) * turns // len(replies),
            repeated=repeated,
        )


def run(arguments: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Measure what the options ask for, but for what an earlier run has left in the file of `--json`."""
    with ExitStack() as stack:
        model = stack.enter_context(load(arguments.directory, threads=arguments.threads))
        left_out = () if arguments.instructions else LEFT_OUT
        sampled = UNFILTERED if arguments.instructions else SAMPLED
        facts = {
            **setup(model.manifest, model.engine.name, model.threads),
            "tokens": arguments.tokens,
            "turns": arguments.turns,
            "before": arguments.before,
            "busy": arguments.busy,
            "left_out": [*left_out],
            "settings": arguments.settings,
            "sampled": sampled,
        }
        llama = _llama(arguments, model.threads)
        if llama:
            with llama[PLAIN_NAME]() as process:
                facts["versions"] |= {"xllamacpp": process.version}
        part = slice(arguments.skip, None if arguments.limit is None else arguments.skip + arguments.limit)
        kinds = [
            Scenario(each.name, tuple(behind_source(model, prompt, arguments.before) for prompt in each.prompts[part]))
            for each in (instructions() if arguments.instructions else scenarios(model, arguments.human_eval))
            if each.prompts[part] and (arguments.kinds is None or each.name in arguments.kinds)
        ]
        every = {setting_name(each): each for each in configurations(model, arguments.draft_model, left_out)}
        names = every if arguments.settings is None else (PLAIN_NAME, *arguments.settings, registry.AUTO)
        if unknown := [name for name in names if name not in every]:
            raise SystemExit(f"no such setting: {', '.join(unknown)}; there are {', '.join(every)}")
        chosen = [every[name] for name in dict.fromkeys(names)]
        records = _earlier(arguments.json, facts)
        replies = sum(len(kind.prompts) for kind in kinds) * len(chosen)
        done = len({(each.kind, each.prompt) for each in records}) * len(chosen)
        per_reply = len(TEMPERATURES) * arguments.turns
        bar = stack.enter_context(
            tqdm(total=replies * per_reply, initial=done * per_reply, unit="reply", leave=False, disable=None)
        )
        stack.enter_context(busy_processes(arguments.busy, BUSY_S))
        for found in measure(
            model,
            chosen,
            kinds,
            tokens=arguments.tokens,
            turns=arguments.turns,
            skip=arguments.skip,
            sampled=sampled,
            known=records,
            llama=llama,
            progress=bar.update,
        ):
            records += found
            if arguments.json is not None:
                write(arguments.json, records, facts)
    return records, facts


def _llama(arguments: argparse.Namespace, threads: int) -> Processes:
    """llama.cpp's settings on the GGUF file, if there is one."""
    if arguments.gguf is None:
        return {}
    ways = {PLAIN_NAME: LLAMA_PLAIN, **{kind.lower(): Speculation(kind) for kind in LLAMA_NGRAMS}}
    if arguments.mtp_gguf is not None:
        ways |= mtp_ways(arguments.mtp_gguf, arguments.mtp_drafts, P_MIN)
    return {name: partial(LlamaProcess, arguments.gguf, threads, way) for name, way in ways.items()}


def _earlier(path: Path | None, facts: Mapping[str, Any]) -> list[Record]:
    """The records of an earlier run in the same file.

    Raises:
        SystemExit: it was made under other conditions.
    """
    if path is None or not path.exists():
        return []
    records, before = merge([path])
    if before != facts:
        raise SystemExit(f"{path} was measured under other conditions: name another file")
    return records


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="a bundle")
    parser.add_argument("--instructions", action="store_true", help="12 prompts of each kind for a chat model")
    parser.add_argument("--human-eval", type=Path, metavar="FILE", help="HumanEval's tasks, JSON lines")
    parser.add_argument("--draft-model", type=Path, metavar="BUNDLE", help="measure this draft model too")
    parser.add_argument("--settings", nargs="*", metavar="NAME", help="besides plain and auto (default: all)")
    parser.add_argument(
        "--before", type=whole(0), default=0, metavar="N", help="characters of source before each prompt"
    )
    parser.add_argument("--busy", type=whole(0), default=0, metavar="N", help="busy processes beside the measurement")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="(default: all)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="prompts of each kind (default: all)")
    parser.add_argument("--skip", type=whole(0), default=0, metavar="N", help="first prompts of each kind to leave out")
    parser.add_argument("--tokens", type=whole(1), default=96, metavar="N", help="of a reply (default: 96)")
    parser.add_argument("--turns", type=whole(1), default=3, metavar="N", help="(default: 3)")
    add_threads(parser)
    parser.add_argument("--quick", action="store_true", help="one prompt of each kind, one turn, 32 tokens")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to this file too, or go on with it"
    )
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="print the tables of such files")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="measure llama.cpp with this file too")
    parser.add_argument("--mtp-gguf", type=Path, metavar="FILE", help="its MTP drafter")
    parser.add_argument(
        "--mtp-drafts", type=whole(1), nargs="+", default=[3], metavar="N", help="MTP tokens of a draft (default: 3)"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    if (arguments.directory is None) == (arguments.merge is None):
        parser.error("give either a bundle or --merge")
    if arguments.mtp_gguf is not None and arguments.gguf is None:
        parser.error("--mtp-gguf needs --gguf")
    if arguments.tokens < SHORTEST or arguments.turns < 1:
        parser.error(f"--tokens must be at least {SHORTEST}, --turns at least 1")
    print(report(*(merge(arguments.merge) if arguments.merge else run(arguments))))


if __name__ == "__main__":
    run_command(main)
