"""The `ort` engine: a bundle's graphs on ONNX Runtime, with every session's KV cache bound in place.

Rows of a chain are bit-identical however many run beside them (tests/engines/test_exactness.py), for three reasons:
the graphs fold query heads into rows, so no product has a single row; `VIEWS` aligns what attention sees; and
MatMulNBits quantises activations row by row. ONNX Runtime promises none of this: it holds where it was tested, x86-64.
A tree's branches are equal up to rounding: softmax adds up keys in the order of their cache rows, which siblings part.

`engine` holds the graphs with their weights, `session` one sequence, `draft_steps` its steps of the drafter, `binding`
a graph's inputs and outputs in numpy's memory.
"""
