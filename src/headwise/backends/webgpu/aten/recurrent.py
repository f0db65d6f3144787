"""The cells of LSTM and GRU, which PyTorch has fused for GPUs: from pointwise operators.

A cell keeps what its backward reads in one tensor: the gates after their functions, and for a GRU the old state and the
hidden part of the candidate.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu.array import OPERATORS

aten = torch.ops.aten


def _with_bias(gates: Any, bias: Any) -> Any:
    return gates if bias is None else gates + bias


def _lstm(inputs: Any, hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    gates = _with_bias(inputs, input_bias) + _with_bias(hidden, hidden_bias)
    let_in, keep, candidate, let_out = gates.chunk(4, 1)
    let_in, keep, candidate, let_out = let_in.sigmoid(), keep.sigmoid(), candidate.tanh(), let_out.sigmoid()
    new_cell = keep * cell + let_in * candidate
    return let_out * new_cell.tanh(), new_cell, torch.cat([let_in, keep, candidate, let_out], 1)


def _lstm_backward(grad_state: Any, grad_cell: Any, cell: Any, new_cell: Any, kept: Any, has_bias: bool) -> Any:
    let_in, keep, candidate, let_out = kept.chunk(4, 1)
    seen = new_cell.tanh()
    grad_state = torch.zeros_like(cell) if grad_state is None else grad_state
    through = grad_state * let_out * (1 - seen * seen)
    through = through if grad_cell is None else through + grad_cell
    grads = torch.cat(
        [
            through * candidate * let_in * (1 - let_in),
            through * cell * keep * (1 - keep),
            through * let_in * (1 - candidate * candidate),
            grad_state * seen * let_out * (1 - let_out),
        ],
        1,
    )
    return grads, through * keep, grads.sum(0) if has_bias else None


def _gru(inputs: Any, hidden: Any, state: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    of_input = _with_bias(inputs, input_bias).chunk(3, 1)
    of_state = _with_bias(hidden, hidden_bias).chunk(3, 1)
    reset, keep = (of_input[0] + of_state[0]).sigmoid(), (of_input[1] + of_state[1]).sigmoid()
    candidate = (of_input[2] + reset * of_state[2]).tanh()
    return candidate + keep * (state - candidate), torch.cat([reset, keep, candidate, state, of_state[2]], 1)


def _gru_backward(grad: Any, kept: Any, has_bias: bool) -> Any:
    reset, keep, candidate, state, hidden = kept.chunk(5, 1)
    of_keep = grad * (state - candidate) * keep * (1 - keep)
    of_candidate = grad * (1 - keep) * (1 - candidate * candidate)
    of_reset = of_candidate * hidden * reset * (1 - reset)
    inputs = torch.cat([of_reset, of_keep, of_candidate], 1)
    hiddens = torch.cat([of_reset, of_keep, of_candidate * reset], 1)
    biases = (inputs.sum(0), hiddens.sum(0)) if has_bias else (None, None)
    return inputs, hiddens, grad * keep, *biases


OPERATORS |= {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}
