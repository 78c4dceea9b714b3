"""Markdown tables that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ondevice.terminal.bench.row import Row

POSITIONS = 6
"""Positions of a draft whose acceptance is shown; few drafts are longer."""

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


def markdown(rows: Sequence[Row]) -> str:
    """What `ondevice bench` prints."""
    cells = [[show(row) for _, show in COLUMNS] for row in rows]
    return table([title for title, _ in COLUMNS], cells, left={"drafter", "draft", "acceptance by position"})


def table(titles: Sequence[str], cells: Sequence[Sequence[str]], left: Collection[str]) -> str:
    """Any table: the columns titled in `left` are text, the others figures; padded so that it reads well as it is."""
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
    """Such as `.81 .64 .47`."""
    shown = [f"{share:.2f}".removeprefix("0") for share in shares[:most]]
    return " ".join(shown + ["..."] * (len(shares) > most))
