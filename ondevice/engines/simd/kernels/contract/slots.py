"""The slots of a forward, and the record of a sequence: what changes between forwards while the plan stays the same.

Both are int64 arrays. A forward has one array of slots; each of its sequences has a record with its rows, its tree
and the addresses of its caches. The rows of a sequence are neighbours in both row sets, in the order of the records.
Where a field exists for each kind of attention, full attention comes first, then sliding attention.
"""

MAX_ROWS = 512
"""Most rows of a forward. The upper layers run on the wanted rows only and are read once per forward, so a prompt takes
3 % less time in one forward of 512 rows than in two of 256."""

ALL, WANTED = 0, 1
"""The two row sets that a step can run on, all new rows or the wanted ones; and the slots with their numbers of
rows."""

# A forward's slots.

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
"""Address of attention's working memory, and bytes of it for each thread: see `scratch_at`."""
PARTIALS, MAX_PARTS, COUNTERS = 16, 17, 18
"""If threads share the parts of a row's positions: address of [rows, query heads, MAX_PARTS] softmax states,
MAX_PARTS, and address of int64[rows, query heads], zeros, that count complete parts. If not, PARTIALS is 0."""
LOGITS, HIDDEN = 19, 20
"""Addresses of float32[R, stride]; in a draft step, of float32[C] and of the drafter's own hidden state."""
CANDIDATES = 21
"""Address of int64[C], a result of a draft step."""
LOOKUP_SCRATCH, LOOKUP_SCRATCH_STRIDE = 22, 23
"""Address of the working memory of lookups, and bytes of it for each thread: see `ThreadWorkspace`."""
SHARES, SHARES_STRIDE = 24, 25
"""Address of the scores and shares of units of keys, and bytes of it for each row and KV head that are looked up at the
same time: see `shares_bytes`."""
EXPERTS_READ = 26
"""Number of experts whose weights the forward has read so far, in all layers together."""

# A call of `run` may run the plan of one sequence several times, each time for the token that was chosen from the last
# one's logits; and before each time a drafter's plan, whose tokens the next rows are. See `continue_run`.

RAN = 27
"""Number of times that the plan was run, a result."""
MOST_RUNS = 28
"""Most runs; 0 or 1 for a plan that runs once, without drafts."""
NEXT_TOKEN, NEXT_RECORD = 29, 30
"""Addresses of the C function that chooses the token after a row, and of its arguments: see `MultiStep`."""
CHOSEN_FROM, VOCABULARY, CHOSEN_AT = range(3)
"""Places in these arguments: address and length of the row of logits, position of the token."""
LOGITS_STRIDE, HIDDEN_STRIDE = 31, 32
"""Bytes from a row of logits, and of hidden states, to the next. Without drafts every run writes a row of its own."""
TURN = 33
"""The next thing to run, one of the following numbers; written by the first thread."""
END, FORWARD, DRAFT = range(3)
MOVED, ACCEPTED, LAST_ROW = 34, 35, 36
"""Results: number of rows that were accepted before the last run; the tokens of a draft that were accepted in it; and
the last row that was."""
DRAFTS, WIDTHS = 37, 38
"""Steps of a draft at most, 0 for none; and address of int64[DRAFTS], the guesses of each step that are drafted."""
DEPTH, DRAFTED = 39, 40
"""Steps and tokens of the present draft."""
GUESS_RECORD, GUESSES, GUESS_COUNT = 41, 42, 43
"""Address of the arguments of the same C function that choose from the drafter's logits; address and number of the
tokens that it leaves, int64, likeliest first."""
GUESSED = 44
"""Address of int64[DRAFTS, GUESS_COUNT], the guesses of the present draft; -1 where there are fewer."""
DRAFT_TOKEN, DRAFT_HIDDEN, DRAFT_FOLLOWING = 45, 46, 47
"""Addresses of a draft step's token int64[1], of its hidden state float32[H], and of the following one."""
DRAFT_WINDOW = 48
"""Verified positions that a drafter's sliding layers see at most."""
ROTARY = 49
"""Two slots: addresses of the cosines and sines of all positions from the newest token's on. With drafts COSINES and
SINES are those of the rows, which are copied from here."""
CACHE_SHAPES, CACHE_COUNT = 51, 52
"""Address of int64[CACHE_COUNT, 3]: of each cache in a sequence's record, its kind, KV heads and numbers of a head; for
a convolution its kind, 0, and channels."""
VERDICTS = 53
"""Address of int64[MOST_RUNS, 5], a result: the fields of `DraftVerdict` of each run."""
DRAFT_TICKS, FORWARD_TICKS = 54, 55
"""Ticks of the first thread in draft steps, and in forwards."""
SLOTS = 56

# A sequence's record.

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
UNREAD = 9
"""Number of the last committed tokens that its states do not include yet."""
CACHES = 10
"""From here on, the addresses of each layer's keys and values; after all of these, the addresses of each layer's codes
of keys and their codebook, or 0, or of its present and following states."""
