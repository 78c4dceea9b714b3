"""An online suffix automaton over token ids: where did the text's longest suffix occur before, and what came next?

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), in its form for several texts. A
state stands for the substrings that end at the same places; its link is the longest suffix that also ends elsewhere.
So the link of the newest state *is* the longest earlier match, known without a search, and appending a token costs
amortised O(1). n tokens make at most 2n states and 3n edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.jit import kernel

Table = NDArray[np.int32]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

NONE = -1
ROOT = 0

# Columns of `states`: length of the longest substring, suffix link, first outgoing edge, occurrences.
LENGTH, LINK, EDGE, COUNT = range(4)
# Columns of `edges`: the state it leaves, its token, the state it enters, the next edge that leaves the same state.
SOURCE, TOKEN, TARGET, NEXT = range(4)
# Entries of `cursor`: states in use, edges in use, the state of the whole text so far.
STATES, EDGES, LAST = range(3)

MIX = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number: spreads consecutive keys over the hash slots."""

MOST_ID = 2**31 - 1

MAX_LINKS = 64
"""Links along which a new occurrence is counted. Prose has about ten; a token repeated n times has n."""


NOVELTY = 3.0
"""How often something new follows a one-token context, per different token that already did.

The escape count of PPM's method C, divided by the length of the match. With it raw confidences come within 0.04 of the
share of guesses that are right, at any confidence: `benchmarks/ngram.py` prints the table."""


class Tables(NamedTuple):
    """states : int32[S, 4]; edges : int32[E, 4]; slots : int32[power of two], the edges hashed by state and token;
    cursor : int64[3]
    """

    states: Table
    edges: Table
    slots: Table
    cursor: Ids


class SuffixAutomaton:
    """Every substring of the texts appended so far, with what followed it and how often.

    About 130 bytes per token, in arrays that double.
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
            ValueError: a token id that is negative or does not fit in 31 bits.
        """
        if not len(tokens):
            return
        if min(tokens) < 0 or max(tokens) > MOST_ID:  # mostly a few tokens of a round: numpy's would take longer
            raise ValueError("token ids must lie between 0 and 2**31 - 1")
        ids = np.asarray(tokens, np.int64)
        self._tokens += len(ids)
        self._reserve(states=2 * self._tokens + 1, edges=3 * self._tokens + 1)
        append_all(self._tables, ids)

    def end_text(self) -> None:
        """Start a new text: no substring spans the boundary."""
        self._tables.cursor[LAST] = ROOT

    def match_length(self) -> int:
        """Tokens of the longest suffix of the current text that was followed by something before."""
        return longest_match(self._tables)[1]

    def continuation(self, most: int) -> tuple[Ids, Floats]:
        """The likeliest continuation of the current text, token by token.

        Returns:
            int64[n] tokens and float64[n] raw confidences in [0, 1], n <= most; empty where nothing matches.
        """
        tokens = np.empty(most, np.int64)
        scores = np.empty(most, np.float64)
        count = follow(self._tables, tokens, scores)
        return tokens[:count], scores[:count]

    def _reserve(self, states: int, edges: int) -> None:
        tables = self._tables
        if states > len(tables.states):
            tables = tables._replace(states=_grown(tables.states, states))
        if edges > len(tables.edges):
            tables = tables._replace(edges=_grown(tables.edges, edges))
        # Half full at most, so that a look-up ends after a step or two.
        if 2 * edges > len(tables.slots):
            tables = tables._replace(slots=np.full(1 << (2 * edges).bit_length(), NONE, np.int32))
            index_edges(tables)
        self._tables = tables


def empty_tables() -> Tables:
    """Those of an automaton that knows no text."""
    tables = Tables(
        np.zeros((64, 4), np.int32),
        np.zeros((96, 4), np.int32),
        np.full(256, NONE, np.int32),
        np.array([1, 0, ROOT], np.int64),
    )
    tables.states[ROOT] = (0, NONE, NONE, 0)
    return tables


def warm_up() -> None:
    """Call every kernel once, so that none is compiled, or loaded, while tokens wait for it."""
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 1, 2, 1] * 20)  # more than the first tables hold
    automaton.end_text()
    automaton.extend([1, 2])
    automaton.match_length()
    automaton.continuation(1)


def _grown(table: Table, rows: int) -> Table:
    grown = np.zeros((max(rows, 2 * len(table)), table.shape[1]), np.int32)
    grown[: len(table)] = table
    return grown


_int64: Any = np.int64
"""Table entries pass through this on their way into functions: each other type would have them compiled once more."""


@kernel
def slot_of(tables: Tables, state: int, token: int) -> int:
    """The slot that holds the edge of this state and token, or the free one where it belongs. Open addressing."""
    edges, slots = tables.edges, tables.slots
    mask = len(slots) - 1
    mixed = (int(state) * 2**31 + int(token)) * MIX
    slot = int((mixed ^ (mixed >> 32)) & mask)
    while slots[slot] != NONE:
        edge = slots[slot]
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return slot


@kernel
def index_edges(tables: Tables) -> None:
    """Enter all edges into empty slots."""
    for edge in range(tables.cursor[EDGES]):
        tables.slots[slot_of(tables, _int64(tables.edges[edge, SOURCE]), _int64(tables.edges[edge, TOKEN]))] = edge


@kernel
def add_edge(tables: Tables, source: int, token: int, target: int) -> None:
    """Put a new edge first in its state's list, so that of equally frequent tokens the newest is found first."""
    edge = tables.cursor[EDGES]
    tables.cursor[EDGES] += 1
    tables.edges[edge, SOURCE] = source
    tables.edges[edge, TOKEN] = token
    tables.edges[edge, TARGET] = target
    tables.edges[edge, NEXT] = tables.states[source, EDGE]
    tables.states[source, EDGE] = edge
    tables.slots[slot_of(tables, source, token)] = edge


@kernel
def add_state(tables: Tables, length: int) -> int:
    state = tables.cursor[STATES]
    tables.cursor[STATES] += 1
    tables.states[state, LENGTH] = length
    tables.states[state, LINK] = ROOT
    tables.states[state, EDGE] = NONE
    tables.states[state, COUNT] = 0
    return int(state)


@kernel
def split(tables: Tables, source: int, token: int) -> int:
    """The state whose longest substring is that of `source` and then `token`, which `source` has an edge for.

    Cloned off the state that the edge enters where that one also holds longer substrings: they end at fewer places now.
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
def append(tables: Tables, token: int) -> None:
    """Append a token to the current text; the tables have room."""
    states, slots, cursor = tables.states, tables.slots, tables.cursor
    last = int(cursor[LAST])
    if slots[slot_of(tables, last, token)] != NONE:
        # Only where an earlier text began like this one.
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


@kernel
def append_all(tables: Tables, tokens: Ids) -> None:
    for token in tokens:
        append(tables, token)


@kernel
def longest_match(tables: Tables) -> tuple[int, int]:
    """State and length of the longest suffix that was followed by something before; the root and 0 without one."""
    states = tables.states
    state = int(tables.cursor[LAST])
    while state != ROOT and states[state, EDGE] == NONE:
        state = int(states[state, LINK])
    return state, int(states[state, LENGTH])


@kernel
def likeliest(tables: Tables, state: int) -> tuple[int, int, int]:
    """The most frequent edge out of a state that has one; how often anything followed it, and how many things did."""
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


@kernel
def follow(tables: Tables, tokens: Ids, scores: Floats) -> int:
    """Fill `tokens` and `scores` with the continuation; how many there are."""
    states, edges = tables.states, tables.edges
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
