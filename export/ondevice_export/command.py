"""The export command: `ondevice export`, and `optimum-cli export ondevice` in the distribution optimum-ondevice.

The module is cheap to import, because it imports the exporter only when an export runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from ondevice.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, model_home
from ondevice.cli.main import FAILED
from ondevice.cli.options import preparing
from ondevice.cli.origins import note_origin
from ondevice.cli.terminal.progress import ProgressBar, ending_by_exception
from ondevice.errors import MissingDependencyError, OndeviceError, UsageError
from ondevice.native.sets import parts_of
from ondevice.preparation import Preparation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of `ondevice export` to a parser."""
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint: a hub id, a directory or a GGUF file")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="the bundle's directory (default: its name under $ONDEVICE_HOME, or where that is not set under bundles)",
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ondevice export` and `optimum-cli export ondevice` share.

    The arguments for the checkpoint and the bundle's directory are not among them; `optimum-cli` has its own.
    """
    parser.add_argument(
        "--drafter",
        default="auto",
        metavar="auto|none|SOURCE",
        help="the MTP drafter; auto finds <id>-assistant, or drafter/ beside a directory, or takes the MTP layer that "
        "SOURCE has (default: auto)",
    )
    parser.add_argument(
        "--heads",
        default="auto",
        metavar="auto|none|DIR",
        help="heads trained for SOURCE, see models/recipe; auto finds heads/ beside a directory (default: auto)",
    )
    parser.add_argument(
        "--quantize",
        choices=("int4", "int4-affine", "int4-table", "int8", "none", "keep"),
        help="format of the weights; int4-affine has a minimum for every 32, as GGUF's Q4_1, int4-table 16 values that "
        "are not evenly spaced, as IQ4_NL; keep stores what a GGUF file, or a checkpoint quantised by GPTQ, AWQ "
        "or compressed-tensors, has (default: keep for these, else int4)",
    )
    parser.add_argument(
        "--head-bits", type=int, choices=(4, 8), help="width of the tied token table (default: 8, or as kept)"
    )
    parser.add_argument(
        "--calibrate",
        nargs="?",
        const="",
        metavar="FILE",
        help="round to 4 bits by the inputs that the matrices have on a text (default: a built-in one), or by an "
        "importance matrix, *.gguf: the predictions stay closer to the original's",
    )
    parser.add_argument(
        "--bits-per-weight",
        type=float,
        metavar="B",
        help="choose a format of 4 bits or int8 for each matrix, 4.5 to 8.5 bits on average: more where it counts most",
    )
    parser.add_argument("--text-only", action="store_true", help="leave out the vision and audio towers")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="the longest text, in tokens: less takes less memory; more than the default is for models with longrope, "
        "such as Phi-4-mini, whose frequencies are then those of long texts, for all texts (default: the model's own)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of SOURCE on the hub")
    parser.add_argument("--gguf", metavar="NAME", help="the GGUF file to take of SOURCE, and to download of a hub id")
    parser.add_argument(
        "--no-prepare", action="store_true", help="leave compiling and packing for this machine to the first start"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare the bundle with the original, which needs torch and its memory"
    )
    parser.add_argument(
        "--verify-prompts",
        type=Path,
        metavar="FILE",
        help='file with the prompts to compare on: lines of text, or JSON lines with a "prompt"',
    )


def run(args: argparse.Namespace) -> int:
    """Export a checkpoint, prepare the bundle for this machine and verify it, as the arguments ask.

    Returns:
        The process's exit code.

    Raises:
        OndeviceError: a problem that the user can fix; the message is one line.
    """
    started = time.perf_counter()  # the printed time is a user's: with imports and the preparation
    if args.verify_prompts is not None and not args.verify:
        raise UsageError("--verify-prompts is for --verify: add it")
    if args.verify:
        if args.gguf is not None or any(str(each).lower().endswith(".gguf") for each in (args.source, args.drafter)):
            raise UsageError("--verify compares with a checkpoint of safetensors files: leave it out for a GGUF file")
        from ondevice_export.original import check_installed

        check_installed()
    try:
        from ondevice_export.exporter import export
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "onnx_ir", "export") from error

    with ending_by_exception(), Preparation() as kernels:

        def compile_kernels() -> None:
            """Begin with all kernels that the export and the preparation after it need, announced together."""
            with preparing() as on_prepare:
                kernels.on_prepare = on_prepare
                kernels.compile(["export", *(() if args.no_prepare else parts_of("simd"))])
                kernels.say()

        with ProgressBar("export", unit="weight", unit_scale=True) as bar:
            bundle = export(
                args.source,
                args.out,
                drafter=args.drafter,
                heads=args.heads,
                quantize=args.quantize,
                head_bits=args.head_bits,
                revision=args.revision,
                gguf=args.gguf,
                text_only=args.text_only,
                context=args.context,
                calibrate=args.calibrate,
                bits_per_weight=args.bits_per_weight,
                progress=bar.show,
                note=lambda line: bar.say(f"note: {line}"),
                on_begin=compile_kernels,
            )
        note_origin(Bundle.open(bundle), str(args.source))
        if not args.no_prepare:
            _prepare(bundle, kernels)
    size = sum(file.stat().st_size for file in bundle.iterdir())
    sys.stdout.write(f"{bundle}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s\n")
    code = _verify(args, bundle) if args.verify else 0
    sys.stdout.write(f"{_next_command(bundle)}\n")
    return code


def _prepare(bundle: Path, kernels: Preparation) -> None:
    """Prepare a bundle for this machine. A failure is only a note, because the bundle may run on another machine.

    Args:
        bundle: the exported one.
        kernels: the building of kernels that was begun before.
    """
    import ondevice

    with preparing() as on_prepare:
        kernels.on_prepare = on_prepare
        try:
            kernels.finish()
            ondevice.prepare(bundle, on_prepare=on_prepare)
        except OndeviceError as error:
            sys.stderr.write(f"note: the bundle is not prepared for this machine: {error}\n")


def _next_command(bundle: Path) -> str:
    """The shell command that tries the bundle, with the shortest name that finds it from the current directory."""
    name = str(bundle)
    if bundle.parent == model_home().resolve():
        name = bundle.name
    elif bundle.is_relative_to(Path.cwd()):
        name = str(bundle.relative_to(Path.cwd()))
    if (bundle / CHAT_TEMPLATE).exists() and (bundle / TOKENIZER).exists():
        return f"ondevice chat {shlex.quote(name)}"
    prompt = '"Once upon a time"' if (bundle / TOKENIZER).exists() else "--ids 2"
    return f"ondevice generate {shlex.quote(name)} {prompt}"


def _verify(args: argparse.Namespace, bundle: Path) -> int:
    from ondevice_export.checkpoint.source import locate, locate_drafter
    from ondevice_export.verify import read_prompts, verify

    target = locate(args.source, args.revision)
    drafter, exported = locate_drafter(args.drafter, target, lambda _line: None), Bundle.open(bundle).manifest.drafter
    known = drafter is not None and exported is not None and not exported.target_head  # by transformers
    prompts = read_prompts(bundle, args.verify_prompts)
    result = verify(bundle, target.directory, drafter.directory if drafter is not None and known else None, prompts)
    sys.stdout.write(f"\n{result.table()}\n\n{result.verdict()}\n\n")
    return 0 if result.passes else FAILED
