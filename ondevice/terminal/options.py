"""Options that several commands share, and the keywords of `Model.stream` that they stand for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ondevice.bundle import is_bundle
from ondevice.drafters import registry

if TYPE_CHECKING:
    from ondevice.options import GenerationKeywords

ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def add_model_arguments(parser: argparse.ArgumentParser, threads: Callable[[str], object] = int) -> None:
    """What every command that loads a bundle takes; `threads` reads that option's word."""
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's directory, or its name under $ONDEVICE_HOME")
    group = parser.add_argument_group("model")
    group.add_argument("--engine", choices=["auto", "simd", "ort"], default="auto", help="what runs the graphs")
    group.add_argument(
        "-t",
        "--threads",
        type=threads,
        metavar="N",
        help="compute threads at most; fewer run where that is faster (default: the physical cores)",
    )
    group.add_argument(
        "-c", "--context-length", type=int, metavar="N", help="most tokens held (default: the model's own)"
    )
    group.add_argument(
        "--kv-cache", choices=["fp16", "int8"], default="fp16", help="what keys and values are held in (default: fp16)"
    )
    group.add_argument(
        "--attention",
        choices=["exact", "lookup", "lookup-drafts", "nomad"],
        default="exact",
        help="what a long context is read by: lookup attends to the keys that table lookups choose; lookup-drafts only "
        "while drafting, which changes no text; nomad takes looked up scores of all keys (default: exact)",
    )
    group.add_argument(
        "--attention-keys",
        type=attention_keys,
        metavar="N",
        help="keys that lookups choose, a multiple of 32 (default: auto, 256 to 2048, by what would be left out)",
    )
    group.add_argument(
        "--attention-width",
        type=int,
        choices=[1, 2, 4],
        default=4,
        help="numbers of a key that share a code of 4 bits (default: 4)",
    )


def attention_keys(word: str) -> int | None:
    """A number, or `auto`."""
    return None if word == "auto" else int(word)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "What is not given is as the bundle's generation_config.json says.")
    group.add_argument("--temperature", "--temp", type=float, metavar="T", help="0 always takes the likeliest token")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens that sum to P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens under P times the likeliest")
    group.add_argument("--repetition-penalty", type=float, metavar="F", help="over 1: shun tokens that occurred")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="taken from tokens that were generated")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="the same, for each time that they were")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int = 256) -> None:
    """Sampling, the end of a text, and drafting."""
    add_sampling_arguments(parser)
    group = parser.add_argument_group("end of the text")
    group.add_argument(
        "-n", "--max-new-tokens", type=int, metavar="N", default=max_new_tokens, help=f"default: {max_new_tokens}"
    )
    group.add_argument(
        "--stop",
        type=unescape,
        action="append",
        metavar="TEXT",
        help=r"end before this text; may be repeated; \n and \t are understood",
    )
    group = parser.add_argument_group(
        "drafting", "Drafts change the speed, never the text, but for --draft-sampling ratio."
    )
    add_drafter_argument(group, "who proposes tokens (default: auto, all that the bundle offers)")
    group.add_argument(
        "--draft-sampling",
        choices=["coupled", "ratio"],
        help="how a draft bundle draws: coupled, with the target's noise (default), or ratio, as it sees fit itself "
        "and verified by the ratio rule: a seed's text is then its own, and depends on how much is drafted",
    )
    group.add_argument("--num-assistant-tokens", type=int, metavar="N", help="tokens per draft")
    group.add_argument(
        "--num-assistant-tokens-schedule",
        choices=["auto", "heuristic", "constant"],
        help="how drafts grow and shrink (default: auto, as long as they pay on this machine)",
    )


def add_chat_arguments(group: argparse._ActionsContainer) -> None:
    """What a conversation begins with."""
    group.add_argument("--system", metavar="TEXT", help="instructions for the model")
    group.add_argument(
        "--thinking", action="store_const", const=True, help="let the model think first, where its template knows how"
    )


def add_drafter_argument(group: argparse._ArgumentGroup, text: str) -> None:
    group.add_argument(
        "--drafter",
        type=drafter,
        metavar="WHO",
        help=f"{text}: {', '.join(registry.names())}; or PATH, a bundle with the same vocabulary, which drafts alone; "
        "or auto+PATH, it and all that the bundle offers",
    )


def drafter(word: str) -> str:
    """A name of the registry, or the path of a draft bundle."""
    location = registry.draft_bundle(word)
    if location is not None and not is_bundle(location):
        known = ", ".join(registry.names())
        raise argparse.ArgumentTypeError(f"{word!r} is none of {known}, and there is no such bundle")
    return word


def generation_options(args: argparse.Namespace) -> GenerationKeywords:
    """Keywords of `Model.stream`: those that were given."""
    names = (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "thinking",
        "seed",
        "drafter",
        "draft_sampling",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
    )
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if getattr(args, "stop", None):
        given["stop"] = tuple(args.stop)
    return cast("GenerationKeywords", given)


def unescape(text: str) -> str:
    r"""`\n`, `\t` and `\\` as the characters they stand for: not every shell can write them."""
    return re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text)
