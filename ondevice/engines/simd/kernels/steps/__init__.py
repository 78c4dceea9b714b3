"""Steps of a plan: how a step is written down, and the steps that work on rows and with matrices.

`layouts` has the fields of every kind of step, a row of int64 in a plan; `slots` what changes between forwards;
`access` how a kernel reads both, and how threads share work. `rows`, `projections` and `experts` have a function for
each kind of step: a thread's share of it.
The steps of attention are in `kernels.attention`, next to what they call. Read `layouts` first.
"""
