"""Speed-ups by scenario, and acceptance by position, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ondevice.drafters import registry
from ondevice.terminal.bench.scenarios.report import cases
from ondevice.terminal.bench.scenarios.row import ScenarioRow

STYLES = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dash-dotted"}


def draw(rows: Sequence[ScenarioRow], title: str, path: Path) -> None:
    """Left: bars with their spread, a group per scenario and temperature. Right: a line per scenario for each method
    that is not a combination.
    """
    from matplotlib.figure import Figure

    found = list(cases([row for row in rows if row.setup == rows[0].setup]))
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
