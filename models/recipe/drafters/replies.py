"""A target's replies with its states, which its drafter learns from, written by this project's engine.

The target answers messages in its chat template, in every process TOGETHER of them at a time. When a reply ends, the
engine has computed all that a lesson needs beside the tokens. A second pass by PyTorch over the finished replies would
take nearly as long as writing them (680 and 650 tokens/s, SmolLM2-135M, two cores of an AMD EPYC with AVX2).

A reply ends where it repeats itself. Greedy replies of a base model mostly do, so the drafter would learn little else;
and text that repeats itself is drafted by n-grams at no cost.

After a kill, a second call goes on after the last files. `replies_on_device` writes the same lessons with an
accelerator.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from text.prompts import PASSAGE, Prompt, prompt

import ondevice
from drafters.lessons import HELD_OUT_EVERY, Lesson, Shards
from ondevice.engines.protocol import Outputs, Rows, Session, TokenTree
from ondevice.engines.simd.caches import read_keys, read_values
from ondevice.engines.simd.engine import SimdSession
from ondevice.generate.request import SamplingOptions
from ondevice.generate.sampling.sampler import Sampler

TEMPERATURES = (1.0, 0.7, 1.0, 0.0)  # one of these by chance
OWN_SHARE = 0.5  # of the messages are written by the target itself
OWN = Prompt("own", PASSAGE)
MOST = 320  # tokens of a reply
HELD_OUT_TOKENS = 128  # of a reply to a given message
MOST_ASKED = 200  # tokens of a passage or a message by the target
REPEATED = 16  # tokens that end a reply which has had them before
LONGEST = 1024  # tokens of a lesson; the end of a longer conversation is left out
TOGETHER = 16  # conversations that share the forwards of a process
PIECE = 32  # most tokens of a prompt in a forward, beside the others' tokens
LOG_SECONDS = 60
HELD_OUT_FROM = 1_000_000  # numbers of held-out lessons from here on belong to given messages
ANSWERED = "messages.sha256"  # file of a directory with the lessons of given messages: `digest_of` these
MARK = "QUESTION"  # stands for a user's message in a rendered template


@dataclass(frozen=True)
class Asked:
    """A user's message, and the temperature of the reply to it."""

    number: int
    temperature: float
    prompt: Prompt


def asked(number: int) -> Asked:
    """Message `number` of the training."""
    random = Random(number)
    temperature = random.choice(TEMPERATURES)
    return Asked(number, temperature, OWN if random.random() < OWN_SHARE else prompt(number))


def held_out(files: Sequence[Path]) -> list[Asked]:
    """Messages to measure on, each at temperature 0 and 1: JSON lines with `prompt` or `turns`.

    Their kind is the file's name, or the line's `category`. They are numbered as held-out ones.

    Raises:
        SystemExit: a line is no such JSON.
    """
    known = []
    for file in files:
        for number, line in enumerate(file.read_text("utf-8", errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                text = fields.get("prompt") or fields["turns"][0]
                known.append(Prompt(str(fields.get("category", file.stem)), "" + text))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise SystemExit(f"{file}, line {number}: this is not JSON with a `prompt` or with `turns`") from error
    numbered = enumerate((temperature, each) for each in known for temperature in (0.0, 1.0))
    return [Asked(HELD_OUT_EVERY * (HELD_OUT_FROM + place), *parts) for place, parts in numbered]


class ChatIds:
    """The token ids of messages in a target's chat template, or without one those of the text itself.

    has_template : whether there is a chat template
    opening : ids before the text of a user's message in the template; without a template those that begin any text
    ends : ids that end a text
    """

    def __init__(
        self, encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str], ends: Iterable[int]
    ) -> None:
        self.encode, self.decode, self.ends = encode, decode, frozenset(ends)
        self.has_template, self.opening = opening_of(encode, decode)

    def message(self, text: str) -> list[int]:
        """The ids that a reply to this message follows."""
        return self.encode([{"role": "user", "content": text}] if self.has_template else text)

    def first(self, message: Asked) -> list[int] | None:
        """The ids that the target continues to write the missing part of a message. For a message of its own these are
        `opening`; for a passage in a message, the request for one. None if the message is complete.
        """
        if PASSAGE not in message.prompt.text:
            return None
        return self.opening if message.prompt is OWN else self.message(message.prompt.source)

    def completed(self, message: Asked, answer: Sequence[int]) -> Asked | None:
        """The message with the part that the target wrote after `first`. None if that part is empty, or if it is a
        whole message that the target did not end.
        """
        ended = bool(answer) and answer[-1] in self.ends
        text = self.decode(list(answer[:-1] if ended else answer)).strip()
        if not text or (message.prompt is OWN and self.has_template and not ended):
            return None
        return replace(message, prompt=Prompt(message.prompt.kind, message.prompt.completed(text)))


def opening_of(encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str]) -> tuple[bool, list[int]]:
    """Whether there is a chat template; and the ids of a rendered conversation up to the user's message, without a
    template those of a text up to its first token.
    """
    try:
        has_template, rendered = True, encode([{"role": "user", "content": MARK}])
    except ondevice.OndeviceError:
        has_template, rendered = False, encode(MARK)
    before = decode(rendered).index(MARK)
    beginnings = (rendered[:n] for n in range(len(rendered), 0, -1))
    return has_template, next((each for each in beginnings if len(decode(each)) <= before), [])


def repeats(reply: Sequence[int], seen: set[tuple[int, ...]]) -> bool:
    """Whether the last REPEATED tokens of a reply stand in it before.

    seen : those of all its shorter lengths, to which these are added
    """
    last = tuple(reply[-REPEATED:])
    found = last in seen
    seen.add(last)
    return found


@dataclass(eq=False)
class Conversation:
    """A reply that is being written: its ids, and the states float16[H] from which each was chosen.

    seen : see `repeats`; repeating : whether it repeats itself
    """

    message: Asked
    prompt: list[int]
    most: int
    session: Session
    sampler: Sampler
    reply: list[int] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    repeating: bool = False

    def rows(self) -> Rows:
        """The next rows: a piece of the prompt, or the newest token."""
        known = self.session.length
        tokens = self.reply[-1:] if self.reply else self.prompt[known : known + PIECE]
        return Rows(self.session, TokenTree.chain(tokens), [len(tokens) - 1])

    def follow(self, outputs: Outputs) -> None:
        """Commit these rows, and choose the next token after the last of the prompt."""
        self.session.commit(range(self.session.pending))
        if self.session.length >= len(self.prompt):
            self.reply.append(self.sampler.choose(outputs.logits[0], self.session.tokens))
            self.states.append(outputs.hidden[0].astype(np.float16))
            self.repeating = repeats(self.reply, self.seen)


class EngineWriter:
    """A process's target."""

    def __init__(self, bundle: Path, most: int) -> None:
        """most : tokens of a reply"""
        self.model = ondevice.load(bundle, engine="simd", threads=1)
        self.most = most
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        self.chat = ChatIds(self.model.encode, tokenizer.decode, self.model.manifest.eos_token_ids)

    def lessons(self, messages: Iterator[Asked]) -> Iterator[Lesson]:
        """The lessons of messages, in the order in which their replies end. A message whose missing part the target
        left empty has none.
        """
        running: list[Conversation] = []
        while True:
            while len(running) < TOGETHER and (message := next(messages, None)) is not None:
                running += self.begun(message)
            if not running:
                return
            found = self.model.engine.forward([each.rows() for each in running])
            for each, outputs in zip(running, found, strict=True):
                each.follow(outputs)
            ended = [each for each in running if each.reply and self.ends(each)]
            running = [each for each in running if each not in ended]
            for each in ended:
                if PASSAGE in each.message.prompt.text:
                    completed = self.chat.completed(each.message, each.reply)
                    running += [] if completed is None else self.begun(completed)
                else:
                    yield self.lesson(each)
                each.session.close()

    def begun(self, message: Asked) -> list[Conversation]:
        """A conversation with a message, or before it with what the target continues first; none without a prompt."""
        first = self.chat.first(message)
        ids, most, temperature = self.chat.message(message.prompt.text), self.most, message.temperature
        if first is not None:
            ids, most, temperature = first, MOST_ASKED, 1.0
        if not ids:
            return []
        sampler = Sampler(SamplingOptions(temperature=temperature, seed=message.number))
        return [Conversation(message, ids, most, self.model.engine.open_session(), sampler)]

    def ends(self, each: Conversation) -> bool:
        """Whether a reply has ended."""
        ended = each.reply[-1] in self.chat.ends or each.repeating
        return ended or len(each.reply) == each.most or not each.session.max_rows()

    def lesson(self, each: Conversation) -> Lesson:
        """The lesson of a finished reply, whose last token the engine has not read."""
        tokens = torch.tensor([*each.prompt, *each.reply], dtype=torch.int32)
        hidden = np.zeros((len(tokens), len(each.states[0])), np.float16)
        hidden[len(each.prompt) - 1 : -1] = each.states
        assert isinstance(each.session, SimdSession)
        full, length = each.session._caches["full"], each.session.length
        keys, values = full.parts(max(full.layers))
        known = np.stack([read_keys(keys, 0, length), read_values(values, length)]).reshape(2, length, -1)
        cache = np.pad(known.astype(np.float16), ((0, 0), (0, len(tokens) - length), (0, 0)))
        parts = tokens[:LONGEST], torch.from_numpy(hidden[:LONGEST]), torch.from_numpy(cache[:, :LONGEST])
        message = each.message
        return Lesson(message.number, message.prompt.kind, message.temperature, len(each.prompt), *parts)


def write_replies(bundle: Path, directory: Path, tokens: int, first: int) -> None:
    """Write lessons to files in `directory` until those in it have replies of `tokens` tokens, with a process for every
    core. They may be of another number of processes, or of `write_replies_on_device`.

    first : number of the first message
    """
    known, count = Shards(directory).tokens, os.cpu_count() or 1
    if known >= tokens:
        return
    most = known - (known - tokens) // count
    spawn = multiprocessing.get_context("spawn")
    numbers = [range(first + rank, sys.maxsize, count) for rank in range(count)]
    shares = [(bundle, directory, rank, numbers[rank], most) for rank in range(count)]
    processes = [spawn.Process(target=write_share, args=share) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process that writes replies has failed: its message is above")


def write_share(bundle: Path, directory: Path, rank: int, messages: Iterable[int], tokens: int) -> None:
    """Write the lessons of messages with these numbers, but for those that the directory has, until these and the
    directory's own have `tokens` tokens of replies.
    """
    shards = Shards(directory, rank)
    begun, started, shown = shards.tokens, time.process_time(), time.monotonic()
    if begun >= tokens:
        return
    parent = multiprocessing.parent_process()
    missing = (asked(number) for number in messages if number not in shards.numbers)
    for lesson in EngineWriter(bundle, MOST).lessons(missing):
        shards.add(lesson)
        if time.monotonic() > shown + LOG_SECONDS:
            shown, speed = time.monotonic(), (shards.tokens - begun) / (time.process_time() - started)
            line = f"{time.strftime('%H:%M:%S')} process {rank}: {shards.tokens - begun:,} tokens of replies, "
            print(f"{line}{speed:.0f} per CPU second", flush=True)
        if shards.tokens >= tokens or (parent is not None and not parent.is_alive()):
            break
    shards.finish()


def are_answered(directory: Path, messages: Sequence[Asked]) -> bool:
    """Whether the lessons that `write_held_out` wrote to a directory are those of the same messages."""
    file = directory / ANSWERED
    return not file.exists() or file.read_text() == digest_of(messages)


def digest_of(messages: Sequence[Asked]) -> str:
    """The sha256 of messages."""
    return hashlib.sha256(repr(list(messages)).encode()).hexdigest()


def write_held_out(lessons: Iterable[Lesson], messages: Sequence[Asked], directory: Path) -> None:
    """Write the lessons of given messages to a directory, which appears when it is complete."""
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = Shards(partial)
    for lesson in lessons:
        shards.add(lesson)
    shards.finish()
    (partial / ANSWERED).write_text(digest_of(messages))
    partial.rename(directory)
