"""Plans of forwards: a plan is a flat list of typed steps, whose operands are addresses and sizes.

In: a model (`engines/simd/model.py`) and the places of its matrices in the pack. Out: int64[steps, WIDTH] for
`kernels/forward.py`. Read `target.py` first: the target's forward, whole or in parts. `layer.py` has the decoder layer
of target and drafter, `experts.py` the experts of a layer, `drafter.py` one MTP step, `heads.py` the logits of heads.
Only `builder.py` turns sizes into addresses. The `pack_` functions add the matrices of a model to the pack's layout.
"""
