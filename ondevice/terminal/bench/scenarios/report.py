"""Tables of at most 100 columns, what they mean, and a verdict per scenario."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from ondevice.drafters import registry
from ondevice.terminal.bench.scenarios.row import ScenarioRow
from ondevice.terminal.bench.table import acceptance_text, table

WORTH = 1.03
"""Times as fast as plain decoding that drafts must be to be worth a word."""

SHOWN = 4
"""Positions of a draft whose acceptance is shown at most."""

WIDEST = 100
"""Columns of a table."""


def report(rows: Sequence[ScenarioRow], foot: Sequence[str]) -> str:
    """Everything that is printed.

    Args:
        rows: by scenario and temperature, plain decoding first.
        foot: lines about the conditions.
    """
    first = [row for row in rows if row.setup == rows[0].setup]
    names = list(dict.fromkeys(row.drafter for row in first if row.drafter != registry.NONE))
    parts = [
        "Decoding speed over plain decoding:",
        _speed_table(first, names),
        "Of the drafted tokens at position 1, 2, ... the share that was taken:",
        _acceptance_table(first, names),
        "Conditions:",
        _conditions_table(first, names[-1]),
        _legend(rows),
    ]
    if len({row.setup for row in rows}) > 1:
        parts.insert(-1, _latency_table(rows))
    return "\n\n".join([*parts, "\n".join(foot), *_totals(first), "\n".join(verdicts(first))])


def cases(rows: Sequence[ScenarioRow]) -> Iterator[tuple[ScenarioRow, dict[str, ScenarioRow]]]:
    """Plain decoding, and by name what drafted, for each scenario and temperature."""
    for _, group in groupby(rows, lambda row: (row.scenario, row.temperature)):
        by_name = {row.drafter: row for row in group}
        yield by_name.pop(registry.NONE), by_name


def verdicts(rows: Sequence[ScenarioRow]) -> list[str]:
    """A line per scenario: which setting to take, which may be none."""
    lines = []
    for scenario, group in groupby(cases(rows), lambda case: case[0].scenario):
        said = []
        for plain, drafted in group:
            best = max(drafted.values(), key=lambda row: row.speed_up)
            pays = best.speed_up >= WORTH and min(best.speed_ups) > 1.0
            choice = f"{best.drafter} {best.speed_up:.2f}x" if pays else f"none (best {best.speed_up:.2f}x)"
            said.append(f"{choice} at T={plain.temperature:g}")
        lines.append(f"- {scenario}: {', '.join(said)}")
    return lines


def as_csv(rows: Sequence[ScenarioRow]) -> str:
    """The rows with a header line; lists have their numbers apart by spaces."""
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
    return {**vars(row), "speed_up": row.speed_up, "spread": row.spread}


def _speed_table(rows: Sequence[ScenarioRow], names: Sequence[str]) -> str:
    cells = [
        [plain.scenario, f"{plain.temperature:g}", *(f"{drafted[name].speed_up:.2f}" for name in names)]
        for plain, drafted in cases(rows)
    ]
    return table(["scenario", "T", *names], cells, left={"scenario"})


def _conditions_table(rows: Sequence[ScenarioRow], last: str) -> str:
    """What those speeds are of, and how sure of them one can be."""
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
    """As many positions as there is room for."""
    methods = [name for name in names if name != registry.AUTO] or names
    for shown in range(SHOWN, 0, -1):
        cells = [
            [
                plain.scenario,
                f"{plain.temperature:g}",
                *(acceptance_text(drafted[name].acceptance[:shown]) for name in methods),
            ]
            for plain, drafted in cases(rows)
        ]
        text = table(["scenario", "T", *methods], cells, left={"scenario", *methods})
        if max(map(len, text.splitlines())) <= WIDEST:
            break
    return text


def _latency_table(rows: Sequence[ScenarioRow]) -> str:
    cells = []
    for setup in dict.fromkeys(row.setup for row in rows):
        own = [row for row in rows if row.setup == setup]
        plain = [row for row in own if row.drafter == registry.NONE]
        drafted = [row for row in own if row.drafter == _last(own)]
        cells.append(
            [
                setup.engine,
                str(setup.threads),
                f"{median(row.first_token_ms for row in plain):.1f}",
                f"{median(row.ms_per_token for row in plain):.2f}",
                f"{median(row.ms_per_token for row in drafted):.2f}",
                f"{median(row.speed_up for row in drafted):.2f}",
            ]
        )
    titles = ["engine", "threads", "first ms", "plain ms", "drafts ms", "speed-up"]
    return table(titles, cells, left={"engine"})


def _last(rows: Sequence[ScenarioRow]) -> str:
    """The name that combines all others, where there are several."""
    return rows[-1].drafter


def _legend(rows: Sequence[ScenarioRow]) -> str:
    repeats = len(rows[0].speed_ups)
    several = len({row.setup for row in rows}) > 1
    return "\n".join(
        [
            "T: temperature, 0 always takes the likeliest token, the other is the model's own default.",
            "first ms: until the first token. plain ms: per token after it, nothing drafted.",
            f"Speeds are medians of {repeats} repeats; spread: the largest half range of a drafter's.",
            "equal: prompts whose tokens are those of plain decoding, whatever drafted.",
            f"tokens/round, k=0 ({_last(rows)}): tokens per forward; share of rounds that drafted nothing.",
            *(["engine table: medians over all scenarios; drafts: " + _last(rows)] if several else []),
        ]
    )


def _totals(rows: Sequence[ScenarioRow]) -> list[str]:
    """How `auto` does at its worst, where it is one of several."""
    found = [
        (drafted[registry.AUTO], max(row.speed_up for name, row in drafted.items() if name != registry.AUTO), plain)
        for plain, drafted in cases(rows)
        if registry.AUTO in drafted and len(drafted) > 1
    ]
    if not found:
        return []
    plainly, _, one = min(found, key=lambda each: each[0].speed_up)
    auto, single, other = min(found, key=lambda each: each[0].speed_up / max(each[1], 1.0))
    return [
        f"auto at its worst: {plainly.speed_up:.2f} of plain decoding ({one.scenario}, T={one.temperature:g}), "
        f"{auto.speed_up / max(single, 1.0):.2f} of\nthe best single setting ({other.scenario}, "
        f"T={other.temperature:g}), plain decoding among them."
    ]
