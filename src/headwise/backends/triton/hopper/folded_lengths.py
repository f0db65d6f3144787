"""A mask beside ``q_lengths``, ``kv_lengths`` or ``kv_starts`` on Hopper: the packed mask knows the lengths, and the band.

Positions shift with the lengths of a batch entry, so the band is packed, too, and the kernels are those of a mask without
one. Keys and queries that do not exist are what nobody sees: they may hold NaN. Small kernels mark what a bad length makes
of the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.triton.hopper import attention_backward, attention_forward
from headwise.backends.triton.hopper.coverage import backward_tile, covers_backward, covers_forward, masked_tile
from headwise.backends.triton.hopper.lengths import lengths_of, mark_bad, mark_rows
from headwise.backends.triton.hopper.mask_tiles import Folded
from headwise.backends.triton.hopper.padding import without_lengths
from headwise.backends.triton.scores import band_of

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention, AttentionBackward


def forward(gpu: Gpu, args: Attention) -> tuple[Tensor, Tensor | None] | None:
    """(out, lse), or None if the plain kernel is to do it."""
    plain = without_lengths(args)
    if covers_forward(plain) is not None or not all(map(gpu.aligned, (args.q, args.k, args.v))):
        return None
    results = attention_forward.forward(gpu, plain, masked_tile(args.q.shape[3]), folded=_folded(gpu, args))
    assert results is not None
    out, lse = results
    mark_rows(gpu, args, lse)
    mark_bad(gpu, args, out)
    return out, lse


def backward(gpu: Gpu, args: AttentionBackward) -> attention_backward.Gradients | None:
    """None if the plain kernels are to do it."""
    call = args.forward
    plain = without_lengths(call)
    if covers_backward(plain) is not None or not all(map(gpu.aligned, (call.q, call.k, call.v))):
        return None
    tile = backward_tile(call.q.shape[3], call.flags.softcap > 0, masked=True)
    gradients = attention_backward.backward(gpu, args._replace(forward=plain), tile, folded=_folded(gpu, call))
    assert gradients is not None
    for x in gradients[:3]:
        assert x is not None
        mark_bad(gpu, call, x)
    return gradients


def _folded(gpu: Gpu, args: Attention) -> Folded:
    return Folded(*lengths_of(gpu, args), band_of(args.flags, args.q.shape[2], args.k.shape[2]))
