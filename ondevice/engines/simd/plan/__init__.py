"""Plans of forwards: a plan is a flat list of typed steps, whose operands are addresses and sizes.

In: a model (`engines/simd/model.py`) and the places of its matrices in the pack. Out: int64[steps, WIDTH] for
`kernels/forward.py`. Read `target.py` first: the target's forward, whole or in parts. `layer.py` has the decoder layers
of target and drafter, with their experts, `drafts.py` one MTP step and the logits of heads, `builder.py` the steps that
all of them use. Kernels do not check bounds, and all their addresses are computed here, from arrays whose shapes
`ondevice.bundle_format.tensor_table` has checked. The `pack_` functions add a model's matrices to the pack's layout.
"""
