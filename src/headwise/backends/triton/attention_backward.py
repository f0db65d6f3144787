"""Attention backward in Triton, dense and packed: two kernels, no atomics, every sum in a fixed order.

    p_ij = exp(s_ij - lse_i)      delta_i = dO_i · O_i - dlse_i      ds_ij = p_ij (D_ij dO_i · v_j - delta_i)
    dq_i = scale Σ_j ds_ij k_j    dk_j = scale Σ_i ds_ij q_i         dv_j = Σ_i D_ij p_ij dO_i
    D is 1, or under dropout 0 or 1 / (1 - dropout)
    dsink = -Σ_i exp(sink - lse_i) delta_i

The first kernel owns a tile of queries, the second a tile of keys. Both compute the scores anew: seven matrix products where
five would do with atomics. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.attention_backward_keys import backward_keys
from headwise.backends.triton.attention_backward_queries import backward_queries
from headwise.backends.triton.attention_bias import bias_gradient
from headwise.backends.triton.bf16x3 import split, tile_precision
from headwise.backends.triton.parameters import (
    banded,
    beside_bias,
    inputs_of,
    one_entry,
    parameters,
    row_bytes,
    tiles_of,
)
from headwise.backends.triton.partial_sums import sum_partials
from headwise.backends.triton.products import dot_precision

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import AttentionBackward

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # of q, k, v, bias and sink
_KERNELS = ("attention_backward_queries", "attention_backward_keys")


def attention_backward(gpu: Gpu, args: AttentionBackward) -> Gradients:
    if hopper.missing(gpu) is None and not tile_sizes.is_forced(*_KERNELS):
        from headwise.backends.triton.hopper import padded as on_hopper  # only where there is such a GPU

        gradients = on_hopper.backward(gpu, args)
        if gradients is not None:
            return gradients
    forward = args.forward
    packed = forward.packing is not None
    x = inputs_of(gpu, forward)
    (batch, heads, rows, _), (_, key_heads, keys, _) = x.q.shape, x.k.shape
    dims = forward.q.shape[-1], forward.v.shape[-1]
    dtype = forward.flags.result_dtype(forward.q.dtype)
    results = [
        gpu.empty(t.shape, dtype, None if packed else layout.empty_heads_inside(t).stride())
        for t in (forward.q, forward.k, forward.v)
    ]
    dq, dk, dv = map(one_entry, results) if packed else results
    grad, out = (t if dims[1] <= 1 or t.stride(-1) == 1 else gpu.contiguous(t) for t in (args.grad_out, args.out))
    grad, out = (one_entry(t) if packed else t for t in (grad, out))
    lse, grad_lse = (None if t is None else gpu.contiguous(t) for t in (args.lse, args.grad_lse))
    stats = gpu.empty((batch, heads, rows, 4), torch.float32)  # lse and delta of each row

    shape = 8 * forward.q.element_size(), max(dims), banded(forward.flags), gpu.arch, forward.dropout_seed is not None
    of_queries, of_keys = (tile_sizes.tile(kernel, *shape) for kernel in _KERNELS)
    row = row_bytes(forward, of_queries)
    of_queries = beside_bias(gpu, of_queries, x.bias, of_queries.keys * row, of_queries.queries * row)
    of_keys = beside_bias(gpu, of_keys, x.bias, of_keys.queries * row, of_keys.keys * row)
    precision = tile_precision(dot_precision(gpu, forward.q.dtype, max(dims)), forward.q.dtype, of_queries, of_keys)
    split_x, split_grad = x, grad
    if precision == "bf16x3":
        split_x = x._replace(q=split(gpu, x.q), k=split(gpu, x.k), v=split(gpu, x.v))
        split_grad = split(gpu, grad)

    tiles = tiles_of(rows, of_queries.queries, forward)
    sink_partials = gpu.empty((batch, heads, tiles), torch.float32) if args.need_sink else None
    if batch * heads * rows:
        numbers, variant = parameters(forward, split_x, tiles, of_queries, precision, out=out, grad=split_grad, dq=dq)
        gpu.launch(
            backward_queries, (tiles * heads * batch,), (*split_x, split_grad, grad_lse, out, lse, dq, stats, sink_partials),
            numbers, (variant,), warps=of_queries.warps, stages=of_queries.stages, registers=of_queries.registers,
        )  # fmt: skip
    if batch * key_heads * keys:
        tiles = tiles_of(keys, of_keys.keys, forward)
        numbers, variant = parameters(forward, split_x, tiles, of_keys, precision, grad=split_grad, dk=dk, dv=dv)
        # With wide heads, dk and dv together fill the registers: there each gets a pass of its own.
        for want in ((True, False), (False, True)) if of_keys.passes == 2 else ((True, True),):
            gpu.launch(
                backward_keys, (tiles * key_heads * batch,), (*split_x, split_grad, stats, dk, dv), numbers,
                (heads > key_heads, *want, variant),
                warps=of_keys.warps, stages=of_keys.stages, registers=of_keys.registers,
            )  # fmt: skip
    dbias = bias_gradient(gpu, forward, x, grad, stats) if args.need_bias else None
    dsink = None
    if forward.sink is not None and sink_partials is not None:
        dsink = sum_partials(gpu, sink_partials, (heads,), forward.sink.dtype)
    return results[0], results[1], results[2], dbias, dsink
