"""`ondevice check --against`: how far a bundle's next-token distributions are from those of a reference.

In order: the command, opening the reference, the figures as lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from ondevice.bundle import Bundle, is_bundle
from ondevice.cli.options import load_model, preparing
from ondevice.cli.terminal.progress import ProgressBar, ending_by_exception
from ondevice.cli.terminal.style import aligned, columns
from ondevice.errors import MissingDependencyError
from ondevice.text.prompt_file import read_text

if TYPE_CHECKING:
    from ondevice.quality import Figure, Quality


def compare(args: argparse.Namespace) -> int:
    """Run `ondevice check BUNDLE --against REFERENCE`."""
    import ondevice
    from ondevice.quality import TEXT, measure, text_ids

    text = read_text(args.text or TEXT)
    bundle = Bundle.open(args.bundle)
    with _reference(args.against, bundle.manifest.target.context_length) as (reference, engine):
        ids = text_ids(text, bundle, reference)
        with (
            load_model(args) as model,
            preparing() as report,
            ondevice.load(reference.path, engine=engine, threads=args.threads, on_prepare=report) as other,
            ProgressBar("comparing", unit=" tokens") as bar,
        ):
            found = measure(model.engine, other.engine, ids, model.manifest.first_token_id, bar.show)
            facts = {"bundle": model.manifest.name, "engine": model.engine.name, "reference": reference.manifest.name}
    if args.json:
        print(json.dumps({**facts, **dataclasses.asdict(found)}))
    else:
        print("\n".join(lines(found, columns())))
    return 0


@contextmanager
def _reference(source: str, context: int) -> Iterator[tuple[Bundle, Literal["auto", "ort"]]]:
    """The reference as a bundle, and its engine. The float32 graph of a checkpoint is written to a temporary directory,
    with texts as long as those of the bundle that is compared.

    Raises:
        MissingDependencyError: it is a checkpoint, and the exporter's packages are not installed.
    """
    if is_bundle(source):
        yield Bundle.open(source), "auto"
        return
    try:
        exporter = import_module("ondevice_export.reference")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "ondevice_export", "export") from error
    with (
        ending_by_exception(),
        ProgressBar("reference", unit=" weights", unit_scale=True) as bar,
        exporter.reference_bundle(source, bar.show, context) as bundle,
    ):
        yield bundle, "ort"


def lines(found: Quality, width: int) -> list[str]:
    """One line per figure."""
    share = "{:.2%} ± {:.2%}".format
    return aligned(
        {
            "tokens": [f"{found.tokens}"],
            "KL divergence, mean": [_text(found.kl)],
            "KL divergence, median": [f"{found.kl_median:.5f}"],
            "KL divergence, 99.9 %": [f"{found.kl_999:.5f}"],
            "same top token": [share(found.same_top.value, found.same_top.error)],
            "RMS change of probability": [share(found.change.value, found.change.error)],
            "perplexity": [_text(found.perplexity)],
            "perplexity of the reference": [_text(found.reference_perplexity)],
            "ratio of perplexities": [_text(found.ratio)],
        },
        width,
    )


def _text(figure: Figure) -> str:
    return f"{figure.value:.5f} ± {figure.error:.5f}"
