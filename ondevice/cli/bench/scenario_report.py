"""Results of `ondevice bench --scenarios` as tables, a legend, a verdict per scenario, CSV, JSON and a chart."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from ondevice.cli.bench.scenarios import ScenarioRow
from ondevice.cli.bench.tables import acceptance_text, table
from ondevice.generate.drafters import registry

WORTH = 1.03
"""Smallest speed-up over plain decoding for which a verdict recommends a drafter."""

POSITIONS = 4
"""Number of draft positions whose acceptance is shown, at most."""

WIDTH = 100
"""Largest width of the acceptance table, in characters."""

STYLES = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash-dotted"}
"""Line styles of matplotlib, by drafter."""


def report(rows: Sequence[ScenarioRow], foot: Sequence[str]) -> str:
    """The tables, the legend and the verdicts.

    Args:
        rows: by scenario and temperature, plain decoding first.
        foot: lines about the conditions of the measurement.
    """
    first = [row for row in rows if row.backend == rows[0].backend]
    names = list(dict.fromkeys(row.drafter for row in first if row.drafter != registry.NONE))
    parts = [
        "Decoding speed over plain decoding:",
        _speed_table(first, names),
        "Share of the drafted tokens accepted, by position in the draft (1, 2, ...):",
        _acceptance_table(first, names),
        "Conditions:",
        _conditions_table(first, names[-1]),
        _legend(rows),
    ]
    if len({row.backend for row in rows}) > 1:
        parts.insert(-1, _latency_table(rows))
    return "\n\n".join([*parts, "\n".join(foot), *_totals(first), "\n".join(verdicts(first))])


def cases(rows: Sequence[ScenarioRow]) -> Iterator[tuple[ScenarioRow, dict[str, ScenarioRow]]]:
    """For each scenario and temperature: the row of plain decoding, and the other rows by drafter."""
    for _, group in groupby(rows, lambda row: (row.scenario, row.temperature)):
        by_name = {row.drafter: row for row in group}
        yield by_name.pop(registry.NONE), by_name


def verdicts(rows: Sequence[ScenarioRow]) -> list[str]:
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


def as_csv(rows: Sequence[ScenarioRow]) -> str:
    """The rows as CSV with a header line; the numbers of a list are separated by spaces."""
    out = io.StringIO()
    lines = [as_dict(row) for row in rows]
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        words = {
            name: " ".join(f"{each:.4g}" for each in value) if isinstance(value, tuple) else value
            for name, value in line.items()
        }
        writer.writerow(words)
    return out.getvalue()


def as_dict(row: ScenarioRow) -> dict[str, Any]:
    """The fields of a row, its speed-up and its spread."""
    return {**vars(row), "speed_up": row.speed_up, "spread": row.spread}


def _speed_table(rows: Sequence[ScenarioRow], names: Sequence[str]) -> str:
    cells = [
        [plain.scenario, f"{plain.temperature:g}", *(f"{drafted[name].speed_up:.2f}" for name in names)]
        for plain, drafted in cases(rows)
    ]
    return table(["scenario", "T", *names], cells, left={"scenario"})


def _conditions_table(rows: Sequence[ScenarioRow], last: str) -> str:
    """Times of plain decoding, the spread of the speed-ups, and figures of the drafter `last`."""
    cells = [
        [
            plain.scenario,
            f"{plain.temperature:g}",
            f"{plain.first_token_ms:.0f}",
            f"{plain.ms_per_token:.2f}",
            f"{max(row.spread for row in drafted.values()):.2f}",
            f"{drafted[last].tokens_per_round:.2f}",
            f"{drafted[last].idle_rounds:.0%}",
            f"{min(row.equal for row in drafted.values())}/{plain.prompts}",
        ]
        for plain, drafted in cases(rows)
    ]
    titles = ["scenario", "T", "first ms", "plain ms", "spread", "tokens/round", "k=0", "equal"]
    return table(titles, cells, left={"scenario"})


def _acceptance_table(rows: Sequence[ScenarioRow], names: Sequence[str]) -> str:
    """Acceptance by position, of as many positions as fit into `WIDTH`."""
    methods = [name for name in names if name != registry.AUTO] or names
    for shown in range(POSITIONS, 0, -1):
        cells = [
            [
                plain.scenario,
                f"{plain.temperature:g}",
                *(acceptance_text(drafted[name].acceptance[:shown]) for name in methods),
            ]
            for plain, drafted in cases(rows)
        ]
        text = table(["scenario", "T", *methods], cells, left={"scenario", *methods})
        if max(map(len, text.splitlines())) <= WIDTH:
            break
    return text


def _latency_table(rows: Sequence[ScenarioRow]) -> str:
    """Medians over all scenarios for each backend."""
    cells = []
    for backend in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == backend]
        plain = [row for row in own if row.drafter == registry.NONE]
        drafted = [row for row in own if row.drafter == _last(own)]
        cells.append(
            [
                backend.engine,
                str(backend.threads),
                f"{median(row.first_token_ms for row in plain):.1f}",
                f"{median(row.ms_per_token for row in plain):.2f}",
                f"{median(row.ms_per_token for row in drafted):.2f}",
                f"{median(row.speed_up for row in drafted):.2f}",
            ]
        )
    titles = ["engine", "threads", "first ms", "plain ms", "drafts ms", "speed-up"]
    return table(titles, cells, left={"engine"})


def _last(rows: Sequence[ScenarioRow]) -> str:
    """The last drafter, which is `auto`, the combination of all others, where there are several."""
    return rows[-1].drafter


def _legend(rows: Sequence[ScenarioRow]) -> str:
    repeats = len(rows[0].speed_ups)
    several = len({row.backend for row in rows}) > 1
    return "\n".join(
        [
            "T: temperature; 0 always takes the most likely token, the other value is the model's default.",
            "first ms: time to the first token. plain ms: time per further token without drafts.",
            f"Speeds are medians of {repeats} repeats; spread: largest half range of a drafter's speed-ups.",
            "equal: prompts with the tokens of plain decoding, with every drafter.",
            f"tokens/round, k=0 ({_last(rows)}): tokens per forward; share of rounds without a draft.",
            *(["engine table: medians over all scenarios; drafts: " + _last(rows)] if several else []),
        ]
    )


def _totals(rows: Sequence[ScenarioRow]) -> list[str]:
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


def draw(rows: Sequence[ScenarioRow], title: str, path: Path) -> None:
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
    methods = [name for name in names if name != registry.AUTO] or names
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
