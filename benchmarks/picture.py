"""Draw the README's picture from the tables of RESULTS.md: `python -m benchmarks.picture` writes effect.svg next to it.

Left: milliseconds of a forward by the number of rows that it verifies. Right: the resulting speed-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
PICTURE = RESULTS.with_name("effect.svg")

FORWARDS = "## E2B's shape, compared with other engines"
SPEED_UPS = "## What drafts are worth at E2B's shape"
"""Headings of RESULTS.md; the first table below each is drawn."""

ENGINES = {"llama.cpp": "llama.cpp", "ort": "ONNX Runtime", "openvino": "OpenVINO", "simd": "ondevice"}
"""Columns of the first table, and the names in the picture."""

MOST_ROWS = 16
WIDTH, HEIGHT = 880, 316

STYLE = """\
text { font: 13px sans-serif; fill: #1f2328 }
.title { font-weight: bold }
.quiet { fill: #59636e; font-size: 12px }
.grid { stroke: #d1d9e0 }
.line { fill: none; stroke-width: 2 }
.simd { stroke: #0969da; stroke-width: 3 }
text.simd, rect.simd { stroke: none; fill: #0969da }
.ort { stroke: #8250df } text.ort { stroke: none; fill: #8250df }
.openvino { stroke: #bc4c00 } text.openvino { stroke: none; fill: #bc4c00 }
.llamacpp { stroke: #6e7781 } text.llamacpp { stroke: none; fill: #6e7781 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
.simd { stroke: #4493f8 } text.simd, rect.simd { fill: #4493f8 }
.ort { stroke: #ab7df8 } text.ort { fill: #ab7df8 }
.openvino { stroke: #f0883e } text.openvino { fill: #f0883e }
.llamacpp { stroke: #9198a1 } text.llamacpp { fill: #9198a1 }
}"""

Points = list[tuple[float, float]]


def read_table(results: str, heading: str) -> list[dict[str, str]]:
    """The first Markdown table below a heading, a dictionary per row."""
    below = results.partition(f"\n{heading}\n")[2]
    found = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    if found is None:
        raise SystemExit(f"RESULTS.md has no table below {heading!r}")
    titles, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in found[0].splitlines()]
    return [dict(zip(titles, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Panel:
    """A rectangle of the picture with axes from 0 to `most_x` and from 0 to `most_y`."""

    left: int
    width: int
    most_x: float
    most_y: float
    top: int = 48
    height: int = 205

    def x(self, value: float) -> float:
        return round(self.left + self.width * value / self.most_x, 1)

    def y(self, value: float) -> float:
        return round(self.top + self.height * (1 - value / self.most_y), 1)

    def frame(self, title: str, below: str, ticks: Sequence[float]) -> Iterator[str]:
        """Title, lines at the ticks of the y axis, and the x axis's label."""
        yield text(self.left, 26, title, "title")
        for tick in ticks:
            yield f'<path class="grid" d="M{self.left} {self.y(tick)}h{self.width}"/>'
            yield text(self.left - 8, self.y(tick) + 4, f"{tick:g}", "quiet", "end")
        yield text(self.left + self.width / 2, self.top + self.height + 38, below, "quiet", "middle")

    def mark(self, x: float, label: str) -> str:
        """A label below the x axis."""
        return text(self.x(x), self.top + self.height + 18, label, "quiet", "middle")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def forwards(table: Sequence[dict[str, str]]) -> Iterator[str]:
    """A line per engine."""
    series: dict[str, Points] = {
        name: [(int(row["rows"]), float(row[f"{name} ms"])) for row in table if int(row["rows"]) <= MOST_ROWS]
        for name in ENGINES
        if f"{name} ms" in table[0]
    }
    most = max(y for points in series.values() for _, y in points)
    panel = Panel(52, 300, MOST_ROWS, most * 1.05)
    yield from panel.frame(
        "Milliseconds of a forward", "rows that it verifies (Gemma 4 E2B's shape)", range(0, int(most), 100)
    )
    for rows in (1, 2, 4, 8, 12, 16):
        yield panel.mark(rows, str(rows))
    for name, points in series.items():
        kind = name.replace(".", "")
        path = " L".join(f"{panel.x(x)} {panel.y(y)}" for x, y in points)
        yield f'<path class="line {kind}" d="M{path}"/>'
    for name, y in _apart({name: panel.y(points[-1][1]) for name, points in series.items()}, 15).items():
        yield text(panel.x(MOST_ROWS) + 8, y + 4, ENGINES[name], name.replace(".", ""))


def speed_ups(table: Sequence[dict[str, str]]) -> Iterator[str]:
    """A bar per acceptance, of the `auto` schedule."""
    values = [(row["acceptance"], float(row["auto"])) for row in table]
    most = max(value for _, value in values)
    panel = Panel(540, 320, len(values), most * 1.1)
    yield from panel.frame(
        "Decoding speed, times plain", "chance that a drafted token is right (simulated)", range(int(most) + 1)
    )
    for index, (acceptance, value) in enumerate(values):
        left, right = panel.x(index + 0.18), panel.x(index + 0.82)
        yield (
            f'<rect class="simd" x="{left}" y="{panel.y(value)}" '
            f'width="{right - left:.1f}" height="{panel.y(0) - panel.y(value):.1f}"/>'
        )
        yield text(panel.x(index + 0.5), panel.y(value) - 6, f"{value:.2f}", anchor="middle")
        yield panel.mark(index + 0.5, acceptance)


def _apart(heights: dict[str, float], least: float) -> dict[str, float]:
    """The same heights, moved down if two labels would overlap."""
    moved: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        moved[name] = max([y, *(other + least for other in moved.values())])
    return moved


def draw(results: str) -> str:
    """The picture of a RESULTS.md."""
    marks = [*forwards(read_table(results, FORWARDS)), *speed_ups(read_table(results, SPEED_UPS))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *marks, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(RESULTS.read_text("utf-8")), "utf-8")
    print(PICTURE)
