"""Results of `ondevice bench --scenarios` as tables, a legend, a verdict per scenario, CSV and a chart."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from ondevice.cli.bench.measure import Row
from ondevice.cli.bench.tables import WIDTH, acceptance_text, cut_table, table
from ondevice.generate.drafters import registry

WORTH = 1.03
"""Smallest speed-up over plain decoding for which a verdict recommends a drafter."""

POSITIONS = 4
"""Number of draft positions whose acceptance is shown, at most."""

STYLES = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash-dotted"}
"""Line styles of matplotlib, by drafter."""

FIELDS = (
    "scenario",
    "temperature",
    "engine",
    "threads",
    "drafter",
    "prompts",
    "new_tokens",
    "first_token_ms",
    "ms_per_token",
    "tokens_per_round",
    "acceptance",
    "idle_rounds",
    "speed_ups",
    "equal",
    "speed_up",
    "spread",
)
"""Figures of a `Row` that `-o json` and `-o csv` print."""


def report(rows: Sequence[Row], foot: str, *, wide: bool = False) -> str:
    """The tables, the legend, the lines of `foot` and the verdicts.

    `rows` are ordered by scenario and temperature, plain decoding first.
    """
    first = [row for row in rows if row.backend == rows[0].backend]
    names = list(dict.fromkeys(row.drafter for row in first if not row.is_plain))
    parts = [
        "Decoding speed over plain decoding:",
        _table(first, names, lambda plain, drafted: [f"{drafted[name].speed_up:.2f}" for name in names], wide=wide),
        "Share of the drafted tokens accepted, by position in the draft (1, 2, ...):",
        _acceptance_table(first, names, wide=wide),
        "Conditions:",
        _conditions_table(first, names[-1], wide=wide),
        _legend(rows),
    ]
    if len({row.backend for row in rows}) > 1:
        parts.insert(-1, _latency_table(rows))
    return "\n\n".join([*parts, foot, *_totals(first), "\n".join(verdicts(first))])


def conditions(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """How `rows` were measured, in one line."""
    plain = [row for row in rows if row.is_plain and row.backend == rows[0].backend]
    tokens, replies = sum(row.new_tokens for row in plain), sum(row.prompts for row in plain)
    return (
        f"{replies} replies of {tokens / replies:.0f} tokens on average, {facts['repeats']} repeats; seed "
        f"{facts['seed']}; {facts['kv_cache']} KV cache"
    )


def cases(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Row]]]:
    """For each scenario and temperature: the row of plain decoding, and the other rows by drafter."""
    for _, group in groupby(rows, lambda row: (row.scenario, row.temperature)):
        by_name = {row.drafter: row for row in group}
        yield by_name.pop(registry.NONE), by_name


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line per scenario: the fastest drafter at each temperature, or `none` where drafting does not pay."""
    lines = []
    for scenario, group in groupby(cases(rows), lambda case: case[0].scenario):
        choices = []
        for plain, drafted in group:
            best = max(drafted.values(), key=lambda row: row.speed_up)
            pays = best.speed_up >= WORTH and min(best.speed_ups) > 1.0
            choice = f"{best.drafter} {best.speed_up:.2f}x" if pays else f"none (best {best.speed_up:.2f}x)"
            choices.append(f"{choice} at T={plain.temperature:g}")
        lines.append(f"- {scenario}: {', '.join(choices)}")
    return lines


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV with a header line; the numbers of a list are separated by spaces."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    for row in rows:
        values = (getattr(row, name) for name in FIELDS)
        writer.writerow(
            " ".join(f"{each:.4g}" for each in value) if isinstance(value, tuple) else value for value in values
        )
    return out.getvalue()


def _table(
    rows: Sequence[Row],
    titles: Sequence[str],
    cells: Callable[[Row, dict[str, Row]], Sequence[str]],
    left: Collection[str] = (),
    *,
    wide: bool,
) -> str:
    """A table with a line for each of `cases`, whose cells `cells` makes of it, after scenario and temperature."""
    lines = [[plain.scenario, f"{plain.temperature:g}", *cells(plain, drafted)] for plain, drafted in cases(rows)]
    return cut_table(["scenario", "T", *titles], lines, {"scenario", *left}, key=2, wide=wide)


def _conditions_table(rows: Sequence[Row], last: str, *, wide: bool) -> str:
    """Times of plain decoding, the spread of the speed-ups, and figures of the drafter `last`."""
    return _table(
        rows,
        ["first ms", "plain ms", "spread", "tok/rd", "k=0", "equal"],
        lambda plain, drafted: [
            f"{plain.first_token_ms:.0f}",
            f"{plain.ms_per_token:.2f}",
            f"{max(row.spread for row in drafted.values()):.2f}",
            f"{drafted[last].tokens_per_round:.2f}",
            f"{drafted[last].idle_rounds:.0%}",
            f"{min(row.equal for row in drafted.values())}/{plain.prompts}",
        ],
        wide=wide,
    )


def _acceptance_table(rows: Sequence[Row], names: Sequence[str], *, wide: bool) -> str:
    """Acceptance by position, of the first `POSITIONS`."""
    methods = _methods(names)
    return _table(
        rows,
        methods,
        lambda plain, drafted: [acceptance_text(drafted[name].acceptance[:POSITIONS]) for name in methods],
        left=methods,
        wide=wide,
    )


def _methods(names: Sequence[str]) -> Sequence[str]:
    """The drafters without `auto`, the combination of all others, unless it is the only one."""
    return [name for name in names if name != registry.AUTO] or names


def _latency_table(rows: Sequence[Row]) -> str:
    """Medians over all scenarios for each backend."""
    cells = []
    for backend in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == backend]
        plain = [row for row in own if row.is_plain]
        drafted = [row for row in own if row.drafter == own[-1].drafter]
        cells.append(
            [
                *map(str, backend),
                f"{median(row.first_token_ms for row in plain):.1f}",
                f"{median(row.ms_per_token for row in plain):.2f}",
                f"{median(row.ms_per_token for row in drafted):.2f}",
                f"{median(row.speed_up for row in drafted):.2f}",
            ]
        )
    titles = ["engine", "threads", "first ms", "plain ms", "drafts ms", "speed-up"]
    return table(titles, cells, left={"engine"})


def _legend(rows: Sequence[Row]) -> str:
    """The meaning of the columns. The last drafter is `auto`, where there are several."""
    several = len({row.backend for row in rows}) > 1
    last = rows[-1].drafter
    return "\n".join(
        textwrap.fill(line, WIDTH)
        for line in [
            "T: temperature; 0 always takes the most likely token, the other value is the model's default.",
            "first ms: time to the first token. plain ms: time per further token without drafts.",
            f"Speeds are medians of {len(rows[0].speed_ups)} repeats; spread: largest half range of a drafter's "
            "speed-ups.",
            "equal: prompts with the tokens of plain decoding, with every drafter.",
            f"tok/rd, k=0 ({last}): tokens per round; share of rounds without a draft.",
            *([f"engine table: medians over all scenarios; drafts: {last}"] if several else []),
        ]
    )


def _totals(rows: Sequence[Row]) -> list[str]:
    """The smallest speed-up of `auto` over plain decoding and over the best single drafter, if it was measured."""
    found = [
        (drafted[registry.AUTO], max(row.speed_up for name, row in drafted.items() if name != registry.AUTO), plain)
        for plain, drafted in cases(rows)
        if registry.AUTO in drafted and len(drafted) > 1
    ]
    if not found:
        return []
    slowest, _, one = min(found, key=lambda each: each[0].speed_up)
    auto, single, other = min(found, key=lambda each: each[0].speed_up / max(each[1], 1.0))
    return [
        f"auto at its worst: {slowest.speed_up:.2f} of plain decoding ({one.scenario}, T={one.temperature:g}), "
        f"{auto.speed_up / max(single, 1.0):.2f} of\nthe best single setting ({other.scenario}, "
        f"T={other.temperature:g}), plain decoding included."
    ]


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a chart: speed-ups with their spread by scenario and temperature on the left; on the right, acceptance by
    position, a line per scenario and temperature for each drafter except `auto`.
    """
    from matplotlib.figure import Figure

    found = list(cases([row for row in rows if row.backend == rows[0].backend]))
    names = list(found[0][1])
    figure = Figure(figsize=(13, 1.5 + 0.22 * len(found) * (len(names) + 1)), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    height = 1.0 / (len(names) + 1)
    for number, name in enumerate(names):
        places = [index + number * height for index in range(len(found))]
        drawn = [drafted[name] for _, drafted in found]
        speeds, spreads = [row.speed_up for row in drawn], [row.spread for row in drawn]
        bars.barh(places, speeds, height, xerr=spreads, label=name, error_kw={"lw": 0.8})
    bars.axvline(1.0, color="0.4", linestyle=":")
    labels = [f"{plain.scenario}, T={plain.temperature:g}" for plain, _ in found]
    bars.set_yticks([index + height * (len(names) - 1) / 2 for index in range(len(found))], labels)
    bars.invert_yaxis()
    bars.set_xlabel("decoding speed over plain decoding")
    bars.legend(fontsize="small")
    methods = _methods(names)
    for style, name in zip(STYLES, methods, strict=False):
        for number, (plain, drafted) in enumerate(found):
            shares = drafted[name].acceptance
            label = f"{plain.scenario}, T={plain.temperature:g}" if style == "-" else None
            lines.plot(range(1, len(shares) + 1), shares, style, color=f"C{number % 10}", lw=1, label=label)
    drawn_as = [f"{name} {style}" for name, style in zip(methods, STYLES.values(), strict=False)]
    lines.set_xlabel("position in the draft; " + ", ".join(drawn_as))
    lines.set_ylabel("share of drafted tokens accepted")
    lines.set_ylim(0, 1)
    lines.legend(fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
