"""The n-gram drafter: drafts what followed the longest earlier match of the text's end.

`NgramDrafter` finds the match with a `SuffixAutomaton` over prompt and replies. The kernels of the automaton are below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, groupby, takewhile
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Float64Array, Int64Array
from ondevice.engines.protocol import Outputs, Session
from ondevice.generate.drafters.acceptance import Calibration
from ondevice.generate.drafters.protocol import Draft, DraftRequest, Forecast
from ondevice.native.functions import entry, kernel

SOURCE = "ngram"

MIN_SURVIVAL = 0.1
"""A draft ends before a token whose survival is lower; SuffixDecoding's minimum (arXiv 2411.04975)."""

MIN_GUESSED = 4
"""Tokens guessed at least in every round, so that the calibration also learns where another drafter drafts."""

END_OF_TEXT = -1
"""Separates texts among token ids."""


class Continuation(NamedTuple):
    """A guessed continuation of the text.

    tokens : int64[n]
    raw : float64[n], raw confidences in [0, 1], from counts
    requested : number of tokens asked for, at least n
    """

    tokens: Int64Array
    raw: Float64Array
    requested: int


class NgramDrafter:
    """Finds the longest suffix of the text that occurred before, in the prompt, the reply or the replies of earlier
    turns, and drafts its likeliest continuation.

    A guess costs microseconds, so one is made for every forecast. From each guess, drafted or not, the calibration
    learns how far to trust the next.

    It drafts chains, no trees: on the reference pair the second-best continuation is right in 0.057 of the rounds with
    a match at temperature 1, and in 0.010 at 0, which does not pay for a row (benchmarks/results/drafts.md).

    keep_turns : number of earlier turns whose generated tokens are kept
    """

    name = SOURCE

    def __init__(self, keep_turns: int = 16) -> None:
        self._turns: deque[list[int]] = deque(maxlen=keep_turns)
        self._prompt: list[int] = []
        self._generated: list[int] = []
        self._unread: list[int] = []
        """Tokens that the automaton does not have yet; a negative one ends a text."""
        self._automaton = SuffixAutomaton()
        self._calibration = Calibration()
        self._guess: Continuation | None = None
        self._calibrated: tuple[int, list[float]] | None = None
        """Calibrated confidences of the guess, and the number of tokens that they were computed for."""

    def begin(self, prompt_ids: Sequence[int], session: Session) -> None:
        """Start a generation. If its prompt continues the last one, as in a chat, only the new tokens are appended.

        They are read at the first forecast, so that a generation that never asks for one does not pay for it: a
        millisecond for 1,600 tokens.
        """
        self._guess = self._calibrated = None
        before = self._prompt + self._generated
        if self._generated:
            self._turns.append(self._generated)
        self._prompt, self._generated = list(prompt_ids), []
        if before and self._prompt[: len(before)] == before:
            self._unread += self._prompt[len(before) :]
            return
        self._automaton = SuffixAutomaton()
        self._unread = [token for turn in self._turns for token in (*turn, END_OF_TEXT)] + self._prompt

    def _read(self) -> None:
        """Append the unread tokens. A text also ends at soft tokens, which are negative: no guess goes across them."""
        self._automaton.reserve(len(self._unread))
        for ends, run in groupby(self._unread, key=lambda token: token < 0):
            if ends:
                self._automaton.end_text()
            else:
                self._automaton.extend(list(run))
        self._unread.clear()

    def forget(self) -> None:
        self._turns.clear()
        self._prompt, self._generated = [], []
        self._unread.clear()
        self._automaton = SuffixAutomaton()
        self._guess = self._calibrated = None

    def forecast(self, nodes: int) -> Forecast:
        return Forecast(np.array(list(accumulate(self._confidence(nodes), mul)), np.float32), SOURCE)

    def draft(self, request: DraftRequest) -> Draft:
        confidence = self._confidence(request.nodes)
        survivals = accumulate(confidence, mul)
        count = len(list(takewhile(lambda node: request.pays_row(*node), enumerate(survivals))))
        return Draft.chain(self._guessed(request.nodes).tokens[:count].tolist(), confidence[:count], SOURCE)

    def observe(self, emitted: Sequence[int], outputs: Outputs, path: Sequence[int]) -> None:
        if self._guess is not None:
            guess = self._guess
            for token, raw, taken in zip(guess.tokens.tolist(), guess.raw.tolist(), emitted, strict=False):
                self._calibration.observe(raw, token == taken)
                if token != taken:
                    break
            self._guess = self._calibrated = None
        self._generated.extend(emitted)
        self._unread.extend(emitted)

    def _guessed(self, k: int) -> Continuation:
        """The guess for at least the next `k` tokens; shorter where no more is known."""
        if self._unread:
            self._read()
        if self._guess is None or self._guess.requested < k:
            self._guess = Continuation(*self._automaton.continuation(max(k, MIN_GUESSED)), max(k, MIN_GUESSED))
        return self._guess

    def _confidence(self, k: int) -> list[float]:
        """Calibrated confidences of up to `k` guessed tokens, ending where a draft should end."""
        guess = self._guessed(k)
        if self._calibrated is None or self._calibrated[0] < k:  # shared by a forecast and its draft
            self._calibrated = k, self._calibrate(guess.raw[:k].tolist())
        return self._calibrated[1][:k]

    def _calibrate(self, raws: Sequence[float]) -> list[float]:
        confidence: list[float] = []
        survival = 1.0
        for raw in raws:
            chance = self._calibration.probability(raw)
            survival *= chance
            if survival < MIN_SURVIVAL:
                break
            confidence.append(chance)
        return confidence


# The suffix automaton.


Int32Array = NDArray[np.int32]

NONE = -1
ROOT = 0

# Columns of `states`: length of the longest substring, suffix link, first outgoing edge, occurrences.
LENGTH, LINK, EDGE, COUNT = range(4)
# Columns of `edges`: the state it leaves, its token, the state it enters, the next edge that leaves the same state.
STATE, TOKEN, TARGET, NEXT = range(4)
# Entries of `cursor`: states in use, edges in use, the state of the whole text so far.
STATES, EDGES, LAST = range(3)

MIX = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number: spreads consecutive keys over the hash slots."""

MAX_ID = 2**31 - 1

MAX_LINKS = 64
"""Links along which a new occurrence is counted. Prose has about ten; a token repeated n times has n."""

NOVELTY = 3.0
"""Pseudo-count of a new token after a one-token context, per distinct token that followed it before.

It is the escape count of PPM's method C, divided by the length of the match. With it raw confidences come within 0.04
of the share of guesses that are right, at any confidence: `benchmarks/drafts/ngram.py` prints the table."""


class AutomatonArrays(NamedTuple):
    """The automaton's arrays; the columns are named above.

    states : int32[S, 4]
    edges : int32[E, 4]
    slots : int32[power of two], hash table from (state, token) to an edge; open addressing, NONE where free
    cursor : int64[3]
    """

    states: Int32Array
    edges: Int32Array
    slots: Int32Array
    cursor: Int64Array


class SuffixAutomaton:
    """An online suffix automaton over token ids: every substring of the texts appended so far, the tokens that followed
    it, and how often.

    Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), in its form for several texts. A
    state stands for all substrings that end at the same positions; its link leads to the state of the longest suffix of
    these that also ends elsewhere. So the link of the newest state is the longest earlier match, without a search.

    Appending a token costs amortised O(1). n tokens make at most 2n states and 3n edges, about 130 bytes per token, in
    arrays whose size doubles.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._tables = empty_tables()

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current text.

        Raises:
            ValueError: a token id is negative or does not fit in 31 bits.
        """
        if not len(tokens):
            return
        if min(tokens) < 0 or max(tokens) > MAX_ID:  # mostly the few tokens of a round: numpy would take longer
            raise ValueError("token ids must lie between 0 and 2**31 - 1")
        ids = np.asarray(tokens, np.int64)
        self.reserve(len(ids))
        self._tokens += len(ids)
        append_all(*self._tables, ids)

    def reserve(self, tokens: int) -> None:
        """Make room for as many more tokens. Texts appended one by one grow the tables as one does."""
        states, edges = 2 * (self._tokens + tokens) + 1, 3 * (self._tokens + tokens) + 1
        tables = self._tables
        if states > len(tables.states):
            tables = tables._replace(states=_grown(tables.states, states))
        if edges > len(tables.edges):
            tables = tables._replace(edges=_grown(tables.edges, edges))
        # At most half full, so that a look-up ends after a step or two.
        if 2 * edges > len(tables.slots):
            tables = tables._replace(slots=np.full(1 << (2 * edges).bit_length(), NONE, np.int32))
            index_edges(*tables)
        self._tables = tables

    def end_text(self) -> None:
        """End the current text and start a new one: no substring spans the two."""
        self._tables.cursor[LAST] = ROOT

    def continuation(self, most: int) -> tuple[Int64Array, Float64Array]:
        """The likeliest continuation of the current text, chosen token by token.

        Returns:
            int64[n] tokens and float64[n] raw confidences in [0, 1], n <= most; empty where nothing matches.
        """
        tokens = np.empty(most, np.int64)
        scores = np.empty(most, np.float64)
        count = follow(*self._tables, tokens, scores)
        return tokens[:count], scores[:count]


def empty_tables() -> AutomatonArrays:
    """The tables of an automaton without text."""
    tables = AutomatonArrays(
        np.zeros((64, 4), np.int32),
        np.zeros((96, 4), np.int32),
        np.full(256, NONE, np.int32),
        np.array([1, 0, ROOT], np.int64),
    )
    tables.states[ROOT] = (0, NONE, NONE, 0)
    return tables


def _grown(table: Int32Array, rows: int) -> Int32Array:
    grown = np.zeros((max(rows, 2 * len(table)), table.shape[1]), np.int32)
    grown[: len(table)] = table
    return grown


_int64: Any = np.int64
"""Table entries are converted to int64 before they are passed to a function, which would otherwise be compiled once
more for int32."""


@kernel
def slot_of(tables: AutomatonArrays, state: int, token: int) -> int:
    """The slot that holds the edge of this state and token, or the free slot where it belongs."""
    edges, slots = tables.edges, tables.slots
    mask = len(slots) - 1
    mixed = (int(state) * 2**31 + int(token)) * MIX
    slot = int((mixed ^ (mixed >> 32)) & mask)
    while slots[slot] != NONE:
        edge = slots[slot]
        if edges[edge, STATE] == state and edges[edge, TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return slot


@entry("tokens", "i32[,] i32[,] i32[] i64[]")
def index_edges(states: Int32Array, edges: Int32Array, slots: Int32Array, cursor: Int64Array) -> None:
    """Enter all edges into empty `slots`."""
    tables = AutomatonArrays(states, edges, slots, cursor)
    for edge in range(tables.cursor[EDGES]):
        tables.slots[slot_of(tables, _int64(tables.edges[edge, STATE]), _int64(tables.edges[edge, TOKEN]))] = edge


@kernel
def add_edge(tables: AutomatonArrays, source: int, token: int, target: int) -> None:
    """Add an edge, first in its state's list, so that of equally frequent tokens the newest is found first."""
    edge = tables.cursor[EDGES]
    tables.cursor[EDGES] += 1
    tables.edges[edge, STATE] = source
    tables.edges[edge, TOKEN] = token
    tables.edges[edge, TARGET] = target
    tables.edges[edge, NEXT] = tables.states[source, EDGE]
    tables.states[source, EDGE] = edge
    tables.slots[slot_of(tables, source, token)] = edge


@kernel
def add_state(tables: AutomatonArrays, length: int) -> int:
    """Add a state without edges whose longest substring has `length` tokens; returns its index."""
    state = tables.cursor[STATES]
    tables.cursor[STATES] += 1
    tables.states[state, LENGTH] = length
    tables.states[state, LINK] = ROOT
    tables.states[state, EDGE] = NONE
    tables.states[state, COUNT] = 0
    return int(state)


@kernel
def split(tables: AutomatonArrays, source: int, token: int) -> int:
    """The state whose longest substring is that of `source` followed by `token`, for which `source` has an edge.

    If the state that the edge enters also holds longer substrings, the wanted one is cloned off it: the longer ones now
    end at fewer positions.
    """
    states, edges, slots = tables.states, tables.edges, tables.slots
    target = int(edges[slots[slot_of(tables, source, token)], TARGET])
    if states[target, LENGTH] == states[source, LENGTH] + 1:
        return target
    clone = add_state(tables, states[source, LENGTH] + 1)
    states[clone, LINK] = states[target, LINK]
    states[clone, COUNT] = states[target, COUNT]
    states[target, LINK] = clone
    edge = states[target, EDGE]
    while edge != NONE:
        add_edge(tables, clone, _int64(edges[edge, TOKEN]), _int64(edges[edge, TARGET]))
        edge = edges[edge, NEXT]
    state = source
    while state != NONE:
        edge = slots[slot_of(tables, _int64(state), token)]
        if edges[edge, TARGET] != target:
            break
        edges[edge, TARGET] = clone
        state = states[state, LINK]
    return clone


@kernel
def append(tables: AutomatonArrays, token: int) -> None:
    """Append a token to the current text. The tables must have room."""
    states, slots, cursor = tables.states, tables.slots, tables.cursor
    last = int(cursor[LAST])
    if slots[slot_of(tables, last, token)] != NONE:
        # Only where an earlier text began with the same tokens.
        newest = split(tables, last, token)
    else:
        newest = add_state(tables, states[last, LENGTH] + 1)
        state = last
        while state != NONE and slots[slot_of(tables, _int64(state), token)] == NONE:
            add_edge(tables, _int64(state), token, newest)
            state = states[state, LINK]
        if state != NONE:
            states[newest, LINK] = split(tables, _int64(state), token)
    cursor[LAST] = newest
    state = newest
    for _ in range(MAX_LINKS):
        if state == ROOT:
            break
        states[state, COUNT] += 1
        state = states[state, LINK]


@entry("tokens", "i32[,] i32[,] i32[] i64[] i64[]")
def append_all(
    states: Int32Array, edges: Int32Array, slots: Int32Array, cursor: Int64Array, tokens: Int64Array
) -> None:
    """Append tokens to the current text. The tables must have room."""
    tables = AutomatonArrays(states, edges, slots, cursor)
    for token in tokens:
        append(tables, token)


@kernel
def longest_match(tables: AutomatonArrays) -> tuple[int, int]:
    """State and length of the longest suffix that occurred before with a token after it; (ROOT, 0) if none did."""
    states = tables.states
    state = int(tables.cursor[LAST])
    while state != ROOT and states[state, EDGE] == NONE:
        state = int(states[state, LINK])
    return state, int(states[state, LENGTH])


@kernel
def likeliest(tables: AutomatonArrays, state: int) -> tuple[int, int, int]:
    """The most frequent edge out of a state that has edges, the sum of all its edges' counts, and their number."""
    states, edges = tables.states, tables.edges
    best = int(states[state, EDGE])
    total = 0
    distinct = 0
    edge = best
    while edge != NONE:
        count = int(states[edges[edge, TARGET], COUNT])
        total += count
        distinct += 1
        if count > states[edges[best, TARGET], COUNT]:
            best = edge
        edge = int(edges[edge, NEXT])
    return best, total, distinct


@entry("tokens", "i32[,] i32[,] i32[] i64[] i64[] f64[]")
def follow(  # noqa: PLR0917
    states: Int32Array,
    edges: Int32Array,
    slots: Int32Array,
    cursor: Int64Array,
    tokens: Int64Array,
    scores: Float64Array,
) -> int:
    """Fill `tokens` and `scores` with the likeliest continuation and its raw confidences; returns their number."""
    tables = AutomatonArrays(states, edges, slots, cursor)
    state, length = longest_match(tables)
    for index in range(len(tokens)):
        while state != ROOT and states[state, EDGE] == NONE:
            state = int(states[state, LINK])
            length = int(states[state, LENGTH])
        if state == ROOT:
            return index
        edge, total, distinct = likeliest(tables, state)
        state = int(edges[edge, TARGET])
        tokens[index] = edges[edge, TOKEN]
        scores[index] = states[state, COUNT] / (total + NOVELTY * distinct / length)
        length += 1
    return len(tokens)
