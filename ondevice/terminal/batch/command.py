"""`ondevice batch`: answer a file of prompts, several at once, and go on where a run was ended."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ondevice.bundle import Bundle
from ondevice.errors import UsageError
from ondevice.terminal.exit_codes import INTERRUPTED, UNANSWERED
from ondevice.terminal.interrupt import cancel_on_interrupt, ending_by_exception
from ondevice.terminal.loading import load_model
from ondevice.terminal.options import add_generation_arguments, add_model_arguments, generation_options

if TYPE_CHECKING:
    from ondevice.terminal.batch.answer_file import AnswerFile
    from ondevice.terminal.batch.model_threads import News
    from ondevice.terminal.batch.request import Request, RequestFile

SEQUENCES = 8
"""Of Gemma 4 E2B's shape, eight at once give 5.5 times the tokens of one (benchmarks/RESULTS.md)."""

APPROXIMATIONS = ("kv_cache", "attention", "attention_keys", "attention_width")
"""Options of a model that change what it says."""


class Answering(Protocol):
    """Who answers: this machine, or others."""

    def answers(self, requests: Iterable[Request]) -> Generator[News, None, None]: ...

    def cancel(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "prompts", metavar="PROMPTS", type=Path, help='JSON lines: {"prompt": text or messages, "id", options...}'
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON lines as they come; one that is begun goes on"
    )
    group.add_argument("--chat", action="store_true", help="a prompt that is a text is a user's message")
    group.add_argument(
        "--max-sequences",
        type=int,
        metavar="N",
        default=SEQUENCES,
        help=f"answers at the same time, which share forwards, 1 to 16 (default: {SEQUENCES})",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="answer on all machines of a Ray cluster, which have the bundle too: HOST:PORT, or auto",
    )
    add_generation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ondevice.options import GenerationDefaults, GenerationOptions
    from ondevice.terminal.batch.answer_file import AnswerFile
    from ondevice.terminal.batch.request import RequestFile

    options = generation_options(args)
    GenerationOptions.of(options).sampling(GenerationDefaults())  # what no line could be answered with
    about = json.dumps([Bundle.open(args.bundle).content, *(getattr(args, name) for name in APPROXIMATIONS)])
    requests = RequestFile(args.prompts, options, about, chat=args.chat)
    if args.out.exists() and args.out.samefile(args.prompts):
        raise UsageError("--out is the file of prompts: name another one")
    with AnswerFile(args.out) as answers:
        if known := len(answers):
            print(f"{known} of {requests.count} are answered already", file=sys.stderr)
        if any(not answers.has(request) for request in requests):
            with ending_by_exception():
                interrupted = _answer(args, requests, answers)
            if interrupted:
                print("ondevice: interrupted: the same command goes on from here", file=sys.stderr)
                return INTERRUPTED
        if answers.errors:
            print(f"{answers.errors} of {len(answers)} lines in {args.out} are errors", file=sys.stderr)
        return UNANSWERED if answers.errors else 0


def _answer(args: argparse.Namespace, requests: RequestFile, answers: AnswerFile) -> bool:
    """Ask what is not answered; whether Ctrl-C ended it."""
    if args.ray is not None:
        from ondevice.terminal.batch.cluster import Cluster

        with Cluster(args.ray, args) as cluster:
            return _write(cluster, requests, answers)

    from ondevice.terminal.batch.model_threads import ModelThreads

    with load_model(args) as model:
        return _write(ModelThreads(model, args.max_sequences), requests, answers)


def _write(answering: Answering, requests: RequestFile, answers: AnswerFile) -> bool:
    from ondevice.terminal.batch.bar import BatchBar

    left = (request for request in requests if not answers.has(request))
    with (
        cancel_on_interrupt(answering) as interrupt,
        BatchBar(requests.count - len(answers)) as bar,
        closing(answering.answers(left)) as heard,
    ):
        for news in heard:
            if isinstance(news, int):
                bar.count(0, news)
            else:
                answers.write(news)
                bar.count(1, 0)
    print(
        f"{bar.answers} answers, {bar.tokens} tokens in {bar.seconds:.1f} s, {bar.tokens_per_s:.1f} tokens/s",
        file=sys.stderr,
    )
    return interrupt.happened
