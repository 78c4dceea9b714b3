"""The export command, shared by `ondevice export` and `optimum-cli export ondevice`.

Light to import: what an export needs is imported when one runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ondevice.errors import MissingDependencyError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint: a hub id or a directory")
    parser.add_argument(
        "--drafter",
        default="auto",
        metavar="auto|none|SOURCE",
        help="the MTP drafter; auto finds <id>-assistant, or drafter/ beside a directory (default: auto)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the bundle's directory (default: bundles/<name>)")
    parser.add_argument(
        "--quantize", choices=("int4", "int8", "none"), default="int4", help="width of the weights (default: int4)"
    )
    parser.add_argument(
        "--head-bits", type=int, choices=(4, 8), default=8, help="width of the tied token table (default: 8)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of SOURCE on the hub")
    parser.add_argument(
        "--verify", action="store_true", help="compare the bundle with the original, which needs torch and its memory"
    )
    parser.add_argument(
        "--verify-prompts",
        type=Path,
        metavar="FILE",
        help='what to compare on: lines of text, or JSON lines of "prompt"',
    )


def run(args: argparse.Namespace) -> int:
    """Export, and verify where asked; returns the exit code.

    Raises:
        OndeviceError: what a user can mend, in one line.
    """
    if args.verify_prompts is not None and not args.verify:
        raise UsageError("--verify-prompts is for --verify: add it")
    if args.verify:
        from ondevice_export.original import check_installed

        check_installed()
    try:
        from ondevice_export.exporter import export
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "onnx_ir", "export") from error

    started = time.perf_counter()
    with _Bar() as bar:
        bundle = export(
            args.source,
            args.out,
            drafter=args.drafter,
            quantize=args.quantize,
            head_bits=args.head_bits,
            revision=args.revision,
            progress=bar.show,
            note=bar.note,
        )
    size = sum(file.stat().st_size for file in bundle.iterdir())
    sys.stdout.write(f"{bundle}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s\n")
    if args.verify:
        _verify(args, bundle)
    return 0


def _verify(args: argparse.Namespace, bundle: Path) -> None:
    from ondevice_export.source import locate, locate_drafter
    from ondevice_export.verify import read_prompts, verify

    target = locate(args.source, args.revision)
    drafter = locate_drafter(args.drafter, target, lambda _line: None)
    prompts = read_prompts(bundle, args.verify_prompts)
    result = verify(bundle, target.directory, None if drafter is None else drafter.directory, prompts)
    sys.stdout.write(f"\n{result.table()}\n")


class _Bar:
    """Progress in weights, on standard error and only on a terminal; notes go to standard error in any case."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit="weight", unit_scale=True, desc="export", disable=None, leave=False, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def note(self, line: str) -> None:
        self._bar.write(f"note: {line}", file=sys.stderr)
