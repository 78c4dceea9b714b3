"""Tables of `benchmarks.drafts.real_text`: records of replies, their statistics, and a report in Markdown.

The unit of the statistics is the prompt: means are geometric, and intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ondevice.cli.bench.tables import acceptance_text, setup_line, table, versions_line
from ondevice.generate.drafters import registry

TEMPERATURES = (0.0, 1.0)
GRAM, REPETITIVE = 8, 0.25
SHORTEST = 16
"""A reply with fewer tokens is left out, and counted: its speed would be that of a few rounds."""

STALL = 3
"""A turn that takes more than this many times the fastest one of the same reply is named below the tables."""

RESAMPLES = 2000
POSITIONS = 6
"""Positions of a draft whose acceptance is shown."""

PLAIN_NAME, DRAFT_MODEL, LLAMA = "plain", "draft model", "llama.cpp "
"""Names of settings, and how those of llama.cpp begin."""
PROFILED = (PLAIN_NAME, "mtp", DRAFT_MODEL, registry.AUTO)
"""Settings whose time is shown by its parts."""


@dataclass(frozen=True)
class Record:
    """A prompt in one setting.

    prompt : number within its kind
    tokens : of the reply after the first, which comes with the prefill
    seconds : of decoding, one for each turn
    rounds : forwards of the target, over all turns
    drafted, taken : over all turns, drafted tokens at position 1, 2, ... of a draft, and those of them that were
        accepted; empty without such figures (llama.cpp)
    repeated : share of the prompt's greedy reply that repeats itself, of `repeated_share`
    grams : share of the 4-grams of the plain reply at this temperature that occurred in it before
    target_s, draft_s, control_s : sums over the turns of the times of `Stats`; zero for llama.cpp
    """

    kind: str
    prompt: int
    temperature: float
    setting: str
    tokens: int
    seconds: tuple[float, ...]
    rounds: int
    drafted: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    repeated: float = 0.0
    grams: float = 0.0
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


def repeated_share(token_ids: Sequence[int]) -> float:
    """Share of tokens that lie in a gram of GRAM tokens that occurs more than once."""
    grams = _grams(token_ids, GRAM)
    counts = Counter(grams)
    inside = {start + place for start, gram in enumerate(grams) if counts[gram] > 1 for place in range(GRAM)}
    return len(inside) / len(token_ids) if token_ids else 0.0


def seen_grams(token_ids: Sequence[int]) -> float:
    """Share of 4-grams that occurred before."""
    grams = _grams(token_ids, 4)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _grams(token_ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]


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
    """A mean with its interval, as in `1.52 [1.31, 1.75]`; without the interval for one value."""
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
        rounds, turns = sum(each.rounds for each in these), len(these[0].seconds)
        first = acceptance(these)[:1]
        lines.append(
            [
                setting,
                str(len(these)),
                interval_text([each.tokens_per_s for each in these], digits=1),
                interval_text(list(ratios.values())),
                interval_text([ratio for case, ratio in ratios.items() if case in varied]),
                f"{turns * sum(each.tokens for each in these) / rounds:.2f}",
                f"{first[0]:.0%}" if first else "",
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


def acceptance(records: Sequence[Record]) -> tuple[float, ...]:
    """Share of the drafted tokens at position 1, 2, ... of a draft that was accepted, over all these records."""
    drafted, taken = (
        [sum(each) for each in zip_longest(*(getattr(record, name) for record in records), fillvalue=0)]
        for name in ("drafted", "taken")
    )
    return tuple(each / of for each, of in zip(taken, drafted, strict=True) if of)


def kinds_table(records: Sequence[Record]) -> str:
    """Markdown: `auto` compared with the best single drafter and length and with llama.cpp's best setting, if it was
    measured, by kind and temperature.
    """
    lines, titles = [], ["kind", "T", "prompts", "greedy repeats", "4-grams seen before", "plain tok/s"]
    titles += ["best setting", "its speed-up", "auto", "auto / best"]
    with_llama = any(record.setting.startswith(LLAMA) for record in records)
    for kind in dict.fromkeys(record.kind for record in records):
        for temperature in TEMPERATURES:
            own = [record for record in records if (record.kind, record.temperature) == (kind, temperature)]
            if not own:
                continue
            names = dict.fromkeys(record.setting for record in own)
            found = {name: list(speed_ups(own, name).values()) for name in names}
            means = {name: geometric(values)[0] for name, values in found.items()}
            auto = means[registry.AUTO]
            single = [name for name in means if not name.startswith((registry.AUTO, LLAMA))]
            best = max(single, key=lambda name: means[name])
            plain = [record for record in own if record.setting == PLAIN_NAME]
            lines.append(
                [
                    kind,
                    f"{temperature:g}",
                    str(len(plain)),
                    f"{np.mean([record.repeated for record in plain]):.0%}",
                    f"{np.mean([record.grams for record in plain]):.0%}",
                    f"{geometric([record.tokens_per_s for record in plain])[0]:.1f}",
                    best,
                    f"{means[best]:.2f}",
                    interval_text(found[registry.AUTO]),
                    f"{auto / means[best]:.2f}",
                ]
            )
            if with_llama:
                other = max((name for name in means if name.startswith(LLAMA)), key=lambda name: means[name])
                lines[-1] += [other.removeprefix(LLAMA), f"{auto / means[other]:.2f}"]
    titles += ["llama.cpp's best", "auto / llama.cpp"] if with_llama else []
    return table(titles, lines, left={"kind", "best setting", "llama.cpp's best"})


def positions_table(records: Sequence[Record]) -> str:
    """Markdown: the acceptance of drafted tokens by their position in the draft, for each setting that drafts."""
    lines = []
    for setting in dict.fromkeys(record.setting for record in records):
        own = [record for record in records if record.setting == setting]
        shares = [acceptance([each for each in own if each.temperature == one]) for one in TEMPERATURES]
        if any(shares):
            lines.append([setting, *(acceptance_text(each[:POSITIONS]) for each in shares)])
    titles = ["setting", *(f"T = {temperature:g}" for temperature in TEMPERATURES)]
    return table(titles, lines, left=titles)


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
    parts += [f"Share of the drafted tokens accepted, by position in the draft (1 to {POSITIONS}):", ""]
    parts += [positions_table(records), ""]
    parts += ["Where a round's time goes, in ms: a forward of one row, as in plain decoding; what further rows add;"]
    parts += ["choosing the target's tokens; making drafts; deciding about them and learning from verdicts:", ""]
    parts += [profile_table(records), ""]
    parts += [
        "Speed-ups are over plain decoding of ondevice: geometric means over prompts, 95 % intervals.",
        *([f"Left out, as added layers do nothing: {', '.join(facts['left_out'])}."] if facts.get("left_out") else []),
        f"Left out, with fewer than {SHORTEST} tokens: {len(everything) - len(records)} of {len(everything)} replies.",
        f"Replies of at most {facts['tokens']} tokens, {facts['turns']} turns; sampled with top-k "
        f"{facts['sampled']['top_k'] or 'off'}, top-p {facts['sampled']['top_p']:g} and a seed for each prompt. All "
        "replies of ondevice equal plain decoding's.",
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
        SystemExit: a file is none of `write`, or the runs were made under different conditions, or have a prompt in
            common.
    """
    records: list[Record] = []
    facts: dict[str, Any] = {}
    for path in paths:
        try:
            stored = json.loads(path.read_text("utf-8"))
            own, found = stored["facts"], [_read(each) for each in stored["records"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(f"{path} was not written by `benchmarks.drafts.real_text --json`") from error
        if facts and own != facts:
            raise SystemExit(f"{path} was measured under other conditions than {paths[0]}")
        facts = own
        records += found
    if len({(record.case, record.setting) for record in records}) < len(records):
        raise SystemExit("the files have prompts in common")
    return records, facts


def _read(stored: Mapping[str, Any]) -> Record:
    fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    return Record(**fields)


def write(path: Path, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
    """Write a JSON file for `merge`; an older one there is replaced at once."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"facts": facts, "records": [asdict(record) for record in records]}), "utf-8")
    partial.replace(path)
