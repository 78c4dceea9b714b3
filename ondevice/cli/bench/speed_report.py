"""Rows of `ondevice bench` in llama-bench's forms: Markdown, JSON, JSON lines, CSV.

The first columns and the fields that mean the same have llama-bench's names, so that its readers can read both.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ondevice import __version__, machine
from ondevice.cli.bench.speed import SpeedRow
from ondevice.cli.bench.tables import cut_table, table

if TYPE_CHECKING:
    from ondevice.model import Model

FORMATS = ("md", "json", "jsonl", "csv")

LEFT = frozenset({"model", "backend", "test"})
"""Titles of columns of text."""

COMMON = ("model", "size", "params", "backend", "threads")
"""llama-bench's columns that are the same in all rows of a model."""

OWN = ("tok/rd", "accepted", "first ms", "RSS MB", "J/tok")
"""The columns that llama-bench does not have; one that no row has a figure for, such as the energy, is left out."""


class ModelFacts(NamedTuple):
    """A loaded model, as llama-bench describes one. size: bytes of the target's weights; parameters: 0 if unknown."""

    file: str
    name: str
    size: int
    parameters: int
    engine: str
    threads: int
    kv_cache: str

    @classmethod
    def of(cls, model: Model, location: str) -> ModelFacts:
        """Facts of a model that was loaded from this location."""
        manifest = model.manifest
        graph = manifest.target.graph
        tensors = manifest.tensors[graph].tensors.values() if graph in manifest.tensors else ()
        return cls(
            location,
            f"{manifest.name} {manifest.weights}",
            sum(entry.size for name, entry in manifest.files.items() if name.startswith(graph)),
            sum(prod(tensor.shape) for tensor in tensors),
            model.engine.name,
            model.threads,
            model.engine.kv_cache,
        )

    @property
    def cells(self) -> list[str]:
        """The cells of `COMMON`."""
        size = f"{self.size / 2**30:.2f} GiB" if self.size >= 2**30 else f"{self.size / 2**20:.2f} MiB"
        count = f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.2f} M"
        return [self.name, size, count if self.parameters else "", self.engine, str(self.threads)]


Result = tuple[ModelFacts, SpeedRow]
"""A row, and the model that it was measured with."""


def as_text(results: Sequence[Result], form: str, *, wide: bool) -> str:
    """The results in one of `FORMATS`; `wide` is for Markdown."""
    if form == "md":
        return _wide(results) if wide else "\n\n".join(_tables(results))
    records = [fields_of(*result) for result in results]
    if form == "csv":
        return _csv(records)
    return json.dumps(records, indent=2) if form == "json" else "\n".join(map(json.dumps, records))


def fields_of(facts: ModelFacts, row: SpeedRow) -> dict[str, Any]:
    """A row as plain values, with llama-bench's names where it has the same figure. `_ns` are nanoseconds."""
    test = row.case.test
    nanoseconds = [round(1e9 * sample.seconds) for sample in row.samples]
    return {
        "build_version": __version__,
        "cpu_info": machine.processor_name(),
        "os": machine.os_name(),
        "backends": facts.engine,
        "model_filename": facts.file,
        "model_type": facts.name,
        "model_size": facts.size,
        "model_n_params": facts.parameters,
        "n_threads": facts.threads,
        "type_k": facts.kv_cache,
        "type_v": facts.kv_cache,
        "n_prompt": test.prompt,
        "n_gen": test.new,
        "n_depth": test.depth,
        "test": row.case.name,
        "avg_ns": round(sum(nanoseconds) / len(nanoseconds)),
        "avg_ts": row.speed,
        "stddev_ts": row.deviation,
        "samples_ns": nanoseconds,
        "samples_ts": row.speeds,
        "drafter": row.case.configuration.drafter,
        "draft_length": row.case.configuration.length,
        "synthetic_acceptance": row.case.accept,
        "tokens_per_round": row.tokens_per_round,
        "acceptance": row.acceptance,
        "acceptance_by_position": row.acceptance_by_position,
        "first_token_ms": row.first_token_ms,
        "peak_rss_bytes": row.peak_rss_bytes,
        "joules_per_token": row.joules_per_token,
        "equal_to_plain": row.equal,
    }


def _csv(records: Sequence[dict[str, Any]]) -> str:
    """A header and a line per record; the numbers of a list are separated by spaces, and what is unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, records[0], lineterminator="\n")
    writer.writeheader()
    for record in records:
        lists = {name: " ".join(map(str, value)) for name, value in record.items() if isinstance(value, list | tuple)}
        writer.writerow(record | lists)
    return out.getvalue().rstrip("\n")


def _wide(results: Sequence[Result]) -> str:
    """One table with all columns, llama-bench's first."""
    titles, cells = _test_columns([row for _, row in results])
    models = [facts.cells for facts, _ in results]
    return table([*COMMON, *titles], [[*model, *line] for model, line in zip(models, cells, strict=True)], LEFT)


def _tables(results: Sequence[Result]) -> Iterator[str]:
    """For every model a table of what it is, and one of its tests, cut to 80 columns."""
    for facts, group in groupby(results, lambda result: result[0]):
        titles, cells = _test_columns([row for _, row in group])
        yield table(COMMON, [facts.cells], LEFT)
        yield cut_table(titles, cells, LEFT, key=1, wide=False)


def _test_columns(rows: Sequence[SpeedRow]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the columns from the test's name on that have a figure."""
    titles = ("test", "t/s", *OWN)
    cells = [_test_cells(row) for row in rows]
    filled = [column for column in range(len(titles)) if any(line[column] for line in cells)]
    return [titles[column] for column in filled], [[line[column] for column in filled] for line in cells]


def _test_cells(row: SpeedRow) -> list[str]:
    """The cells of `_test_columns`; a figure that is unknown is empty."""
    return [
        row.case.name,
        f"{row.speed:.2f} ± {row.deviation:.2f}",
        _shown(row.tokens_per_round, ".2f"),
        _shown(row.acceptance, ".0%"),
        _shown(row.first_token_ms, ".0f"),
        _shown(row.peak_rss_bytes / 1e6, ".0f"),
        _shown(row.joules_per_token, ".2f"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
