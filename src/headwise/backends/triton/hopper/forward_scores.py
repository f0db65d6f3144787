"""The scores of the Hopper forward: soft cap, bias, and who sees whom.

In the signatures, C is the number of a consumer, X are the constants of a `Variant`, S is the register layout of scores.
"""

from __future__ import annotations

from headwise.backends.triton.hopper.forward_schedule import ROWS
from headwise.backends.triton.hopper.gluon_names import gl, gluon, mbarrier, propagate_nan, reciprocal
from headwise.backends.triton.hopper.mailbox import wait_full
from headwise.backends.triton.hopper.mask_words import bits_of, load_words, only_visible

LOG2E = gl.constexpr(1.4426950408889634)
# Which blocks of a loop over keys are masked.
NOWHERE, EVERYWHERE, AT_THE_EDGES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
AT_THE_END = gl.constexpr(3)  # where the keys end inside of the first one


@gluon.jit
def capped(s, call, X: gl.constexpr):
    """tanh of a product: 1 − 2/(1 + e²ˣ), whose error is small against 1, as a logit's has to be.

    Four of a row share a reciprocal. So what nobody sees, which may be NaN, has to be hidden before; what a bias hides is
    not, and there each has its own.
    """
    if X.has_cap:
        if X.bias_rows > 0:
            return 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(s * call.cap_scale))
        else:
            # From 2³⁰ on the tanh is 1, and the product of four is still a float32.
            power = gl.exp2(gl.minimum(s * call.cap_scale, 30.0, propagate_nan=propagate_nan))
            return 1.0 - 2.0 * _reciprocals(1.0 + power)
    else:
        return s


@gluon.jit
def _reciprocals(x):
    """1/x, where four numbers of a thread share one: 1/a is bcd/(abcd). The units that make them are few."""
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    a, b = gl.split(x.reshape([ROWS, N // 2, 2]))
    ab, cd = gl.split((a * b).reshape([ROWS, N // 16, 2, 4]).permute((0, 1, 3, 2)))
    of_all = reciprocal(ab * cd)
    of_pairs = gl.join(cd * of_all, ab * of_all).permute((0, 1, 3, 2)).reshape([ROWS, N // 2])
    of_pairs = gl.convert_layout(of_pairs, a.type.layout, assert_trivial=True)
    of_each = gl.join(b * of_pairs, a * of_pairs).reshape([ROWS, N])
    return gl.convert_layout(of_each, x.type.layout, assert_trivial=True)


@gluon.jit
def biased(s, shared, blocks, call, C: gl.constexpr, S: gl.constexpr, X: gl.constexpr):
    """With a bias, logits in base 2 of what `capped` gave; else the same."""
    if X.bias_rows > 0:
        at = blocks % X.b_stages
        wait_full(shared.bias.full, blocks, X.b_stages)
        tile = shared.bias.x0.index(at).reshape([X.bias_rows, X.keys])
        if X.bias_rows > 1:
            tile = tile.slice(C * ROWS, ROWS, dim=0)
        bias = tile.load(S).to(gl.float32)
        mbarrier.arrive(shared.bias.empty.index(at))
        # A bias of -inf hides a NaN, as a mask does.
        return gl.where(bias == -float("inf"), bias, s * call.logit_scale + bias * LOG2E)
    else:
        return s


@gluon.jit
def logit_scale_of(call, X: gl.constexpr):
    """Times what `biased` gives is a logit in base 2."""
    if X.bias_rows > 0:
        return 1.0
    else:
        return call.logit_scale


@gluon.jit
def only_in_band(s, block, span, call, S: gl.constexpr, X: gl.constexpr):
    """−∞ where a query does not see a key."""
    key = block * X.keys + gl.arange(0, X.keys, gl.SliceLayout(0, S))[None, :]
    position = span.row + span.offset + gl.arange(0, ROWS, gl.SliceLayout(1, S))[:, None]
    if X.has_right:
        seen = key <= gl.minimum(position + call.right, span.keys - 1)
    else:
        seen = key < span.keys
    if X.has_left:
        seen = seen & (key >= position - call.left)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def only_seen(s, words, block, span, call, S: gl.constexpr, X: gl.constexpr):
    """−∞ where a query does not see a key, by the words of a mask and the band."""
    s = only_visible(s, words, -float("inf"))
    if X.has_left or X.has_right or X.mask_is_endless:
        s = only_in_band(s, block, span, call, S, X)
    return s


@gluon.jit
def shown(s, words, block, span, call, MASK: gl.constexpr, S: gl.constexpr, X: gl.constexpr):
    """−∞ where a query does not see a key, in the blocks that MASK names; ``words``: of a mask."""
    if MASK == EVERYWHERE and X.masked:
        return only_seen(s, words, block, span, call, S, X)
    elif MASK == EVERYWHERE:
        return only_in_band(s, block, span, call, S, X)
    elif MASK == AT_THE_EDGES:
        edge = (block >= span.whole_past) | (block < span.whole)
        if edge:
            s = only_in_band(s, block, span, call, S, X)
        return s
    elif MASK == AT_THE_END:
        if span.past * X.keys > span.keys:
            s = only_in_band(s, block, span, call, S, X)
        return s
    else:
        return s


@gluon.jit
def first_words(tile, call, C: gl.constexpr, S: gl.constexpr, X: gl.constexpr):
    """The words of the first block of a tile, if there is one."""
    bits = bits_of(call.mask, tile.batch_head // call.heads, tile.batch_head % call.heads)
    row = tile.row + C * ROWS
    return load_words(call.mask, bits, tile.entry >> 1, row, tile.rows, tile.row >= 0, S, ROWS, X.keys)


@gluon.jit
def words_at(entry, there, span, call, S: gl.constexpr, X: gl.constexpr):
    return load_words(call.mask, span.bits, entry >> 1, span.row, span.rows, there, S, ROWS, X.keys)
