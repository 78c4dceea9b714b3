"""`ondevice serve`: bundles behind the HTTP APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.bundle import Bundle, bundles_in, is_bundle
from ondevice.cli.main import INTERRUPTED
from ondevice.cli.options import (
    add_count,
    add_drafter_argument,
    add_model_arguments,
    add_sequences_argument,
    load_model,
)
from ondevice.errors import MissingDependencyError, UsageError
from ondevice.machine import expanded
from ondevice.text.prompt_file import read_text

if TYPE_CHECKING:
    from ondevice.server.model_manager import ServedModel
    from ondevice.server.running import Server, Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, nargs="+")
    group = parser.add_argument_group("several models", "Each is loaded by the first request that names it.")
    group.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="memory that the models and their caches may take together: the least recently used ones are unloaded "
        "(default: no limit)",
    )
    group.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME[=MODEL]",
        help="a further name of a model, by default of the first one, for programs that ask for gpt-4o; repeatable",
    )
    group = parser.add_argument_group("drafting", "Drafts change the speed, never the text.")
    add_drafter_argument(group)
    group = parser.add_argument_group("requests")
    add_sequences_argument(group, "requests", 4)
    text = "maximum length of the queue; requests beyond it get status 503"
    add_count(group, "--max-waiting", text=text, default=32)
    group.add_argument(
        "--idle-unload",
        type=float,
        metavar="SECONDS",
        help="unload the model after this time without a request; the next request loads it again",
    )
    group = parser.add_argument_group("address and access")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    group.add_argument(
        "--port",
        type=int,
        default=8642,
        help="port to listen on (default: %(default)s); 0 takes a free one",
    )
    group.add_argument("--api-key", metavar="KEY", help="key that clients must send; visible in lists of processes")
    group.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the key")
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests to this name of the machine too; may be repeated",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin, such as https://example.org, use the server from a browser; * for all; may be "
        "repeated",
    )
    group.add_argument(
        "--exit-with-parent", action="store_true", help="exit when standard input is closed, as when the parent exits"
    )


def run(args: argparse.Namespace) -> int:
    try:
        from ondevice.server.running import Server
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise MissingDependencyError(package, "serve", what="`ondevice serve`") from error
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about every client that disconnects from a stream
    bundles = [bundle for location in args.bundle for bundle in _bundles(location)]
    server = Server([_source(bundle, args) for bundle in bundles], _setup(args))
    print(f"ondevice: {', '.join(server.names)} at {server.url} (Ctrl-C ends it)", file=sys.stderr)
    if args.api_key is None and args.api_key_file is None and not server.is_local:
        print(
            "ondevice: anyone who reaches this machine can use it: set a key with --api-key-file FILE", file=sys.stderr
        )
    address = {"url": server.url, "host": server.host, "port": server.port, "pid": os.getpid()}
    print(json.dumps(address), flush=True)  # for a program that started it: the port is open, and which one it is
    if args.exit_with_parent:
        threading.Thread(target=_stop_with_input, args=[server], name="ondevice-parent", daemon=True).start()
    return INTERRUPTED if server.run() == signal.SIGINT else 0


def _bundles(location: str) -> list[Bundle]:
    """The bundle at a path or of a name, or all bundles in a directory of them, sorted by name.

    Raises:
        BundleError: there is none, or one cannot be used.
    """
    found: Sequence[str | Path] = [] if is_bundle(location) else bundles_in(expanded(location))
    return [Bundle.open(path) for path in found or [location]]


def _source(bundle: Bundle, args: argparse.Namespace) -> ServedModel:
    from ondevice.server.model_manager import ServedModel

    return ServedModel(bundle, lambda on_prepare: load_model(args, on_prepare, bundle=bundle.path))


def _memory(gigabytes: float | None) -> int | None:
    """Bytes that the models may take; None for no limit."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:
        raise UsageError(f"--memory must be a number of GB above 0, not {gigabytes}")
    return int(1e9 * gigabytes)


def _aliases(words: Sequence[str]) -> dict[str, str]:
    """`NAME`, which stands for the first model, and `NAME=MODEL`; UsageError for an empty name."""
    aliases = {alias: name for alias, _, name in (word.partition("=") for word in words)}
    if "" in aliases:
        raise UsageError("--alias takes NAME or NAME=MODEL, and the name is empty")
    return aliases


def _setup(args: argparse.Namespace) -> Setup:
    """The server's setup from the options; UsageError for a value out of range, two API keys, or an empty one."""
    from ondevice.server.guard import Rules
    from ondevice.server.running import Setup

    for name in ("max_waiting", "idle_unload"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be a finite number, 0 or more, not {value}")
    rules = Rules(hosts=tuple(args.allow_host), origins=tuple(args.allow_origin), api_key=_api_key(args))
    return Setup(
        host=args.host,
        port=args.port,
        max_sequences=args.max_sequences,
        max_waiting=args.max_waiting,
        idle_s=args.idle_unload,
        memory=_memory(args.memory),
        aliases=_aliases(args.alias),
        rules=rules,
    )


def _api_key(args: argparse.Namespace) -> str | None:
    if args.api_key is not None and args.api_key_file is not None:
        raise UsageError("--api-key and --api-key-file cannot be combined: leave one of them out")
    key: str | None = args.api_key
    if args.api_key_file is not None:
        lines = read_text(Path(args.api_key_file)).splitlines()
        key = lines[0].strip() if lines else ""
    if key is not None and not key:
        raise UsageError("the API key is empty: give one, or leave --api-key and --api-key-file out")
    return key


def _stop_with_input(server: Server) -> None:
    """Stop the server when standard input is closed.

    Reads the descriptor itself: Python's buffered reader holds a lock, for which the exiting process would wait.
    """
    while os.read(0, 4096):
        pass
    server.stop()
