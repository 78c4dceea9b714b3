"""Speed of every drafter on real text: prompts of seven kinds, and HumanEval's, greedy and sampled.

    python -m benchmarks.widened DIRECTORY --head-bits 4 --draft-model DRAFT
    python -m benchmarks.real_text DIRECTORY [--human-eval FILE.jsonl] [--turns 3] [--kinds chat summary] [--json FILE]
    python -m benchmarks.real_text DIRECTORY --draft-model DRAFT --llama-server PROGRAM --gguf FILE [--mtp-gguf FILE]
    python -m benchmarks.real_text DIRECTORY --settings mtp --before 27000 --busy 1    # a long context, a busy core
    python -m benchmarks.real_text --merge FILE FILE     # the tables of several runs, as of one

Bundles of `benchmarks.widened` have the reference pair's text and acceptance, and the cost of E2B's shape. Drafters
that leave layers out are not measured: most of the widened layers add nothing, so that such drafts would look better
than they are. Every reply has to be that of plain decoding; if one is not, the run fails.

All settings run a prompt before the next one starts, each time beginning with another setting, and are compared turn by
turn. The unit of the statistics is the prompt: means are geometric, and intervals are bootstrapped over prompts.

The pair's greedy text often repeats itself, which flatters every drafter. So all means are also taken over the prompts
whose greedy reply does not: less than a quarter of its tokens lie in an 8-gram that occurs more than once in it.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.busy import busy_processes
from benchmarks.llama_server import Completion, LlamaServer, add_llama_server, speculative, version
from ondevice import load
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench.measure import (
    PLAIN,
    SCENARIOS,
    Configuration,
    Run,
    Scenario,
    Variant,
    acceptance_by_position,
    load_scenarios,
    run_in_turns,
)
from ondevice.cli.bench.tables import setup, setup_line, table, versions_line
from ondevice.errors import OndeviceError
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.mtp import MtpDrafter
from ondevice.generate.drafters.protocol import Drafter
from ondevice.text.prompt_file import load_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords
    from ondevice.text.codec import Prompt

HUMAN_EVAL = "HumanEval"
TEMPERATURES = (0.0, 1.0)
TOP_K, TOP_P = 64, 0.95

LEFT_OUT = ("self", "swift", "early-exit")
"""Drafters that run a part of the layers."""
LENGTHS = ("2", "4", "6", "8")
"""Constant numbers of tokens in MTP drafts, as trees and as chains."""

GRAM, REPETITIVE = 8, 0.25
SHORTEST = 16
"""A reply with fewer tokens is left out, and counted: its speed would be that of a few rounds."""

STALL = 3
"""A turn that takes more than this many times the fastest one of the same reply is named below the tables."""

RESAMPLES = 2000
BUSY_S = 7200
"""Busy processes end after this time at the latest."""
PLAIN_NAME, DRAFT_MODEL = "plain", "draft model"
PROFILED = (PLAIN_NAME, "mtp", DRAFT_MODEL, registry.AUTO)
"""Settings whose time is shown by its parts."""


@dataclass(frozen=True)
class Record:
    """A prompt in one setting.

    prompt : number within its kind
    tokens : of the reply after the first, which comes with the prefill
    seconds : of decoding, one for each turn
    rounds, drafts, taken : sums over the turns: forwards of the target; drafts, and those whose first token was
        accepted. Without figures by position (llama.cpp), `drafts` and `taken` are zero
    repeated : share of the prompt's greedy reply that repeats itself, of `repeated_share`
    target_s, draft_s, control_s : sums over the turns of the times of `Stats`; zero for llama.cpp
    """

    kind: str
    prompt: int
    temperature: float
    setting: str
    tokens: int
    seconds: tuple[float, ...]
    rounds: int
    drafts: int
    taken: int
    repeated: float
    target_s: float = 0.0
    draft_s: float = 0.0
    control_s: float = 0.0

    @property
    def case(self) -> tuple[str, int, float]:
        return self.kind, self.prompt, self.temperature

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)

    def speed_up(self, plain: Record) -> float:
        """Speed relative to plain decoding of the same prompt: median over the turns."""
        pairs = zip(self.seconds, plain.seconds, strict=True)
        return median((other / plain.tokens) / (own / self.tokens) for own, other in pairs)


def repeated_share(token_ids: Sequence[int], size: int = GRAM) -> float:
    """Share of tokens that lie in an n-gram of this size that occurs more than once."""
    grams = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    counts = Counter(grams)
    inside = {start + place for start, gram in enumerate(grams) if counts[gram] > 1 for place in range(size)}
    return len(inside) / len(token_ids) if token_ids else 0.0


@dataclass(frozen=True)
class Chains(Configuration):
    """MTP drafts without siblings."""

    own: Drafter = field(compare=False)

    def options(self) -> GenerationKeywords:
        return {**super().options(), "drafter": self.own}


def configurations(model: Model, draft_model: Path | None = None) -> list[Configuration]:
    """Plain decoding, every measured drafter with lengths of its own choice, MTP with constant ones, and `auto`.

    Args:
        draft_model: a bundle, measured alone and beside all of `auto`.
    """
    found = [name for name in registry.methods(model.engine) if name not in LEFT_OUT]
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


def behind_source(model: Model, prompt: Prompt, characters: int) -> Prompt:
    """The token ids of a prompt behind this many characters of Python source."""
    if not characters:
        return prompt
    start, *ids = model.encode(prompt)
    source = model.encode(inspect.getsource(argparse)[:characters])
    return [start, *source[1:], *ids]


Servers = Mapping[str, LlamaServer]


def measure(
    model: Model,
    chosen: Sequence[Configuration],
    kinds: Iterable[Scenario],
    *,
    tokens: int,
    turns: int,
    skip: int = 0,
    servers: Servers | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """Measure every prompt in every setting, greedy and sampled.

    Args:
        chosen: the settings; plain decoding is one of them.
        tokens: of a reply, at most.
        skip: number of each kind's prompts that come before the given ones, for the records.
        servers: llama.cpp's, by setting.
        progress: called after every reply of ours.

    Raises:
        SystemExit: a reply differs from that of plain decoding.
    """
    variants = [Variant(model, each) for each in chosen]
    for kind in kinds:
        for number, prompt in enumerate(kind.prompts, skip):
            start = number % len(variants)
            rotated = [*variants[start:], *variants[:start]]
            repeated = 0.0
            for temperature in TEMPERATURES:
                case = _case(kind.name, number, temperature, tokens)
                found = list(run_in_turns(rotated, [prompt], case.options, turns, progress))
                runs = {setting_name(each.configuration): [turn[each] for turn in found] for each in variants}
                check_equal(f"{kind.name}, prompt {number}", runs)
                if temperature == 0:
                    repeated = repeated_share(runs[PLAIN_NAME][0].token_ids)
                for setting, replies in runs.items():
                    yield _record(case, setting, replies, repeated)
                if servers:
                    ids = model.encode(prompt)
                    yield from _of_servers(servers, case, ids, turns=turns, repeated=repeated)


class Case(NamedTuple):
    """A prompt, by its number among those of its kind, at a temperature; `options` are keywords of `Model.stream`."""

    kind: str
    prompt: int
    temperature: float
    options: GenerationKeywords


def _case(kind: str, prompt: int, temperature: float, tokens: int) -> Case:
    """A prompt at a temperature. Each prompt has a seed of its own: with a common one, their draws would be alike."""
    seed = 1000 * [*SCENARIOS, HUMAN_EVAL].index(kind) + prompt
    options: GenerationKeywords = {"max_new_tokens": tokens, "temperature": temperature, "seed": seed}
    if temperature:
        options |= {"top_k": TOP_K, "top_p": TOP_P}
    return Case(kind, prompt, temperature, options)


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
    drafts = sum(one.num_drafts for one in stats)
    first = acceptance_by_position(runs)[:1]
    return Record(
        kind=case.kind,
        prompt=case.prompt,
        temperature=case.temperature,
        setting=setting,
        tokens=stats[0].new_tokens - 1,
        seconds=tuple(one.decode_s for one in stats),
        rounds=sum(one.target_forwards for one in stats),
        drafts=drafts,
        taken=round(drafts * first[0]) if first else 0,
        repeated=repeated,
        target_s=sum(one.target_s for one in stats),
        draft_s=sum(one.draft_s for one in stats),
        control_s=sum(one.control_s for one in stats),
    )


def _of_servers(servers: Servers, case: Case, ids: Sequence[int], *, turns: int, repeated: float) -> Iterator[Record]:
    """The same prompt on llama.cpp, in turns as well; its replies are its own, as its arithmetic is."""
    options: dict[str, Any] = {"n_predict": case.options["max_new_tokens"], "temperature": case.temperature}
    options |= {"seed": case.options["seed"]}
    options |= {"top_k": TOP_K, "top_p": TOP_P, "min_p": 0.0} if case.temperature else {}
    found: dict[str, list[Completion]] = {setting: [] for setting in servers}
    for turn in range(turns):
        order = list(servers)
        for setting in [*order[turn % len(order) :], *order[: turn % len(order)]]:
            found[setting].append(servers[setting].complete(ids, options))
    for setting, replies in found.items():
        yield Record(
            kind=case.kind,
            prompt=case.prompt,
            temperature=case.temperature,
            setting=f"llama.cpp {setting}",
            tokens=len(replies[0].token_ids) - 1,
            seconds=tuple(reply.seconds for reply in replies),
            rounds=sum(reply.rounds for reply in replies),
            drafts=0,
            taken=0,
            repeated=repeated,
        )


# The tables.


def long_enough(records: Sequence[Record]) -> list[Record]:
    """The records without short replies; llama.cpp's also have to have a plain reply of ours to be compared with."""
    known = {each.case for each in records if each.setting == PLAIN_NAME and each.tokens + 1 >= SHORTEST}
    return [record for record in records if record.case in known and record.tokens + 1 >= SHORTEST]


def geometric(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean, and the ends of its 95 % interval over resampled values."""
    logs = np.log(values)
    drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def interval_text(values: Sequence[float], digits: int = 2) -> str:
    """Such as `1.52 [1.31, 1.75]`; without the interval for one value."""
    if not values:
        return "-"
    mean, low, high = (f"{value:.{digits}f}" for value in geometric(values))
    return mean if len(values) == 1 else f"{mean} [{low}, {high}]"


def speed_ups(records: Sequence[Record], setting: str) -> dict[tuple[str, int, float], float]:
    """Speed-ups of a setting by case."""
    plain = {record.case: record for record in records if record.setting == PLAIN_NAME}
    return {record.case: record.speed_up(plain[record.case]) for record in records if record.setting == setting}


def settings_table(records: Sequence[Record], temperature: float) -> str:
    """Markdown: a line for each setting, over all prompts."""
    own = [record for record in records if record.temperature == temperature]
    varied = {record.case for record in own if record.repeated < REPETITIVE}
    lines = []
    for setting in dict.fromkeys(record.setting for record in own):
        these, ratios = [record for record in own if record.setting == setting], speed_ups(own, setting)
        drafts, rounds = sum(each.drafts for each in these), sum(each.rounds for each in these)
        turns = len(these[0].seconds)
        lines.append(
            [
                setting,
                str(len(these)),
                interval_text([each.tokens_per_s for each in these], digits=1),
                interval_text(list(ratios.values())),
                interval_text([ratio for case, ratio in ratios.items() if case in varied]),
                f"{turns * sum(each.tokens for each in these) / rounds:.2f}",
                f"{sum(each.taken for each in these) / drafts:.0%}" if drafts else "",
            ]
        )
    titles = [
        "setting",
        "prompts",
        "tokens/s",
        "speed-up",
        "where the greedy reply does not repeat itself",
        "tokens/round",
    ]
    return table([*titles, "first drafts accepted"], lines, left={"setting"})


def kinds_table(records: Sequence[Record]) -> str:
    """Markdown: `auto` compared with the best single drafter and length, by kind and temperature."""
    lines = []
    ours = [record for record in records if not record.setting.startswith("llama.cpp")]
    for kind in dict.fromkeys(record.kind for record in ours):
        for temperature in TEMPERATURES:
            own = [record for record in ours if (record.kind, record.temperature) == (kind, temperature)]
            if not own:
                continue
            names = dict.fromkeys(record.setting for record in own)
            means = {name: geometric(list(speed_ups(own, name).values()))[0] for name in names}
            auto = means[registry.AUTO]
            best = max((name for name in means if not name.startswith(registry.AUTO)), key=lambda name: means[name])
            plain = [record for record in own if record.setting == PLAIN_NAME]
            lines.append(
                [
                    kind,
                    f"{temperature:g}",
                    str(len(plain)),
                    f"{np.mean([record.repeated for record in plain]):.0%}",
                    f"{geometric([record.tokens_per_s for record in plain])[0]:.1f}",
                    best,
                    f"{means[best]:.2f}",
                    f"{auto:.2f}",
                    f"{auto / means[best]:.2f}",
                ]
            )
    titles = ["kind", "T", "prompts", "greedy repeats", "plain tok/s", "best setting", "its speed-up", "auto"]
    return table([*titles, "auto / best"], lines, left={"kind", "best setting"})


def profile_table(records: Sequence[Record]) -> str:
    """Markdown: milliseconds of a round by what they were spent on, over all prompts."""
    lines = []
    for temperature in TEMPERATURES:
        own = [record for record in records if record.temperature == temperature]
        one_row = 0.0
        for setting in (name for name in PROFILED if any(record.setting == name for record in own)):
            these = [record for record in own if record.setting == setting]
            rounds = sum(each.rounds for each in these)
            whole = sum(sum(each.seconds) for each in these)
            parts = [sum(getattr(each, part) for each in these) for part in ("target_s", "draft_s", "control_s")]
            target, drafting, control, total = (1e3 * part / rounds for part in (*parts, whole))
            one_row = one_row or target
            tokens = sum(len(each.seconds) * each.tokens for each in these) / rounds
            spent = (one_row, target - one_row, total - target - drafting - control, drafting, control, total)
            lines.append([f"{temperature:g}", setting, f"{tokens:.2f}", *(f"{each:.2f}" for each in spent)])
    titles = ["T", "setting", "tokens/round", "one row", "further rows", "choosing tokens", "drafting", "deciding"]
    return table([*titles, "a round, ms"], lines, left={"setting"})


def spread_lines(records: Sequence[Record]) -> list[str]:
    """How much the turns of a reply differ, and the replies that took much longer in one turn than in another."""
    ratios = [max(record.seconds) / min(record.seconds) - 1 for record in records]
    middle, upper = np.quantile(ratios, (0.5, 0.9))
    lines = [
        f"A reply's slowest turn takes {middle:.0%} longer than its fastest in the median, {upper:.0%} at the 90th "
        "percentile."
    ]
    stalls = [
        f"{record.setting} {max(record.seconds):.0f} s ({record.kind}, T={record.temperature:g})"
        for record, ratio in zip(records, ratios, strict=True)
        if ratio + 1 > STALL
    ]
    if stalls:
        lines += [f"More than {STALL} times as long, and not left out: {', '.join(stalls)}."]
    return lines


def report(records: Sequence[Record], facts: Mapping[str, Any]) -> str:
    """Markdown: all settings greedy and sampled, `auto` by kind, and the conditions."""
    everything, records = records, long_enough(records)
    if not records:
        return f"no reply had {SHORTEST} tokens"
    parts = []
    for temperature in TEMPERATURES:
        own = {record.case: record for record in records if record.temperature == temperature}
        if not own:
            continue
        varied = sum(record.repeated < REPETITIVE for record in own.values())
        parts += [f"Temperature {temperature:g}, {len(own)} prompts, {varied} without repetition:", ""]
        parts += [settings_table(records, temperature), ""]
    parts += ["`auto` and the best single drafter and length of each kind, plain decoding included. The best is chosen"]
    parts += ["afterwards, on the same replies, which favours it:", ""]
    parts += [kinds_table(records), ""]
    parts += ["Where a round's time goes, in ms: a forward of one row, as in plain decoding; what further rows add;"]
    parts += ["choosing the target's tokens; making drafts; deciding about them and learning from verdicts:", ""]
    parts += [profile_table(records), ""]
    parts += [
        "Speed-ups are over plain decoding of ondevice: geometric means over prompts, 95 % intervals.",
        f"Left out, as added layers do nothing and drafts without them cost little: {', '.join(LEFT_OUT)}.",
        f"Left out, with fewer than {SHORTEST} tokens: {len(everything) - len(records)} of {len(everything)} replies.",
        f"Replies of at most {facts['tokens']} tokens, {facts['turns']} turns; sampled with top-k {TOP_K}, top-p "
        f"{TOP_P:g} and a seed for each prompt. All replies of ondevice equal plain decoding's.",
        *([f"Behind {facts['before']} characters of Python source."] if facts.get("before") else []),
        *([f"Beside {facts['busy']} busy processes."] if facts.get("busy") else []),
        *spread_lines(records),
        setup_line(dict(facts)),
        versions_line(dict(facts)),
    ]
    return "\n".join(parts)


def merge(paths: Sequence[Path]) -> tuple[list[Record], dict[str, Any]]:
    """The records of several runs' JSON files, and the facts of the first.

    Raises:
        SystemExit: the runs were made under different conditions, or have a prompt in common.
    """
    records: list[Record] = []
    facts: dict[str, Any] = {}
    for path in paths:
        stored = json.loads(path.read_text("utf-8"))
        if facts and stored["facts"] != facts:
            raise SystemExit(f"{path} was measured under other conditions than {paths[0]}")
        facts = stored["facts"]
        records += [Record(**{**each, "seconds": tuple(each["seconds"])}) for each in stored["records"]]
    if len({(record.case, record.setting) for record in records}) < len(records):
        raise SystemExit("the files have prompts in common")
    return records, facts


def run(arguments: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    """Measure what the options ask for."""
    with ExitStack() as stack:
        model = stack.enter_context(load(arguments.directory, threads=arguments.threads))
        facts = {
            **setup(model.manifest, model.engine.name, model.threads),
            "tokens": arguments.tokens,
            "turns": arguments.turns,
            "before": arguments.before,
            "busy": arguments.busy,
        }
        servers = {}
        if arguments.llama_server is not None:
            facts["versions"] |= {"llama.cpp": version(arguments.llama_server)}
            for name, options in speculative(arguments.mtp_gguf, arguments.mtp_drafts).items():
                server = LlamaServer(arguments.llama_server, arguments.gguf, model.threads, options)
                servers[name] = stack.enter_context(server)
        part = slice(arguments.skip, None if arguments.limit is None else arguments.skip + arguments.limit)
        kinds = [
            Scenario(each.name, tuple(behind_source(model, prompt, arguments.before) for prompt in each.prompts[part]))
            for each in scenarios(model, arguments.human_eval)
            if each.prompts[part] and (arguments.kinds is None or each.name in arguments.kinds)
        ]
        every = {setting_name(each): each for each in configurations(model, arguments.draft_model)}
        names = every if arguments.settings is None else (PLAIN_NAME, *arguments.settings, registry.AUTO)
        if unknown := [name for name in names if name not in every]:
            raise SystemExit(f"no such setting: {', '.join(unknown)}; there are {', '.join(every)}")
        chosen = [every[name] for name in dict.fromkeys(names)]
        replies = sum(len(kind.prompts) for kind in kinds) * len(chosen)
        total = replies * len(TEMPERATURES) * arguments.turns
        bar = stack.enter_context(tqdm(total=total, unit="reply", leave=False, disable=None))
        stack.enter_context(busy_processes(arguments.busy, BUSY_S))
        records = list(
            measure(
                model,
                chosen,
                kinds,
                tokens=arguments.tokens,
                turns=arguments.turns,
                skip=arguments.skip,
                servers=servers,
                progress=bar.update,
            )
        )
    return records, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="a bundle")
    parser.add_argument("--human-eval", type=Path, metavar="FILE", help="HumanEval's tasks, JSON lines")
    parser.add_argument("--draft-model", type=Path, metavar="BUNDLE", help="measure this draft model too")
    parser.add_argument("--settings", nargs="*", metavar="NAME", help="besides plain and auto (default: all)")
    parser.add_argument("--before", type=int, default=0, metavar="N", help="characters of source before each prompt")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside the measurement")
    parser.add_argument("--kinds", nargs="+", choices=(*SCENARIOS, HUMAN_EVAL), metavar="KIND", help="(default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of each kind (default: all)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="first prompts of each kind to leave out")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of a reply (default: 96)")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the physical cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="print the tables of such files")
    add_llama_server(parser)
    arguments = parser.parse_args()
    if (arguments.directory is None) == (arguments.merge is None):
        parser.error("give either a bundle or --merge")
    if (arguments.llama_server is None) != (arguments.gguf is None):
        parser.error("--llama-server and --gguf belong together")
    if arguments.tokens < SHORTEST or arguments.turns < 1:
        parser.error(f"--tokens must be at least {SHORTEST}, --turns at least 1")
    try:
        records, facts = merge(arguments.merge) if arguments.merge else run(arguments)
    except OndeviceError as error:
        raise SystemExit(str(error)) from error
    if arguments.json is not None:
        stored = {"facts": facts, "records": [asdict(record) for record in records]}
        arguments.json.write_text(json.dumps(stored), "utf-8")
    print(report(records, facts))


if __name__ == "__main__":
    main()
