"""Options that several commands share, and their translation to arguments of `ondevice.load` and `Model.stream`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.bundle import is_bundle
from ondevice.bundle_format.vision import BUDGETS
from ondevice.cli.terminal.progress import PERCENTAGE, ProgressBar, ending_by_exception
from ondevice.generate.drafters import registry
from ondevice.progress import OnPrepare

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords

MODEL_OPTIONS = (
    "engine",
    "threads",
    "context_length",
    "kv_cache",
    "attention",
    "attention_keys",
    "attention_width",
    "drafter",
    "max_sequences",
)
"""Options that are keywords of `ondevice.load`, where a command has them."""

SAMPLING = (
    ("--temperature --temp", float, "T", "0 always takes the most likely token"),
    ("--top-k", int, "K", "sample from the K most likely tokens"),
    ("--top-p", float, "P", "sample from the most likely tokens with a total probability of P"),
    ("--min-p", float, "P", "drop tokens with less than P times the probability of the likeliest"),
    ("--repetition-penalty", float, "F", "over 1: tokens that occurred become less likely"),
    ("--presence-penalty", float, "P", "subtracted from the logits of generated tokens"),
    ("--frequency-penalty", float, "P", "the same, times the occurrences of the token"),
    ("--seed", int, "N", "the same seed gives the same text"),
)
"""Options of sampling: names, type, metavar, help."""

ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def add_bundle_argument(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Declare the bundle, with further options of `add_argument`."""
    help_text = "a bundle's directory, or its name under $ONDEVICE_HOME"
    parser.add_argument("bundle", metavar="BUNDLE", help=help_text, **options)


def add_count(group: argparse._ActionsContainer, *names: str, text: str, default: int | None = None) -> None:
    """Declare an option that is a whole number. Its help is `text`, and the default if it has one."""
    shown = text if default is None else f"{text} (default: {default})"
    group.add_argument(*names, type=int, metavar="N", default=default, help=shown)


def add_sequences_argument(group: argparse._ActionsContainer, what: str, default: int) -> None:
    """Declare `--max-sequences`, for `what` runs at the same time."""
    text = f"{what} that run at the same time and share forwards, 1 to 16"
    add_count(group, "--max-sequences", text=text, default=default)


def add_model_arguments(
    parser: argparse.ArgumentParser,
    threads: Callable[[str], object] = int,
    engines: Callable[[str], object] | None = None,
    **options: Any,
) -> None:
    """Declare the bundle, with further options of `add_argument`, and the options of loading it.

    Args:
        threads: parses the value of `--threads`.
        engines: parses the value of `--engine`, for a command that takes several; its default is then None.
    """
    add_bundle_argument(parser, **options)
    group = parser.add_argument_group("model")
    text = "inference engine (default: auto, simd if it supports the bundle, otherwise ort)"
    if engines is None:
        group.add_argument("--engine", choices=["auto", "simd", "ort"], default="auto", help=text)
    else:
        group.add_argument("--engine", type=engines, metavar="LIST", help=f"{text}; several: simd,ort")
    group.add_argument(
        "-t",
        "--threads",
        type=threads,
        metavar="N",
        help="maximum number of compute threads; fewer run where that is faster (default: the physical cores)",
    )
    text = "maximum number of tokens of prompt and reply together (default: the model's limit)"
    add_count(group, "-c", "--context-length", text=text)
    group.add_argument(
        "--kv-cache", choices=["fp16", "int8"], default="fp16", help="data type of the KV cache (default: fp16)"
    )
    group.add_argument(
        "--attention",
        choices=["exact", "lookup", "lookup-drafts", "nomad"],
        default="exact",
        help="attention in long contexts: lookup reads only the keys that table lookups select; lookup-drafts does so "
        "only while drafting, which does not change the text; nomad scores all keys by table lookups (default: exact)",
    )
    group.add_argument(
        "--attention-keys",
        type=attention_keys,
        metavar="N",
        help="number of keys that lookup selects, a multiple of 32 (default: auto, 256 to 2048, enough to leave out "
        "about 2 %% of the attention weights)",
    )
    group.add_argument(
        "--attention-width",
        type=int,
        choices=[1, 2, 4],
        default=4,
        help="elements of a key per 4-bit code of the lookup tables (default: 4)",
    )


def attention_keys(word: str) -> int | None:
    """Parse `--attention-keys`: a number, or `auto` as None."""
    return None if word == "auto" else int(word)


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int | str = 256) -> None:
    """Declare the options of sampling, of the reply's end and of drafting.

    Args:
        max_new_tokens: the reply's length by default; or a text about it, for a command whose default depends on the
            prompt: the option is then None.
    """
    group = parser.add_argument_group("sampling", "Defaults come from the bundle's generation_config.json.")
    for names, parse, metavar, text in SAMPLING:
        group.add_argument(*names.split(), type=parse, metavar=metavar, help=text)
    group = parser.add_argument_group("end of the reply")
    text = "maximum number of tokens to generate"
    if isinstance(max_new_tokens, str):
        add_count(group, "-n", "--max-new-tokens", text=f"{text} (default: {max_new_tokens})")
    else:
        add_count(group, "-n", "--max-new-tokens", text=text, default=max_new_tokens)
    group.add_argument(
        "--stop",
        type=unescape,
        action="append",
        metavar="TEXT",
        help=r"stop before this text; may be repeated; \n and \t are recognised",
    )
    group = parser.add_argument_group(
        "drafting", "Drafts change the speed, never the text, except with --draft-sampling ratio."
    )
    add_drafter_argument(group)
    group.add_argument(
        "--draft-sampling",
        choices=["coupled", "ratio"],
        help="how a draft bundle samples: coupled, with the target's noise (default), or ratio, from its own "
        "distribution, verified by rejection sampling: the text of a seed then depends on drafter and draft lengths",
    )
    text = (
        "number of tokens per draft: of each with the schedule constant, of a model's first with heuristic (default: "
        "that of the bundle's MTP drafter, else 4), at most with auto (default: 16)"
    )
    add_count(group, "--num-assistant-tokens", text=text)
    group.add_argument(
        "--num-assistant-tokens-schedule",
        choices=["auto", "heuristic", "constant"],
        help="how the length of drafts changes (default: auto, the length that is fastest on this machine)",
    )


def add_drafter_argument(
    group: argparse._ArgumentGroup, text: str = "drafter (default: auto, all that the bundle offers)"
) -> None:
    """Declare `--drafter`, whose help begins with `text`."""
    group.add_argument(
        "--drafter",
        type=drafter,
        metavar="NAME",
        help=f"{text}: {', '.join(registry.names())}; or PATH, a bundle with the same vocabulary, as the only drafter; "
        "or auto+PATH, that bundle together with all that the bundle offers",
    )


def drafter(word: str) -> str:
    """Parse `--drafter`: a name of the registry, or the path of a draft bundle, which must exist."""
    location = registry.draft_bundle(word)
    if location is not None and not is_bundle(location):
        known = ", ".join(registry.names())
        raise argparse.ArgumentTypeError(f"{word!r} is none of {known}, and there is no such bundle")
    return word


def add_chat_arguments(group: argparse._ActionsContainer) -> None:
    """Declare the options of a conversation's beginning."""
    group.add_argument("--system", metavar="TEXT", help="system message: instructions for the model")
    group.add_argument(
        "--thinking",
        action="store_const",
        const=True,
        help="let the model think before it answers, if its chat template supports it",
    )
    group.add_argument(
        "--effort",
        dest="thinking",
        choices=("low", "medium", "high"),
        help="let it think, and this much, if its chat template has a reasoning_effort",
    )


def add_image_tokens_argument(group: argparse._ActionsContainer) -> None:
    """Declare the detail of pictures, for commands that take them."""
    group.add_argument(
        "--image-tokens",
        type=int,
        choices=BUDGETS,
        metavar="N",
        help=f"tokens of a picture at most: {', '.join(map(str, BUDGETS))} (default: as the model was trained, 280)",
    )


def unescape(text: str) -> str:
    r"""Replace `\n`, `\t` and `\\` by the characters that they stand for, which not every shell can pass."""
    return re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text)


def generation_options(args: argparse.Namespace) -> GenerationKeywords:
    """Keywords of `Model.stream`: the options that were given, and no others."""
    from ondevice.options import GenerationKeywords

    names = GenerationKeywords.__annotations__
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return cast("GenerationKeywords", given)


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `ondevice.load`: the options of `MODEL_OPTIONS` that the command has."""
    return {name: getattr(args, name) for name in MODEL_OPTIONS if hasattr(args, name)}


def load_model(args: argparse.Namespace, *listeners: OnPrepare, bundle: Path | None = None) -> Model:
    """Call `ondevice.load` with the options that the command has, within `preparing`.

    Args:
        bundle: for a command that loads several; None for the one of the command line.
    """
    import ondevice

    with preparing(*listeners) as report:
        return ondevice.load(bundle or args.bundle, on_prepare=report, **model_options(args))


@contextmanager
def preparing(*listeners: OnPrepare) -> Iterator[OnPrepare]:
    """Show a bar while a bundle is prepared, and a line if Ctrl-C interrupts that.

    Args:
        listeners: also called with the progress.

    Yields:
        The callback for the progress.
    """
    with ending_by_exception(), ProgressBar("preparing", bar_format=PERCENTAGE, delay=0.5) as bar:

        def report(stage: str, share: float) -> None:
            for listener in listeners:
                listener(stage, share)
            bar.show(round(1000 * share), 1000, stage)

        try:
            yield report
        except KeyboardInterrupt:
            bar.say("ondevice: interrupted while preparing the bundle: kernels compiled so far are kept")
            raise
