"""Replies of a target, which its drafter learns from: written by this project's engine, in the target's chat template.

Every process appends to a file of its own, a line of JSON per reply. Whatever stops them, a second call goes on after
the complete lines. `replies_on_device` writes the same lines with an accelerator.
"""

import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from text.prompts import prompt

import ondevice

TEMPERATURES = (1.0, 0.7, 1.0, 0.0)  # one of these by chance
OWN_SHARE = 0.4  # of the prompts are written by the target itself
MOST = 320  # tokens of a reply
HELD_OUT_TOKENS = 128  # of a reply to a given message
MAX_ASKED = 160  # tokens of a prompt by the target
TOGETHER = 16  # replies that share the forwards of a process
LOG_SECONDS = 60
HELD_OUT_EVERY = 32  # replies whose number is a multiple are never trained on
HELD_OUT_FROM = 1_000_000  # such multiples belong to given prompts
MARK = "QUESTION"  # stands for a user's message in a rendered template
PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "drafter": "none"}


@dataclass(frozen=True)
class Written:
    """A reply: token ids of the whole prompt, rendered, and of the reply, with the token that ends it."""

    number: int
    kind: str
    temperature: float
    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class Asked:
    """A user's message. kind : "own" for one by the target itself, whose text comes later"""

    number: int
    kind: str
    temperature: float
    text: str = ""


def asked(number: int) -> Asked:
    """Message `number` of the training."""
    random = Random(number)
    temperature = random.choice(TEMPERATURES)
    kind, text = ("own", "") if random.random() < OWN_SHARE else prompt(number)
    return Asked(number, kind, temperature, text)


def held_out(files: Sequence[Path]) -> list[Asked]:
    """Messages to measure on, each at temperature 0 and 1: JSON lines with `prompt` or `turns`.

    Their kind is the file's name, or the line's `category`. They are numbered as held-out ones.
    """
    lines = [json.loads(line) | {"file": file.stem} for file in files for line in file.read_text().splitlines()]
    texts = [(line.get("category", line["file"]), line.get("prompt") or line["turns"][0]) for line in lines]
    numbered = enumerate((kind, temperature, text) for kind, text in texts for temperature in (0.0, 1.0))
    return [Asked(HELD_OUT_EVERY * (HELD_OUT_FROM + place), *parts) for place, parts in numbered]


def before_a_message(encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str]) -> list[int] | None:
    """The ids of a rendered conversation up to the user's message; None if there is no chat template."""
    try:
        rendered = encode([{"role": "user", "content": MARK}])
    except ondevice.OndeviceError:
        return None
    before = decode(rendered).index(MARK)
    return next(rendered[:n] for n in range(len(rendered), 0, -1) if len(decode(rendered[:n])) <= before)


def lines_of(replies: Iterable[Written]) -> str:
    """Replies as lines of JSON."""
    return "".join(json.dumps(asdict(each), separators=(",", ":")) + "\n" for each in replies)


class Writer:
    """A process's target."""

    def __init__(self, bundle: Path, most: int = MOST) -> None:
        self.model = ondevice.load(bundle, threads=1, max_sequences=TOGETHER, cache_bytes=0)
        self.most = most
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        self.opening = before_a_message(self.model.encode, tokenizer.decode)

    def write(self, message: Asked) -> Written | None:
        """The reply to a message, or without a chat template the text's continuation; None if the target asked
        nothing.
        """
        number, text = message.number, message.text
        if message.kind == "own":
            if self.opening is None:
                return None
            made = self.model.generate(self.opening, max_new_tokens=MAX_ASKED, temperature=1.0, seed=number, **PLAIN)
            text = made.text.strip()
            if not text or made.finish_reason != "stop":
                return None
        ids = self.model.encode(text if self.opening is None else [{"role": "user", "content": text}])
        options = {"temperature": message.temperature, "seed": number, **PLAIN}
        reply = self.model.generate(ids, max_new_tokens=self.most, **options)
        return Written(number, message.kind, message.temperature, ids, list(reply.token_ids))


def write_replies(bundle: Path, directory: Path, tokens: int) -> None:
    """Write replies of `tokens` tokens in total to files in `directory`, with a process for every core."""
    count = os.cpu_count() or 1
    spawn = multiprocessing.get_context("spawn")
    shares = [(bundle, directory / f"replies-{rank}.jsonl", rank, count, tokens // count) for rank in range(count)]
    processes = [spawn.Process(target=write_share, args=share) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process that writes replies has failed: its message is above")


def write_held_out(bundle: Path, messages: Sequence[Asked], out: Path) -> None:
    """Write the replies to given messages, of at most HELD_OUT_TOKENS tokens."""
    writer = Writer(bundle, most=HELD_OUT_TOKENS)
    with ThreadPoolExecutor(TOGETHER) as pool:
        out.write_text(lines_of(reply for reply in pool.map(writer.write, messages) if reply is not None))


def write_share(bundle: Path, file: Path, rank: int, count: int, tokens: int) -> None:
    """Append the replies `rank`, `rank + count`, ... to a file until it has `tokens` tokens of them."""
    known = list(read_replies(file))
    numbers = {each.number for each in known}
    total = sum(len(each.reply) for each in known)
    if total >= tokens:
        return
    writer = Writer(bundle)
    prompt(0)  # read the library before threads ask for it at once
    missing = (number for number in itertools.count(rank, count) if number not in numbers)
    parent, lock = multiprocessing.parent_process(), threading.Lock()
    started, fresh = time.process_time(), 0

    def work() -> None:
        nonlocal total, fresh
        while True:
            with lock:
                if total >= tokens or (parent is not None and not parent.is_alive()):
                    return
                number = next(missing)
            if (written := writer.write(asked(number))) is not None:
                with lock:
                    output.write(lines_of([written]))
                    output.flush()
                    total, fresh = total + len(written.reply), fresh + len(written.reply)

    with file.open("a") as output, ThreadPoolExecutor(TOGETHER) as pool:
        workers = [pool.submit(work) for _ in range(TOGETHER)]
        while not all(worker.done() for worker in workers):
            time.sleep(LOG_SECONDS)
            speed = fresh / (time.process_time() - started)
            print(f"{time.strftime('%H:%M:%S')} {file.name}: {total:,} tokens, {speed:.0f} per CPU second", flush=True)
    for worker in workers:
        worker.result()


def read_replies(file: Path) -> Iterator[Written]:
    """The complete lines of a file, which is cut after the last of them."""
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)
    for line in data.decode("utf-8", "replace").split("\n")[:-1]:
        yield Written(**json.loads(line))
