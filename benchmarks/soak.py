"""Many requests of mixed kinds to a server, and what they leave: memory, descriptors, threads, wrong replies.

    python -m benchmarks.soak BUNDLE [--requests 10000] [--clients 16] [--seed 0] [--json]

Starts `ondevice serve` and sends it completions and, where the bundle has a chat template, the chat requests of the
three APIs: whole and streamed, greedy and sampled, with stop strings, log probabilities and JSON schemas, conversations
that grow, long prompts, requests that the client leaves in the middle, and invalid ones. Every status has to be the
expected one, and the same greedy request, sent now and then, has to have the same reply as at the beginning. Linux
only: memory and descriptors are those of `/proc`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.memory_watch import Memory
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.cli.bench.tables import table

CHARACTERS = "abcdefghij klmnop\n(){}=+"

TIMEOUT_S = 300.0
"""A request that takes longer has failed."""

STAGES = 10
"""Parts that the requests are divided into; the server is looked at after each."""

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

CANARY = {"prompt": "def total(values):\n", "max_tokens": 24, "temperature": 0}


@dataclass(frozen=True)
class Request:
    """body : JSON, or bytes that are none
    status : the expected one
    leave : whether the client leaves after the first bytes of the reply
    """

    path: str
    body: Any
    status: int = 200
    leave: bool = False


@dataclass(frozen=True)
class Stage:
    """The server after so many requests."""

    requests: int
    anonymous_mb: float
    descriptors: int
    threads: int
    requests_per_s: float


Kind = Callable[[random.Random], Request]


def text(rng: random.Random, most: int) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(1, most)))


def completion(rng: random.Random, **fields: Any) -> dict[str, Any]:
    options = {"max_tokens": rng.randrange(1, 24), "temperature": rng.choice((0, 1)), "seed": rng.randrange(1000)}
    return {"prompt": text(rng, 200), **options, **fields}


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation that begins like others of the same number and goes on by a random number of turns."""
    own = random.Random(rng.randrange(8))
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": text(own, 80)} for turn in range(2 * rng.randrange(4) + 1)]


COMPLETIONS: dict[str, Kind] = {
    "completion": lambda rng: Request("/v1/completions", completion(rng)),
    "completion, streamed": lambda rng: Request("/v1/completions", completion(rng, stream=True)),
    "several at once": lambda rng: Request("/v1/completions", completion(rng, n=2)),
    "log probabilities": lambda rng: Request("/v1/completions", completion(rng, logprobs=3)),
    "stop strings": lambda rng: Request("/v1/completions", completion(rng, stop=["\n", "e"])),
    "long prompt": lambda rng: Request("/v1/completions", completion(rng, prompt=text(rng, 6000), max_tokens=2)),
    "client leaves": lambda rng: Request("/v1/completions", completion(rng, max_tokens=400, stream=True), leave=True),
    "tokenize": lambda rng: Request("/tokenize", {"content": text(rng, 2000)}),
    "no JSON": lambda rng: Request("/v1/completions", b"{" + text(rng, 50).encode(), status=400),
    "wrong option": lambda rng: Request("/v1/completions", completion(rng, temperature="warm"), status=400),
    "too long": lambda rng: Request("/v1/completions", completion(rng, prompt=[1] * 300_000), status=400),
}

CHATS: dict[str, Kind] = {
    "chat": lambda rng: Request("/v1/chat/completions", {"messages": conversation(rng), "max_tokens": 16}),
    "chat, streamed": lambda rng: Request(
        "/v1/chat/completions", {"messages": conversation(rng), "max_tokens": 16, "stream": True}
    ),
    "JSON schema": lambda rng: Request(
        "/v1/chat/completions",
        {
            "messages": conversation(rng),
            "max_tokens": 32,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    "responses": lambda rng: Request("/v1/responses", {"input": conversation(rng), "max_output_tokens": 16}),
    "messages": lambda rng: Request("/v1/messages", {"messages": conversation(rng), "max_tokens": 16}),
    "chat left": lambda rng: Request(
        "/v1/chat/completions", {"messages": conversation(rng), "max_tokens": 400, "stream": True}, leave=True
    ),
    "wrong role": lambda rng: Request(
        "/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, status=400
    ),
}


def soak(bundle: Path, requests: int, clients: int, seed: int) -> tuple[list[Stage], Counter[str]]:
    """The stages of a server under these requests, and how often each failure happened."""
    kinds = COMPLETIONS | (CHATS if (bundle / CHAT_TEMPLATE).exists() else {})
    failures: Counter[str] = Counter()
    stages: list[Stage] = []
    with serving(bundle, clients) as (pid, port):
        canary = reply_text(send(port, Request("/v1/completions", CANARY))[1])

        def one(number: int) -> None:
            rng = random.Random(seed * 1_000_003 + number)
            name = rng.choice(list(kinds)) if number % 50 else "canary"
            request = Request("/v1/completions", CANARY) if name == "canary" else kinds[name](rng)
            try:
                status, body = send(port, request)
            except (OSError, http.client.HTTPException) as error:
                failures[f"{name}: {type(error).__name__}"] += 1
                return
            if status != request.status:
                failures[f"{name}: status {status}"] += 1
            elif name == "canary" and reply_text(body) != canary:
                failures["canary: another reply"] += 1

        with ThreadPoolExecutor(clients) as pool:
            for part in range(STAGES):
                numbers = range(requests * part // STAGES, requests * (part + 1) // STAGES)
                started = perf_counter()
                list(pool.map(one, numbers))
                stages.append(look(pid, numbers.stop, len(numbers) / (perf_counter() - started)))
    return stages, failures


def send(port: int, request: Request) -> tuple[int, bytes]:
    """The status and the body of the reply; of a request that the client leaves, what arrived first."""
    body = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", request.path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read1(64) if request.leave else reply.read()


def get(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def reply_text(body: bytes) -> str:
    choices = json.loads(body).get("choices")
    if not choices:
        raise SystemExit(f"the server replied: {body.decode()}")
    return str(choices[0]["text"])


def look(pid: int, requests: int, requests_per_s: float) -> Stage:
    process = Path(f"/proc/{pid}")
    memory = Memory.parse((process / "status").read_text())
    if memory is None:
        raise SystemExit("this system does not say how much memory a process has")
    descriptors, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return Stage(requests, memory.anonymous / 1e6, descriptors, threads, requests_per_s)


@contextmanager
def serving(bundle: Path, clients: int) -> Iterator[tuple[int, int]]:
    """A server of its own; yields its process and port."""
    command = [sys.executable, "-m", "ondevice", "serve", str(bundle), "--port", "0", "--exit-with-parent"]
    command += ["--max-waiting", str(2 * clients)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        drained = threading.Thread(target=process.stdout.read, daemon=True)
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            drained.start()
            port = json.loads(line)["port"]
            while get(port, "/health") != 200:  # it listens while it loads the model
                sleep(0.05)
            yield process.pid, port
        finally:
            process.stdin.close()
            process.wait(TIMEOUT_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    stages, failures = soak(args.bundle, args.requests, args.clients, args.seed)
    if args.json:
        print(json.dumps({"stages": [asdict(stage) for stage in stages], "failures": failures}))
    else:
        titles = ["requests", "anonymous MB", "descriptors", "threads", "requests/s"]
        print(
            table(titles, [[f"{value:.0f}" for value in asdict(stage).values()] for stage in stages], left=set()),
            *(f"{count} x {failure}" for failure, count in failures.most_common()),
            sep="\n",
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
