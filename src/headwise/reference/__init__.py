"""The oracle: every op written as its formula, in plain PyTorch, slow and obviously right.

Each function computes in the dtype of its inputs. In float64 it is the truth that backends are measured against; in the
dtype under test it is the plain PyTorch whose own error sets the budget (see `headwise.testing`). Gradients come from
autograd. Only tests and `headwise check` call it.
"""
