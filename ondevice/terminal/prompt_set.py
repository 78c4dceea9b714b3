"""Many prompts at once, for commands that go through all of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.bundle import CHAT_TEMPLATE
from ondevice.errors import ContextOverflowError, PromptError, UsageError
from ondevice.text.prompt_file import load_prompts

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.text.prompt import Prompt


def add_prompt_set_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompts", type=Path, metavar="FILE", help="HumanEval or Spec-Bench JSON lines, or text lines")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")


def check_limit(args: argparse.Namespace) -> None:
    """Raises UsageError for a limit that leaves nothing."""
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be a whole number from 1 on, not {args.limit}")


def fitting_prompts(model: Model, args: argparse.Namespace) -> tuple[list[Prompt], list[int]]:
    """The prompts that leave room for a reply, and their lengths in tokens; the others are counted on stderr."""
    prompts, lengths = [], []
    wanted = load_prompts(args.prompts, args.limit, as_chat=CHAT_TEMPLATE in model.manifest.files)
    for prompt in wanted:
        try:
            lengths.append(len(model.encode(prompt)))
        except ContextOverflowError:
            continue
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"no prompt fits into the context of {model.context_length} tokens")
    if len(prompts) < len(wanted):
        print(f"{len(wanted) - len(prompts)} of {len(wanted)} prompts are too long: left out", file=sys.stderr)
    return prompts, lengths
