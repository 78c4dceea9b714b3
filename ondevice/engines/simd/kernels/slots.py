"""What changes from forward to forward: an int64 array that kernels read while the plan stays as it is."""

from __future__ import annotations

ALL, WANTED = 0, 1
"""Slots with row counts, and at the same time the two sets of rows a step can run on: all new rows, or the wanted."""

WANTED_ROWS = 2
"""Address of int64[R]: which rows are wanted."""
TOKENS = 3
"""Address of int64[T]."""
LENGTH = 4
"""Committed cache positions."""
PATHS = 5
"""Address of int64[T, PATH_WIDTH]: the row at each depth below the cache on the way to a row; 0 for a chain."""
PATH_WIDTH = 6
LINE_MEMORY, LINE_STRIDE = 7, 8
"""Address of attention's working memory, and bytes from a line of it to the next."""
LOGITS, HIDDEN = 9, 10
"""Addresses of float32[R, stride]."""
CANDIDATES = 11
"""Address of int64[C]: what a drafter step answers."""
KINDS = 12
"""From here on, KIND_SLOTS for full attention, then as many for sliding attention."""
KIND_SLOTS = 5
FIRST, STOP = 0, 1
"""Addresses of int64[T]: the positions start..stop-1 that a row sees."""
COSINES, SINES = 2, 3
"""Addresses of float32[T, head_dim / 2]."""
BASE = 4
"""The position of the cache's first row."""
CACHE_BITS = KINDS + 2 * KIND_SLOTS
"""Of a number in the caches: 16 or 8."""
CACHES = CACHE_BITS + 1
"""From here on, addresses of each layer's keys and values."""
