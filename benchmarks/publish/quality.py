"""Publish the losses of formats: JSON files of `benchmarks.quality.formats`.

    python -m benchmarks.publish.quality FILE...

Their table goes into docs/quality.md, into the first page of the results and into the page on quality, and the picture
of docs/quality.md is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command_line
from benchmarks.publish import pages
from benchmarks.publish.pages import FIRST_QUALITY, ROUNDING, fill
from benchmarks.publish.picture import STYLE, Panel, text
from benchmarks.quality.formats import Result
from ondevice.cli.bench.tables import table


def publish(files: Sequence[Path]) -> None:
    """Write the tables and the picture."""
    results = [Result(**each) for file in files for each in json.loads(file.read_text("utf-8"))]
    picture, measured = pages.QUALITY.with_suffix(".svg"), page_table(results)
    shown = f"![KL divergence of every format over its bytes]({picture.name})"
    fill(pages.QUALITY, f"\n## Measured\n\n{shown}\n\n{measured}")
    fill(pages.RESULTS / "quality.md", measured, ROUNDING)
    fill(pages.FIRST_PAGE, measured, FIRST_QUALITY)
    picture.write_text(draw(results), "utf-8")


def page_table(results: Sequence[Result]) -> str:
    """A table per model."""
    parts = []
    for model in dict.fromkeys(each.model for each in results):
        own = [each for each in results if each.model == model]
        rows = [
            [
                each.format,
                f"{each.bytes / 1e6:.0f}",
                "" if math.isnan(each.bits) else f"{each.bits:.2f}",
                f"{each.kl:.4f} ± {each.kl_error:.4f}",
                f"{each.same_top:.1%}",
                f"{each.perplexity:.2f}",
            ]
            for each in sorted(own, key=lambda each: (each.by != "ondevice", each.kl))
        ]
        titles = [model, "MB", "bits per weight", "KL divergence", "same top token", "perplexity"]
        first = own[0]
        parts += [table(titles, rows, left={model}), ""]
        parts += [f"{first.tokens} tokens; perplexity of the file's own weights {first.reference_perplexity:.2f}.", ""]
    return "\n".join(parts)


def draw(results: Sequence[Result]) -> str:
    """KL divergence over bytes, on a logarithmic axis, a panel per model."""
    marks: list[str] = []
    models = list(dict.fromkeys(each.model for each in results))
    for number, model in enumerate(models):
        own = [each for each in results if each.model == model]
        panel = Panel(60 + 440 * number, 330, max(each.bytes for each in own) / 1e6 * 1.15, 3.0)
        marks += panel.frame(model, "megabytes of weights", ())
        for power, label in enumerate(("0.001", "0.01", "0.1", "1")):
            marks.append(f'<path class="grid" d="M{panel.left} {panel.y(power)}h{panel.width}"/>')
            marks.append(text(panel.left - 8, panel.y(power) + 4, label, "quiet", "end"))
        marks += [panel.mark(size, f"{size}") for size in range(0, int(panel.most_x) + 1, 50)]
        for each in own:
            kind = "simd" if each.by == "ondevice" else "llamacpp"
            x, y = panel.x(each.bytes / 1e6), panel.y(max(0.0, math.log10(each.kl) + 3))
            marks.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>')
            marks.append(text(x + 7, y + 4, each.format, "quiet"))
    width = 60 + 440 * len(models)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 340" width="{width}" height="340">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *marks, "</svg>\n"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by benchmarks.quality.formats")
    publish(parser.parse_args().files)


if __name__ == "__main__":
    main()
