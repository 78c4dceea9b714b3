"""Publish the losses of formats: JSON files of `benchmarks.quality.formats`.

    python -m benchmarks.publish.quality FILE...

Their tables go into docs/quality.md and into the page on quality, with a table of the files that both engines ran, and
the first one into the first page of the results. The picture of docs/quality.md is drawn. Where no speed was measured,
there is no column of speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command_line, run_command
from benchmarks.publish import pages
from benchmarks.publish.pages import FIRST_QUALITY, ROUNDING, fill
from benchmarks.publish.picture import STYLE, Panel, text
from benchmarks.quality.formats import SAME_FILE, Result, read_results
from ondevice.cli.bench.tables import table

DOTS = """\
circle { fill-opacity: 0.55 }
circle.simd { stroke: none; fill: #0969da }
circle.llamacpp { stroke: none; fill: #6e7781 }"""

Box = tuple[float, float, float, float]
"""Left, right, top and bottom."""

LETTER = 5.2  # pixels of a letter of a label
LARGEST_DOT = 11
"""Radius of the dot of the fastest format."""


def publish(files: Sequence[Path]) -> None:
    """Write the tables and the picture."""
    found = [each for file in files for each in read_results(file)]
    results = [each for each in found if SAME_FILE not in each.format]
    picture, measured = pages.QUALITY.with_suffix(".svg"), page_table(results)
    twice = same_file_table(found)
    shown = f"![KL divergence of every format over its bytes]({picture.name})"
    fill(pages.QUALITY, f"\n## Measured\n\n{shown}\n\n{measured}{twice}")
    fill(pages.RESULTS / "quality.md", measured + twice, ROUNDING)
    first, *_ = _by_model(results).values()
    fill(pages.FIRST_PAGE, page_table(first), FIRST_QUALITY)
    picture.write_text(draw(results), "utf-8")


def page_table(results: Sequence[Result]) -> str:
    """A table per model."""
    parts = []
    for model, own in _by_model(results).items():
        rows = [
            [
                each.format,
                f"{each.bytes / 1e6:.1f}",
                f"{each.bits:.2f}",
                f"{each.kl:.4f} ± {each.kl_error:.4f}",
                f"{each.same_top:.1%}",
                f"{each.perplexity:.2f}",
                "" if math.isnan(each.tokens_per_second) else f"{each.tokens_per_second:.0f}",
            ]
            for each in sorted(own, key=lambda each: (each.by != "ondevice", each.kl))
        ]
        titles = [model, "MB", "bits per weight", "KL divergence", "same top token", "perplexity", "tokens/s"]
        first, columns = own[0], len(titles) if _timed(own) else -1
        parts += [table(titles[:columns], [row[:columns] for row in rows], left={model}), ""]
        parts += [f"{first.tokens} tokens; perplexity of the file's own weights {first.reference_perplexity:.2f}.", ""]
    return "\n".join(parts)


def same_file_table(results: Sequence[Result]) -> str:
    """A table per model of the files of llama.cpp that ondevice ran too, with the figures of both; empty if none."""
    parts = []
    for model, own in _by_model(results).items():
        named = {(each.by, each.format): each for each in own}
        pairs = [
            (each, named["ondevice", each.format + SAME_FILE])
            for each in own
            if each.by != "ondevice" and ("ondevice", each.format + SAME_FILE) in named
        ]
        rows = [
            [
                theirs.format,
                *(f"{each.kl:.4f} ± {each.kl_error:.4f}" for each in (theirs, ours)),
                *(f"{each.same_top:.1%} ± {each.same_top_error:.1%}" for each in (theirs, ours)),
                *(f"{each.perplexity:.2f}" for each in (theirs, ours)),
            ]
            for theirs, ours in pairs
        ]
        figures = ["KL divergence", "same top token", "perplexity"]
        titles = [model, *(f"{each}, {by}" for each in figures for by in ("llama.cpp", "ondevice"))]
        parts += [table(titles, rows, left={model}), ""] if rows else []
    begin = "The same files, quantised by `llama-quantize`, run by both engines:"
    return "\n".join(["", begin, "", *parts]) if parts else ""


def draw(results: Sequence[Result]) -> str:
    """KL divergence over bytes, on a logarithmic axis, a panel per model; the area of a dot is the decoding speed."""
    marks: list[str] = []
    models = _by_model(results)
    for number, (model, own) in enumerate(models.items()):
        sizes = [each.bytes / 1e6 for each in own]
        start = math.floor(min(sizes) / 10 - 1) * 10
        panel = Panel(60 + 440 * number, 330, max(sizes) - start + 20, 3.0, height=330)
        marks += panel.frame(model, "megabytes of weights", ())
        for power, label in enumerate(("0.001", "0.01", "0.1", "1")):
            marks.append(f'<path class="grid" d="M{panel.left} {panel.y(power)}h{panel.width}"/>')
            marks.append(text(panel.left - 8, panel.y(power) + 4, label, "quiet", "end"))
        marks += [panel.mark(size - start, f"{size}") for size in range(start, int(max(sizes)) + 20, 20)]
        places = [(panel.x(size - start), _height(panel, each.kl)) for size, each in zip(sizes, own, strict=True)]
        speeds = [each.tokens_per_second for each in own]
        fastest = max([0.0, *(speed for speed in speeds if not math.isnan(speed))])
        radii = [4.0 if math.isnan(speed) else LARGEST_DOT * math.sqrt(speed / fastest) for speed in speeds]
        dots = [(*place, radius) for place, radius in zip(places, radii, strict=True)]
        labels = beside(dots, [each.format for each in own], panel.left)
        for each, (x, y, radius), (beside_x, beside_y, anchor) in zip(own, dots, labels, strict=True):
            kind = "simd" if each.by == "ondevice" else "llamacpp"
            marks.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:.1f}"/>')
            marks.append(text(beside_x, beside_y + 4, each.format, "quiet", anchor))
    below = "blue: ondevice; grey: llama.cpp" + "; the area of a dot is the speed of decoding" * _timed(results)
    marks.append(text(60, 452, below, "quiet"))
    width = 60 + 440 * len(models)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 464" width="{width}" height="464">'
    return "\n".join([head, f"<style>\n{STYLE}\n{DOTS}\n</style>", *marks, "</svg>\n"])


def beside(
    dots: Sequence[tuple[float, float, float]], labels: Sequence[str], left: float
) -> list[tuple[float, float, str]]:
    """Where each dot's label stands, and its anchor: to the right of the dot or the left of it, as near as possible
    without meeting another label or a dot, and not beyond `left`. dots : x, y and radius
    """
    taken = [(x - radius, x + radius, y - radius, y + radius) for x, y, radius in dots]
    found: dict[int, tuple[float, float, str]] = {}
    for place in sorted(range(len(dots)), key=lambda place: dots[place][1]):
        (x, y, _), width = dots[place], LETTER * len(labels[place])
        for step in range(100):
            up = y + (step + 1) // 2 * (1 if step % 2 else -1) * 6.5
            after, before = x + LARGEST_DOT + 3, x - LARGEST_DOT - 3
            boxes = [(start, start + width, up - 6, up + 6) for start in (after, before - width)]
            free = [box for box in boxes if box[0] >= left and not any(meet(box, other) for other in taken)]
            if free:
                taken.append(free[0])
                found[place] = (after, up, "start") if free[0] is boxes[0] else (before, up, "end")
                break
    return [found[place] for place in range(len(dots))]


def meet(one: Box, other: Box) -> bool:
    """Whether two boxes overlap."""
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _timed(results: Sequence[Result]) -> bool:
    return not all(math.isnan(each.tokens_per_second) for each in results)


def _height(panel: Panel, kl: float) -> float:
    return panel.y(max(0.0, math.log10(kl) + 3))


def _by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    models = dict.fromkeys(each.model for each in results)
    return {model: [each for each in results if each.model == model] for model in models}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by benchmarks.quality.formats")
    publish(parser.parse_args().files)


if __name__ == "__main__":
    run_command(main)
