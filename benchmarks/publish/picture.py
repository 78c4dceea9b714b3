"""Draw the README's picture from the tables of the results, into `benchmarks/effect.svg`.

    python -m benchmarks.publish.picture

Left: tokens per second on real text, greedy and sampled, with intervals. Right: milliseconds of a forward by the number
of rows that it verifies, which is why drafts pay. Below, if it was measured: the speed of a published model with a
trained drafter, by kind of prompts. `benchmarks.publish.real_text` writes a new measurement to the results first.

Drawn are the first table below `FORWARDS`, the first two below `REAL_TEXT`, and the third below `TRAINED`, which has a
line for each kind of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.command import command_line, run_command
from benchmarks.publish.pages import FORWARDS, PICTURE, REAL_TEXT, TRAINED, all_results, read_interval, read_tables

ENGINES = {"llama.cpp": "llama.cpp", "ort": "ONNX Runtime", "openvino": "OpenVINO", "simd": "ondevice"}
"""Columns of the table of forwards, and the names in the picture."""

SETTINGS = {"auto": "auto", "mtp": "MTP", "ngram": "n-gram", "plain": "no drafts"}
LLAMA_SETTINGS = {"llama.cpp mtp": "MTP", "llama.cpp ngram": "n-gram", "llama.cpp plain": "no drafts"}
"""Settings of the tables of real text, or how the names of several begin, and the names of their bars."""

MAX_ROWS = 16
WIDTH, HEIGHT, BELOW = 880, 356, 270
"""Size of the picture, and the height of its lower part."""

STYLE = """\
text { font: 13px sans-serif; fill: #1f2328 }
.title { font-weight: bold }
.quiet { fill: #59636e; font-size: 12px }
.grid { stroke: #d1d9e0 }
.line { fill: none; stroke-width: 2 }
.simd { stroke: #0969da; stroke-width: 3 }
text.simd, rect.simd { stroke: none; fill: #0969da }
text.llamacpp, rect.llamacpp { stroke: none; fill: #6e7781 }
.sampled { fill-opacity: 0.45 }
.interval { stroke: #1f2328; fill: none }
.ort { stroke: #8250df } text.ort { stroke: none; fill: #8250df }
.openvino { stroke: #bc4c00 } text.openvino { stroke: none; fill: #bc4c00 }
.llamacpp { stroke: #6e7781 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
.simd { stroke: #4493f8 } text.simd, rect.simd { fill: #4493f8 } .interval { stroke: #e6edf3 }
.ort { stroke: #ab7df8 } text.ort { fill: #ab7df8 }
.openvino { stroke: #f0883e } text.openvino { fill: #f0883e }
.llamacpp { stroke: #9198a1 } text.llamacpp, rect.llamacpp { fill: #9198a1 }
}"""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A rectangle of the picture with axes from 0 to `most_x` and from 0 to `most_y`."""

    left: int
    width: int
    most_x: float
    most_y: float
    top: int = 48
    height: int = 240

    def x(self, value: float) -> float:
        return round(self.left + self.width * value / self.most_x, 1)

    def y(self, value: float) -> float:
        return round(self.top + self.height * (1 - value / self.most_y), 1)

    def frame(self, title: str, below: str, ticks: Sequence[float]) -> Iterator[str]:
        """Title, lines at the ticks of the y axis, and the x axis's label."""
        yield text(self.left, self.top - 22, title, "title")
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
        name: [(int(row["rows"]), float(row[f"{name} ms"])) for row in table if int(row["rows"]) <= MAX_ROWS]
        for name in ENGINES
        if f"{name} ms" in table[0]
    }
    most = max(y for points in series.values() for _, y in points)
    panel = Panel(560, 215, MAX_ROWS, most * 1.05)
    yield from panel.frame(
        "Why: milliseconds per forward", "tokens that it verifies (E2B's shape)", range(0, int(most), 100)
    )
    for rows in (1, 4, 8, 12, 16):
        yield panel.mark(rows, str(rows))
    for name, points in series.items():
        kind = name.replace(".", "")
        path = " L".join(f"{panel.x(x)} {panel.y(y)}" for x, y in points)
        yield f'<path class="line {kind}" d="M{path}"/>'
    for name, y in apart({name: panel.y(points[-1][1]) for name, points in series.items()}, 15).items():
        yield text(panel.x(MAX_ROWS) + 8, y + 4, ENGINES[name], name.replace(".", ""))


def real_text(tables: Sequence[Sequence[dict[str, str]]]) -> Iterator[str]:
    """Two bars with intervals for each setting: greedy, and sampled at temperature 1."""
    greedy, sampled = ({row["setting"]: read_interval(row["tokens/s"]) for row in table} for table in tables[:2])
    most = max(high for settings in (greedy, sampled) for _, _, high in settings.values())
    panel = Panel(142, 330, most * 1.1, 1.0)
    prompts = tables[0][0]["prompts"]
    yield text(8, 26, "Tokens per second on real text, at Gemma 4 E2B's cost", "title")
    for tick in range(0, int(most), 25):
        yield f'<path class="grid" d="M{panel.x(tick)} {panel.top}v{panel.height}"/>'
        yield text(panel.x(tick), panel.top + panel.height + 18, f"{tick:g}", "quiet", "middle")
    top = panel.top + 4.0
    for name, kind, settings in (("ondevice", "simd", SETTINGS), ("llama.cpp", "llamacpp", LLAMA_SETTINGS)):
        yield text(8, top + 16, name, f"{kind} title")
        for setting, label in settings.items():
            yield text(panel.left - 8, top + 16, label, "quiet", "end")
            yield from _bar(panel, top, _fastest(greedy, setting), kind)
            yield from _bar(panel, top + 13, _fastest(sampled, setting), f"{kind} sampled")
            top += 33
        top += 6
    below = f"{prompts} prompts, 2 cores; upper bars greedy, lower bars sampled at T = 1; lines are 95 % intervals"
    yield text(8, HEIGHT - 12, below, "quiet")


def _fastest(found: Mapping[str, tuple[float, float, float]], setting: str) -> tuple[float, float, float]:
    """The speed of a setting, or else of the fastest whose name begins so."""
    return found.get(setting) or max(speed for name, speed in found.items() if name.startswith(setting))


def by_kind(table: Sequence[dict[str, str]]) -> Iterator[str]:
    """Four bars for each kind of prompts: `auto`, greedy and sampled, and llama.cpp's best setting, the same."""
    kinds = list(dict.fromkeys(row["kind"] for row in table))
    found = {(row["kind"], row["T"]): (read_interval(row["auto"]), float(row["auto / llama.cpp"])) for row in table}
    most = max(high for (_, _, high), _ in found.values())
    panel = Panel(44, 820, len(kinds), most * 1.1, top=HEIGHT + 44, height=170)
    ticks = [tick / 2 for tick in range(1, int(2 * most) + 1)]
    title = "A published model, SmolLM2-135M-Instruct, with a drafter trained for it: speed over plain decoding"
    yield from panel.frame(title, "", ticks)
    for place, kind in enumerate(kinds):
        yield panel.mark(place + 0.5, kind)
        for number, (own, temperature) in enumerate((way, each) for way in (True, False) for each in ("0", "1")):
            (mean, low, high), lead = found[kind, temperature]
            left = panel.x(place + 0.12 + 0.19 * number)
            top, style = panel.y(mean if own else mean / lead), "simd" if own else "llamacpp"
            style += " sampled" if temperature == "1" else ""
            size = panel.top + panel.height - top
            yield f'<rect class="{style}" x="{left:g}" y="{top:g}" width="19" height="{size:.1f}"/>'
            if own:
                yield f'<path class="interval" d="M{left + 9.5:g} {panel.y(low)}V{panel.y(high)}"/>'
                yield text(left + 9.5, panel.y(high) - 4, f"{mean:.1f}", "quiet", "middle")
    below = "blue: ondevice with drafts; grey: llama.cpp's best setting on the same file; dark: greedy, light: T = 1"
    yield text(8, HEIGHT + BELOW - 12, below, "quiet")


def _bar(panel: Panel, top: float, value: tuple[float, float, float], kind: str) -> Iterator[str]:
    """A horizontal bar with its interval and its number."""
    mean, low, high = value
    yield f'<rect class="{kind}" x="{panel.left}" y="{top:g}" width="{panel.x(mean) - panel.left:.1f}" height="12"/>'
    yield f'<path class="interval" d="M{panel.x(low)} {top + 6:g}H{panel.x(high)}"/>'
    yield text(panel.x(high) + 5, top + 10, f"{mean:.0f}", "quiet")


def apart(heights: dict[str, float], least: float) -> dict[str, float]:
    """The same heights, moved down if two labels would overlap."""
    moved: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        moved[name] = max([y, *(other + least for other in moved.values())])
    return moved


def draw(results: str) -> str:
    """The picture of the text of all pages of results."""
    marks = [*real_text(read_tables(results, REAL_TEXT)), *forwards(read_tables(results, FORWARDS)[0])]
    height = HEIGHT
    if f"\n{TRAINED}\n" in results:
        marks += by_kind(read_tables(results, TRAINED)[2])
        height += BELOW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *marks, "</svg>\n"])


def main() -> None:
    command_line(__doc__).parse_args()
    PICTURE.write_text(draw(all_results()), "utf-8")
    print(PICTURE)


if __name__ == "__main__":
    run_command(main)
