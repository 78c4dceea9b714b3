"""Tokens per second of every configuration, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ondevice.errors import MissingDependencyError, UsageError
from ondevice.terminal.bench.row import Row


def check(path: Path) -> None:
    """Complain before the measuring, not after it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: a place or a format that cannot be written.
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
    """Horizontal bars, plain decoding first and as a line through all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    speeds = [row.decode_tokens_per_s for row in rows]
    bars = axes.barh([row.label for row in rows], speeds, color=["0.6", *["C0"] * (len(rows) - 1)])
    axes.bar_label(bars, [f"{row.decode_tokens_per_s:.1f} ({row.speed_up:.2f}x)" for row in rows], padding=3)
    axes.axvline(speeds[0], color="0.6", linestyle=":")
    axes.set_xlim(0, 1.3 * max(speeds))
    axes.set_xlabel("decoded tokens per second")
    axes.set_title(title, fontsize="medium")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)
