"""Which padded batches the Hopper kernels take as packed ones, and what `explain` says of a call.

A dense batch with lengths is a packed one: its tokens lie end to end, and every entry is four sequences, of which one has
both queries and keys. Nothing is copied. Beside a mask, lengths are packed with it. Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise import layout
from headwise.backends.triton.hopper import coverage

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Attention

SEQUENCES = 4  # of a batch entry: keys before its first, the entry itself, queries past its end, keys past its end


def covers_forward(args: Attention) -> str | None:
    """Why the Hopper forward does not take a call; None if it does."""
    if foldable(args):
        return coverage.covers_forward(without_lengths(args))
    reason = coverage.covers_forward(args)
    return coverage.covers_forward(as_packed(args)) if reason is not None and packable(args) else reason


def covers_backward(args: Attention) -> str | None:
    """Why the Hopper backward does not take the gradients of a call; None if it does."""
    if foldable(args):
        return coverage.covers_backward(without_lengths(args))
    reason = coverage.covers_backward(args)
    return coverage.covers_backward(as_packed(args)) if reason is not None and packable(args) else reason


def packable(args: Attention) -> bool:
    """Is this a padded batch whose tokens lie end to end, heads inside, and which a packed call could do?"""
    q, k, v = args.q, args.k, args.v
    if not has_lengths(args) or args.packing is not None or args.mask is not None or args.bias is not None:
        return False
    (_, heads, queries, _), value_dim = q.shape, v.shape[3]
    heads_inside = queries * heads * value_dim, value_dim, heads * value_dim, 1
    return layout.strides_like_heads(q, value_dim) == heads_inside and all(map(end_to_end, (q, k, v)))


def has_lengths(args: Attention) -> bool:
    return args.q_lengths is not None or args.kv_lengths is not None or args.kv_starts is not None


def foldable(args: Attention) -> bool:
    """Has this padded batch a mask with a number of its own for everything that depends on a length?

    Then the lengths are packed with it. A mask that is broadcast over the batch, or over the queries beside a band or
    ``q_lengths``, would have to be packed into more than an eighth of its bytes. That of a single query would be taken
    for one that is broadcast.
    """
    if not has_lengths(args) or args.packing is not None or args.mask is None or args.bias is not None:
        return False
    (batch, _, queries, _), keys, flags = args.q.shape, args.k.shape[2], args.flags
    mask = coverage.unexpanded(args.mask)
    of_queries = flags.left >= 0 or flags.right >= 0 or args.q_lengths is not None
    return mask.shape[0] == batch and mask.shape[3] == keys and (1 < queries == mask.shape[2] or not of_queries)


def without_lengths(args: Attention) -> Attention:
    """The same call where the mask says what the lengths and the band do."""
    flags = args.flags._replace(left=-1, right=-1)
    return args._replace(q_lengths=None, kv_lengths=None, kv_starts=None, flags=flags)


def as_packed(args: Attention, cu_q: Any = None, cu_k: Any = None) -> Attention:
    """The same call of a packed batch, given its offsets, if it is `packable`."""
    longest = args.q.shape[2], args.k.shape[2]
    return args.packed(tokens(args.q), tokens(args.k), tokens(args.v), cu_q, cu_k, *longest)


def end_to_end(x: Tensor) -> bool:
    """Does x ``(B, H, S, D)`` have one distance between all tokens, across batch entries, too?"""
    return x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2)


def tokens(x: Tensor) -> Tensor:
    """``(B, H, S, D)`` as ``(B · S, H, D)``, a view if it lies end to end."""
    return x.transpose(1, 2).flatten(0, 1)
