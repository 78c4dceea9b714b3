"""Results of `ondevice bench` as a Markdown table and a bar chart, and the conditions of a measurement as text."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice import __version__, machine
from ondevice.cli.bench.measure import Row
from ondevice.cli.info import version_of
from ondevice.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from ondevice.bundle_format.manifest import Manifest

WIDTH = 80
"""Characters of a line of a table, unless a user asks for tables of any width (`--wide`)."""

PACKAGES = ("onnxruntime", "numba", "numpy")
"""Packages whose versions are printed under a table."""

POSITIONS = 6
"""Number of draft positions whose acceptance is shown; few drafts are longer."""

FIELDS = (
    "drafter",
    "length",
    "name",
    "prompts",
    "new_tokens",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "first_token_ms",
    "tokens_per_round",
    "acceptance",
    "idle_rounds",
    "peak_rss_bytes",
    "speed_up",
    "equal",
)
"""Figures of a `Row` that `-o json` prints."""

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("drafter", lambda row: "plain" if row.is_plain else row.name),
    ("draft", lambda row: "" if row.is_plain else row.length),
    ("prefill tok/s", lambda row: f"{row.prefill_tokens_per_s:.0f}"),
    ("decode tok/s", lambda row: f"{row.decode_tokens_per_s:.1f}"),
    ("first ms", lambda row: f"{row.first_token_ms:.0f}"),
    ("tokens/round", lambda row: f"{row.tokens_per_round:.2f}"),
    ("acceptance by position", lambda row: acceptance_text(row.acceptance)),
    ("k=0", lambda row: "" if row.is_plain else f"{row.idle_rounds:.0%}"),
    ("RSS MB", lambda row: f"{row.peak_rss_bytes / 1e6:.0f}"),
    ("speed-up", lambda row: f"{row.speed_up:.2f}x"),
    ("equal", lambda row: f"{row.equal}/{row.prompts}"),
)
"""Titles and cells of the table of `report`."""


def report(rows: Sequence[Row], foot: str, *, wide: bool = False) -> str:
    """The table that `ondevice bench --drafts` prints, and lines about the conditions of the measurement."""
    cells = [[show(row) for _, show in COLUMNS] for row in rows]
    left = {"drafter", "draft", "acceptance by position"}
    return f"{cut_table([title for title, _ in COLUMNS], cells, left, key=2, wide=wide)}\n\n{foot}"


def cut_table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], left: Collection[str], *, key: int, wide: bool
) -> str:
    """A table, cut into as many as it takes to have none wider than `WIDTH`, each beginning with the first columns.

    Args:
        left: as for `table`.
        key: number of these first columns.
        wide: whether to leave the table whole.
    """
    parts = [[*range(len(titles))] if wide else [*range(key)]]
    for column in range(len(titles) if wide else key, len(titles)):
        longer = [*parts[-1], column]
        widths = [max(2, *(len(line[each]) for line in [titles, *cells])) for each in longer]
        if sum(widths) + 3 * len(longer) + 1 > WIDTH and len(parts[-1]) > key:
            longer = [*range(key), column]
            parts.append(longer)
        parts[-1] = longer
    return "\n\n".join(
        table([titles[column] for column in part], [[line[column] for column in part] for line in cells], left)
        for part in parts
    )


def table(titles: Sequence[str], cells: Sequence[Sequence[str]], left: Collection[str]) -> str:
    """A Markdown table, padded to aligned columns.

    Args:
        left: titles of the columns that are text, aligned left; the others are numbers, aligned right.
    """
    widths = [max(2, *(len(line[column]) for line in [titles, *cells])) for column in range(len(titles))]
    rule = [
        "-" * width if title in left else "-" * (width - 1) + ":" for title, width in zip(titles, widths, strict=True)
    ]
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, title, width in zip(line, titles, widths, strict=True)
        )
        + " |"
        for line in [titles, rule, *cells]
    )


def acceptance_text(shares: Sequence[float], most: int = POSITIONS) -> str:
    """Shares as text, such as `.81 .64 .47`; `...` follows if there are more than `most`."""
    shown = [f"{share:.2f}".removeprefix("0") for share in shares[:most]]
    return " ".join(shown + ["..."] * (len(shares) > most))


def setup(manifest: Manifest, engine: str, threads: int) -> dict[str, Any]:
    """Facts of a measurement: bundle, engine, threads, machine, versions."""
    return {
        "bundle": manifest.name,
        "weights": manifest.weights,
        "engine": engine,
        "threads": threads,
        "processor": machine.processor_name(),
        "system": machine.os_name(),
        "versions": versions(PACKAGES),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of ondevice, of Python and of `packages`."""
    own = {"ondevice": __version__, "python": platform.python_version()}
    return {**own, **{package: version_of(package) for package in packages}}


def conditions(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """How `rows` were measured, in one line."""
    count = rows[0].prompts
    return (
        f"{count} prompts of {facts['prompt_tokens'] / count:.0f} tokens, {rows[0].new_tokens / count:.0f} new tokens "
        f"each on average; temperature {rows[0].temperature:g}, seed {facts['seed']}; {facts['kv_cache']} KV cache; "
        f"loaded in {facts['load_s']:.1f} s"
    )


def footer(facts: dict[str, Any], line: str) -> str:
    """Three lines about a measurement: `setup_line`, the line with its conditions, `versions_line`."""
    return "\n".join([setup_line(facts), line, versions_line(facts)])


def setup_line(facts: dict[str, Any]) -> str:
    """Bundle, engine, threads and machine of `setup`, in one line."""
    return (
        f"{facts['bundle']} ({facts['weights']}), engine {facts['engine']}, {facts['threads']} threads, "
        f"{facts['processor']}, {facts['system']}"
    )


def versions_line(facts: dict[str, Any]) -> str:
    """Versions of `setup`, in one line."""
    return ", ".join(f"{package} {number}" for package, number in facts["versions"].items())


def check_plot(path: Path) -> None:
    """Check that `--plot` can be written, before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: the format is not supported, or the directory does not exist.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "bench") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise UsageError(f"--plot writes {', '.join(sorted(formats))}, not {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot cannot write {path}: there is no directory {path.parent}")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a bar chart of tokens per second: plain decoding first, its speed as a dotted line across all bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    speeds = [row.decode_tokens_per_s for row in rows]
    labels = ["plain" if row.is_plain else f"{row.name} {row.length}" for row in rows]
    bars = axes.barh(labels, speeds, color=["0.6", *["C0"] * (len(rows) - 1)])
    axes.bar_label(bars, [f"{row.decode_tokens_per_s:.1f} ({row.speed_up:.2f}x)" for row in rows], padding=3)
    axes.axvline(speeds[0], color="0.6", linestyle=":")
    axes.set_xlim(0, 1.3 * max(speeds))
    axes.set_xlabel("decoded tokens per second")
    axes.set_title(title, fontsize="medium")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)
