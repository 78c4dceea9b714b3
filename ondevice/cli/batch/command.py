"""`ondevice batch`: options, the choice between this machine and a Ray cluster, and the progress bar."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ondevice.bundle import Bundle
from ondevice.cli.main import FAILED, INTERRUPTED
from ondevice.cli.options import (
    add_generation_arguments,
    add_image_tokens_argument,
    add_model_arguments,
    add_sequences_argument,
    generation_options,
    load_model,
)
from ondevice.cli.terminal.progress import ProgressBar, cancel_on_interrupt, ending_by_exception
from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.cli.batch.answers import AnswerFile
    from ondevice.cli.batch.requests import RequestFile
    from ondevice.cli.batch.workers import Cluster, ModelThreads

SEQUENCES = 8
"""Default of `--max-sequences`. For Gemma 4 E2B's shape, eight sequences at once give 5.5 times the tokens of one
(benchmarks/results/sequences.md)."""

APPROXIMATIONS = ("kv_cache", "attention", "attention_keys", "attention_width")
"""Options of loading a model that can change its replies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "prompts", metavar="PROMPTS", type=Path, help='JSON lines: {"prompt": text or messages, "id", options...}'
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="append answers to this file, as JSON lines; prompts that it answers already are skipped",
    )
    group.add_argument("--chat", action="store_true", help="treat a prompt that is a text as a user's message")
    add_image_tokens_argument(group)
    add_sequences_argument(group, "prompts", SEQUENCES)
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="use all machines of a Ray cluster, each with a copy of the bundle: HOST:PORT, or auto",
    )
    add_generation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ondevice.cli.batch.answers import AnswerFile
    from ondevice.cli.batch.requests import RequestFile
    from ondevice.options import GenerationDefaults, GenerationOptions

    options = generation_options(args)
    GenerationOptions.of(options).sampling(GenerationDefaults())  # options that no line could be answered with
    model_identity = json.dumps([Bundle.open(args.bundle).content, *(getattr(args, name) for name in APPROXIMATIONS)])
    requests = RequestFile(args.prompts, options, model_identity, chat=args.chat)
    if str(args.out) == "-":
        raise UsageError("--out - is not a file from which an interrupted batch can go on: name one, or /dev/stdout")
    if args.out.exists() and args.out.samefile(args.prompts):
        raise UsageError("--out is the file of prompts: name another one")
    with closing(AnswerFile(args.out)) as answers:
        known = sum(map(answers.has, requests)) if len(answers) else 0  # answers to lines that are gone do not count
        if known:
            print(f"{known} of {requests.count} are answered already", file=sys.stderr)
        if rest := requests.count - known:
            with ending_by_exception():
                interrupted = _answer_rest(args, requests, answers, rest)
            if interrupted:
                print("ondevice: interrupted: run the same command again to continue", file=sys.stderr)
                return INTERRUPTED
        if answers.errors:
            print(f"{answers.errors} of {len(answers)} lines in {args.out} are errors", file=sys.stderr)
        return FAILED if answers.errors else 0


def _answer_rest(args: argparse.Namespace, requests: RequestFile, answers: AnswerFile, count: int) -> bool:
    """Answer the `count` requests that have no answer yet; True if Ctrl-C ended it."""
    from ondevice.cli.batch.workers import Cluster, ModelThreads

    if args.ray is not None:
        with closing(Cluster(args.ray, args)) as cluster:
            return _write_answers(cluster, requests, answers, count)
    with load_model(args) as model:
        return _write_answers(ModelThreads(model, args.max_sequences), requests, answers, count)


def _write_answers(workers: ModelThreads | Cluster, requests: RequestFile, answers: AnswerFile, count: int) -> bool:
    unanswered = (request for request in requests if not answers.has(request))
    errors_before = answers.errors
    with (
        cancel_on_interrupt(workers.cancel) as interrupted,
        BatchBar(count) as bar,
        closing(workers.answers(unanswered)) as events,
    ):
        for event in events:
            if isinstance(event, int):
                bar.count(0, event)
            else:
                answers.write(event)
                bar.count(1, 0)
    seconds, pace = bar.pace()
    refused = answers.errors - errors_before
    counts = f"{bar.answers - refused} answers" + (f", {refused} errors" if refused else "")
    print(f"{counts}, {bar.tokens} tokens in {seconds:.1f} s, {pace:.1f} tokens/s", file=sys.stderr)
    return interrupted.is_set()


class BatchBar(ProgressBar):
    """A bar of answered prompts, with tokens per second and the time left at this pace."""

    def __init__(self, total: int) -> None:
        """`total` is the number of prompts to answer."""
        super().__init__(
            "",
            bar_format="batch: {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left, {desc}",
            smoothing=0.0,  # long answers are rare events: the mean pace predicts better than the latest
            miniters=0,  # redraw for new tokens too, without a new answer
            mininterval=0.25,
        )
        self._total = total
        self._started = perf_counter()
        self.answers = 0
        self.tokens = 0

    def pace(self) -> tuple[float, float]:
        """Seconds since the beginning, and tokens per second."""
        seconds = perf_counter() - self._started
        return seconds, self.tokens / seconds

    def count(self, answers: int, tokens: int) -> None:
        """Add new answers and new tokens."""
        self.answers += answers
        self.tokens += tokens
        self.show(self.answers, self._total, f"{self.pace()[1]:.1f} tokens/s")
