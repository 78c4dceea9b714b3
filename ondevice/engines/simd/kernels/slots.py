"""What changes from forward to forward, as int64 arrays that kernels read while the plan stays as it is.

A forward has one array of slots. Each of its sequences has a record: its rows, its tree, and where its caches lie. The
rows of a sequence lie side by side in both row sets, in the order of the records. Where something is told for each kind
of attention, full attention comes first, then sliding attention.
"""

from __future__ import annotations

ALL, WANTED = 0, 1
"""Row counts of the forward, and at the same time the two row sets a step can run on: all new rows, or the wanted."""

# a forward's slots
WANTED_ROWS = 2
"""Address of int64[R]: which of all rows are wanted."""
TOKENS = 3
"""Address of int64[T]."""
STOP = 4
"""Address of int64[T]: the position behind the last one that a row sees."""
WINDOW = 5
"""Two slots, one for each kind: how many positions a row sees, if there are so many."""
COSINES, SINES = 7, 9
"""Addresses of float32[T, head_dim / 2], two slots each, one for each kind."""
ROTARY_STRIDE = 11
"""Bytes from a row of cosines, or of sines, to the next."""
SEQUENCES, SEQUENCE_COUNT = 12, 13
"""Address of int64[S], the addresses of the sequences' records, and S."""
CACHE_BITS = 14
"""Of a number in the caches: 16 or 8."""
SCRATCH, SCRATCH_STRIDE = 15, 16
"""Address of attention's working memory, and bytes of it for each thread: `attention_rows.scratch_at`."""
PARTIALS, MOST_PARTS, COUNTERS = 17, 18, 19
"""Address of the states of parts that threads share, 0 where they do not: [rows, query heads, MOST_PARTS] states; and
of int64[rows, query heads], zeros."""
LOGITS, HIDDEN = 20, 21
"""Addresses of float32[R, stride]; in a draft step, float32[C] and the drafter's own hidden state."""
CANDIDATES, NEXT_HIDDEN = 22, 23
"""Addresses of int64[C] and float32[H]: what a draft step answers."""
LOOK_UP, LOOK_UP_STRIDE = 24, 25
"""Address of the working memory of lookups, and bytes of it for each thread: `looking_up.Workspace`."""
SHARES, SHARES_STRIDE = 26, 27
"""Address of what codes say of blocks, and bytes of it for each row and KV head that are looked up at the same time."""
EXPERTS_READ = 28
"""A number: experts whose weights the forward has read so far, of all layers together."""
SLOTS = 29

# a sequence's record
FIRST_ROW = 0
"""From here on, the sequence's first row in each of the two row sets."""
ROW_COUNT = 2
"""From here on, how many rows it has in each of them."""
LENGTH = 4
"""Committed tokens."""
PATHS, PATH_WIDTH = 5, 6
"""Address of int64[rows, PATH_WIDTH]: the row at each depth below the cache on the way to a row, counted from the
sequence's first row; 0 for a chain."""
BASE = 7
"""From here on, the position of the first row of its caches, for each kind."""
CACHES = 9
"""From here on, addresses of each layer's keys and values; behind them all, of each layer's codes of keys and their
codebook, where there are any."""
