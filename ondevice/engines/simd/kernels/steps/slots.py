"""The slots of a forward and the record of a sequence: what changes between forwards while the plan stays the same.

Both are int64 arrays. A forward has one array of slots; each of its sequences has a record with its rows, its tree and
the addresses of its caches. The rows of a sequence are neighbours in both row sets, in the order of the records. Where
a field exists for each kind of attention, full attention comes first, then sliding attention.
"""

from __future__ import annotations

ALL, WANTED = 0, 1
"""The two row sets that a step can run on, all new rows or the wanted ones; and the slots with their numbers of
rows."""

# a forward's slots
WANTED_ROWS = 2
"""Address of int64[R]: indices of the wanted rows among all rows."""
TOKENS = 3
"""Address of int64[T], the rows' tokens."""
STOP = 4
"""Two slots, one for each kind of attention: address of int64[T], one more than the last position that a row sees."""
WINDOW = 6
"""Two slots, one for each kind of attention: most positions that a row sees of those up to its own."""
COSINES, SINES = 8, 9
"""Addresses of float32[T, pairs], the pairs of numbers of all rotary embeddings in their order."""
ROTARY_STRIDE = 10
"""Bytes from a row of cosines, or of sines, to the next."""
SEQUENCES, SEQUENCE_COUNT = 11, 12
"""Address of int64[S], the addresses of the sequences' records; and S."""
CACHE_BITS = 13
"""Bits of a number in the caches: 16 or 8."""
SCRATCH, SCRATCH_STRIDE = 14, 15
"""Address of attention's working memory, and bytes of it for each thread: see `attention.scratch.scratch_at`."""
PARTIALS, MOST_PARTS, COUNTERS = 16, 17, 18
"""If threads share the parts of a row's positions: address of [rows, query heads, MOST_PARTS] softmax states,
MOST_PARTS, and address of int64[rows, query heads], zeros, that count complete parts. If not, PARTIALS is 0."""
LOGITS, HIDDEN = 19, 20
"""Addresses of float32[R, stride]; in a draft step, of float32[C] and of the drafter's own hidden state."""
CANDIDATES = 21
"""Address of int64[C], a result of a draft step."""
LOOK_UP, LOOK_UP_STRIDE = 22, 23
"""Address of the working memory of lookups, and bytes of it for each thread: see `attention.lookup.Workspace`."""
SHARES, SHARES_STRIDE = 24, 25
"""Address of the scores and shares of units of keys, and bytes of it for each row and KV head that are looked up at the
same time: see `attention.sizes.shares_bytes`."""
EXPERTS_READ = 26
"""Number of experts whose weights the forward has read so far, in all layers together."""
SLOTS = 27

# a sequence's record
FIRST_ROW = 0
"""Two fields: the index of the sequence's first row in each row set."""
ROW_COUNT = 2
"""Two fields: the number of its rows in each row set."""
LENGTH = 4
"""Number of committed tokens."""
PATHS, PATH_WIDTH = 5, 6
"""Address of int64[rows, PATH_WIDTH]: [row, depth] is the ancestor of `row` at `depth`, both counted from the
sequence's first row; 0 for a chain."""
BASE = 7
"""Two fields: the first position in its caches, for each kind of attention."""
CACHES = 9
"""From here on, the addresses of each layer's keys and values; after all of these, the addresses of each layer's codes
of keys and their codebook, or 0."""
