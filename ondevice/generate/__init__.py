"""Tokens in, tokens out: the draft/verify loop and what it needs. Works on token ids only, never on text.

In: a `GenerationRequest` (prompt ids, `Sampler`, `Limits`, drafter). Out: a `Round` per pass of the loop.
`scheduler` gives each generation a slot, drafters, and a session, which continues a finished one of `prefix_cache`
where the prompts begin alike; `loop.generate` is a generator that yields the rows it wants computed and the finished
rounds; `batch` runs the rows of all generations in shared forwards. `verify` decides which drafted tokens are accepted,
with the target's choices from `sampling/`. `controller` decides which drafter drafts how many tokens, with the measured
`costs`. `stats` has `Round` and `Stats`. The drafters are in `drafters/`.

To follow a generation, read `loop.py` first, then `verify.py`, `sampling/sampler.py`, `request.py`,
`drafters/protocol.py` and `engines/protocol.py`; for several at once `batch.py` and `scheduler.py`. The controller can
stay a black box: it gives a `RoundPlan` for each round and observes the result.

Imports go one way: request, stats, batch and prefix_cache, then sampling, drafters/acceptance and protocol, verify,
costs, controller, the other drafters, loop, scheduler.
"""
