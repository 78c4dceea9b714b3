"""Training that knows no model: the loop and its budget, optimisers, several processes, and the losses of distillation.

Read `run` first.
"""
