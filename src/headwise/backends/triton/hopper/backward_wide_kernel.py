"""The Gluon kernel of the attention backward on Hopper for heads wider than 128, with three warpgroups.

A program works on one tile of 64 keys after the other; dK and dV of so many are half the register file. Each warpgroup has a
part of every step, and hands on through shared memory (everything transposed: keys down, queries across):

    weigh   S = K Q'     P = exp(S - lse)          dV += P dO      P goes to `derive`
    derive  dP = V dO'   dS = P (dP - delta)       dK += dS Q      dS goes to `spread`
    spread  dQ = dS' K                             which is added to the sums

No product is done twice, and P and dS feed dV and dK from the registers they were made in. A warpgroup's arithmetic has no
product of its own beside it: the other two are there for that. There is room for one tile of keys and values only, whose
gradients leave from the same place; grad_out and q of the next tile arrive meanwhile.

A head dim is 128 and ``d1`` more: dK and the inner products are done in two pieces, so that 192 costs three quarters of 256.
In shared memory they are 256 wide, with zeros past the end. Values are 128 and ``e1`` more, which may be nothing: beside
heads of 192 there are values of 128.
"""

# ruff: noqa: SIM102  (constants have an `if` of their own)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.backward_math import (
    add_to_sums,
    from_fragment_order,
    in_fragment_order,
    only_seen,
    opaque_zero,
    score_gradients,
    slope_of,
    wait_for_consumers,
    weights_of,
)
from headwise.backends.triton.hopper.backward_schedule import (
    ANY_ALIGNMENT,
    FIELDS,
    NO_CONSTANTS,
    Buffers,
    Call,
    Inputs,
    Turns,
    await_turns,
    block_and_rank,
    block_at,
    constants,
    is_first_at,
    list_of,
    needs_mask,
    new_tiles,
    next_tile,
    pass_turns,
    produce,
)
from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from headwise.backends.triton.hopper.mailbox import new_barriers, new_mailbox, wait_empty, wait_full
from headwise.backends.triton.hopper.mask_words import LIST_HEADER, bits_of, entry_at, load_words, mask_of, only_visible
from headwise.backends.triton.hopper.sequence_rows import store_rows

_D0 = gl.constexpr(128)  # the first piece of a head dim
_WIDTH = gl.constexpr(256)  # of heads in shared memory
_SUMS = gl.constexpr(64)  # columns of dQ that are added at once
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LAYOUT0 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), 2))


class Handoff(NamedTuple):
    """What goes from one warpgroup to the next, and its barriers."""

    p: Any  # of one step
    p_full: Any
    p_empty: Any
    ds: Any  # of as many steps as are loaded ahead
    ds_full: Any
    ds_empty: Any


@gluon.jit
def _at(buffer, at):
    """A tile of shared memory: q and K as wide as can be, grad_out and V half of it, if that is enough."""
    return buffer.index(at).reshape([64, buffer.shape[-1]])


@gluon.jit
def _scores(keys, rows, D1: gl.constexpr):
    """Issue keys · rows': one or two products, all pending."""
    none = gl.zeros([64, 64], gl.float32, _SCORES)
    s = warpgroup_mma(
        keys.slice(0, _D0, dim=1), rows.slice(0, _D0, dim=1).permute((1, 0)), none, use_acc=False, is_async=True
    )
    if D1 > 0:
        s = warpgroup_mma(keys.slice(_D0, D1, dim=1), rows.slice(_D0, D1, dim=1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _no_gradients(D1: gl.constexpr):
    """dK or dV of a tile before its first step, in two pieces; without a second one (D1 = 0), a zero stands there."""
    if D1 > 0:
        layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16])
        return gl.zeros([64, _D0], gl.float32, _LAYOUT0), gl.zeros([64, D1], gl.float32, layout1)
    else:
        return gl.zeros([64, _D0], gl.float32, _LAYOUT0), 0


@gluon.jit
def _store_gradients(desc, acc0, acc1, buffer, kv_empty, tile, D1: gl.constexpr, X: gl.constexpr):
    """dK or dV, from where the keys or values were; then there is room for the next tile."""
    if X.packed:
        acc0 += tile.poison.to(gl.float32, bitcast=True)
        if D1 > 0:
            acc1 += tile.poison.to(gl.float32, bitcast=True)
    # The place of V is free when `derive` is here, that of K when `spread` is.
    wait_for_consumers(384)
    place = _at(buffer, 0)
    place.slice(0, _D0, dim=1).store(acc0.to(buffer.dtype))
    if D1 > 0:
        place.slice(_D0, D1, dim=1).store(acc1.to(buffer.dtype))
    fence_async_shared()
    thread_barrier()
    store_rows(
        desc, tile.batch, tile.head, tile.first_key, tile.keys, tile.number * X.keys, 0, buffer.index(0), X.packed
    )  # fmt: skip
    wait_for_stores(0)
    mbarrier.arrive(kv_empty.index(0))


@gluon.jit
def _steps_of(tile, call, X: gl.constexpr):
    """How many steps a tile takes, over all query heads of its key head."""
    if X.masked:
        return tile.end
    else:
        return (tile.end - tile.begin) * call.group


@gluon.jit
def _weigh_step(products, dv0, dv1, step, block, partly, words, more, buffers, handoff, tile, call, X: gl.constexpr):
    """A step of `weigh`. ``partly``: some queries of the block do not see some of the keys; ``words``: of a mask."""
    SCORE_PRODUCTS: gl.constexpr = 2 if X.d1 > 0 else 1
    stage = step % X.stages
    p, _ = weights_of(products, buffers.lse.index(stage).load(_SCORES), call, X)
    if partly:
        if X.masked:
            p = only_visible(p, words, 0.0)
        if X.has_left or X.has_right or not X.masked:
            p = only_seen(p, block, tile.number * X.keys, tile, call, X)
    p_16 = gl.convert_layout(p.to(buffers.q.dtype), _OPERAND)
    wait_empty(handoff.p_empty, step, 1)
    handoff.p.store(in_fragment_order(p))
    mbarrier.arrive(handoff.p_full.index(0))
    wait_full(buffers.do_full, step, X.stages)
    do = _at(buffers.do, stage)
    dv0_started = warpgroup_mma(p_16, do.slice(0, _D0, dim=1), dv0, is_async=True)
    if X.e1 > 0:
        dv1_started = warpgroup_mma(p_16, do.slice(_D0, X.e1, dim=1), dv1, is_async=True)
    # After the last step these products are of no use.
    wait_full(buffers.q_full, step + 1, X.stages, more)
    started = _scores(_at(buffers.k, opaque_zero()), _at(buffers.q, (step + 1) % X.stages), X.d1)
    if X.e1 > 0:
        dv0, dv1, p_16 = warpgroup_mma_wait(SCORE_PRODUCTS, [dv0_started, dv1_started, p_16])
    else:
        dv0, p_16 = warpgroup_mma_wait(SCORE_PRODUCTS, [dv0_started, p_16])
    mbarrier.arrive(buffers.do_empty.index(stage))
    products = warpgroup_mma_wait(0, [started])
    return products, dv0, dv1


@gluon.jit
def _weigh_list(products, dv0, dv1, step, past, member, buffers, handoff, tile, call, X: gl.constexpr):
    """The steps of one query head, with a mask."""
    list_at, blocks = list_of(tile, member, call)
    bits = bits_of(call.mask, tile.batch, tile.head * call.group + member)
    low = tile.number * X.keys
    entry = gl.load(list_at + LIST_HEADER, mask=blocks > 0, other=0)
    after = gl.load(list_at + LIST_HEADER + 1, mask=blocks > 1, other=0)
    coming = load_words(call.mask, bits, entry & 0x7FFF, low, tile.keys, needs_mask(entry), _SCORES, 64, 64)
    for i in range(0, blocks):
        block, partly, words = entry & 0x7FFF, needs_mask(entry), coming
        entry = after
        after = gl.load(list_at + LIST_HEADER + i + 2, mask=i + 2 < blocks, other=0)
        coming = load_words(call.mask, bits, entry & 0x7FFF, low, tile.keys, needs_mask(entry), _SCORES, 64, 64)
        products, dv0, dv1 = _weigh_step(
            products, dv0, dv1, step, block, partly, words, step + 1 < past, buffers, handoff, tile, call, X
        )
        step += 1
    return products, dv0, dv1, step


@gluon.jit
def _weigh(dv_desc, buffers, handoff, mailbox, call, X: gl.constexpr):
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        dv0, dv1 = _no_gradients(X.e1)
        wait_full(buffers.kv_full, count, 1)
        steps = _steps_of(tile, call, X)
        if steps > 0:
            stage = step % X.stages
            wait_full(buffers.q_full, step, X.stages)
            products = warpgroup_mma_wait(0, [_scores(_at(buffers.k, opaque_zero()), _at(buffers.q, stage), X.d1)])
            if X.masked:
                past = step + steps
                for member in range(0, call.group):
                    products, dv0, dv1, step = _weigh_list(
                        products, dv0, dv1, step, past, member, buffers, handoff, tile, call, X
                    )
            else:
                block = block_at(0, tile.begin, tile.end, X)
                for i in range(0, steps):
                    partly = (block < tile.whole_begin) | (block >= tile.whole_end)
                    products, dv0, dv1 = _weigh_step(
                        products, dv0, dv1, step, block, partly, 0, i + 1 < steps, buffers, handoff, tile, call, X
                    )
                    block = block + 1 if X.upwards else block - 1
                    if X.grouped:
                        if (block < tile.begin) | (block >= tile.end):
                            block = block_at(0, tile.begin, tile.end, X)
                    step += 1
        _store_gradients(dv_desc, dv0, dv1, buffers.v, buffers.kv_empty, tile, X.e1, X)
        count += 1
        tile = next_tile(mailbox, count)


@gluon.jit
def _derive(dk_desc, buffers, handoff, mailbox, call, X: gl.constexpr):
    PRODUCTS: gl.constexpr = 2 if X.e1 > 0 else 1  # that dP takes
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        dk0, dk1 = _no_gradients(X.d1)
        wait_full(buffers.kv_full, count, 1)
        steps = _steps_of(tile, call, X)
        if steps > 0:
            stage = step % X.stages
            wait_full(buffers.do_full, step, X.stages)
            dp = warpgroup_mma_wait(0, [_scores(_at(buffers.v, opaque_zero()), _at(buffers.do, stage), X.e1)])
            for i in range(0, steps):
                stage = step % X.stages
                wait_full(handoff.p_full, step, 1)
                p = from_fragment_order(handoff.p.load(in_fragment_order(dp).type.layout), _SCORES)
                delta, lse = buffers.delta.index(stage).load(_SCORES), buffers.lse.index(stage).load(_SCORES)
                ds_16 = score_gradients(p, dp, delta, slope_of(p, lse, call, X), X).to(buffers.q.dtype)
                mbarrier.arrive(handoff.p_empty.index(0))
                mbarrier.arrive(buffers.do_empty.index(stage))
                wait_empty(handoff.ds_empty, step, X.stages)
                handoff.ds.index(stage).store(ds_16)
                ds_operand = gl.convert_layout(ds_16, _OPERAND)
                fence_async_shared()
                mbarrier.arrive(handoff.ds_full.index(stage))
                wait_full(buffers.q_full, step, X.stages)
                q = _at(buffers.q, stage)
                dk0_started = warpgroup_mma(ds_operand, q.slice(0, _D0, dim=1), dk0, is_async=True)
                dk1_started = warpgroup_mma(ds_operand, q.slice(_D0, X.d1, dim=1), dk1, is_async=True)
                # After the last step these products are of no use.
                wait_full(buffers.do_full, step + 1, X.stages, i + 1 < steps)
                started = _scores(_at(buffers.v, opaque_zero()), _at(buffers.do, (step + 1) % X.stages), X.e1)
                dk0, dk1, ds_operand = warpgroup_mma_wait(PRODUCTS, [dk0_started, dk1_started, ds_operand])
                mbarrier.arrive(buffers.q_empty.index(stage))
                dp = warpgroup_mma_wait(0, [started])
                step += 1
        _store_gradients(
            dk_desc, dk0 * call.scale, dk1 * call.scale, buffers.k, buffers.kv_empty, tile, X.d1, X
        )  # fmt: skip
        count += 1
        tile = next_tile(mailbox, count)


@gluon.jit
def _spread(buffers, handoff, mailbox, may_add, call, X: gl.constexpr):
    none = gl.zeros([64, _SUMS], gl.float32, _SCORES)
    # In shared memory, columns lie in slabs of 128 bytes.
    k = reinterpret(buffers.k, [_WIDTH // _SUMS, 64, _SUMS], gl.NVMMASharedLayout(128, 16, 2))
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        wait_full(buffers.kv_full, count, 1)
        for member in range(0, call.group):
            q_head = (tile.head * call.group + member).to(gl.int64)
            head_sums = call.sums + (q_head * call.all_blocks + tile.first_block) * (64 * X.dim)
            blocks = tile.end - tile.begin
            if X.masked:
                list_at, blocks = list_of(tile, member, call)
            for i in range(0, blocks):
                if X.masked:
                    block, rank = block_and_rank(entry_at(list_at, i))
                    first = rank == 0
                else:
                    block = block_at(i, tile.begin, tile.end, X)
                    first = is_first_at(block, tile, X)
                sums_at = head_sums + block.to(gl.int64) * (64 * X.dim)
                stage = step % X.stages
                wait_full(handoff.ds_full, step, X.stages)
                ds = handoff.ds.index(stage).permute((1, 0))
                # A loop, so that the compiler does not put off the sums of one piece until the next one is there.
                for piece in range(0, X.dim // _SUMS):
                    started = warpgroup_mma(ds, k.index(piece), none, use_acc=False, is_async=True)
                    dq = warpgroup_mma_wait(0, [started])
                    if X.deterministic:
                        wait_full(may_add, step, X.stages)
                    add_to_sums(dq, sums_at + piece * (64 * _SUMS), first, _SUMS, X)
                mbarrier.arrive(handoff.ds_empty.index(stage))
                step += 1
        wait_for_consumers(384)
        count += 1
        tile = next_tile(mailbox, count)


@gluon.jit(do_not_specialize=NO_CONSTANTS, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def wide_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, bias_desc, sums, turns, ticket, records, bits, lists,
    blind, stats, tiles, batch_heads, heads_together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group,
    scale, score_scale, softcap, bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at,
    bias_batch, bias_head, bias_row, bias_key, VARIANT: gl.constexpr,
):  # fmt: skip
    """A persistent program. The parameters are those of `Inputs` and `Call`, the gradients, and a `Variant`."""
    X: gl.constexpr = constants(VARIANT)
    gl.static_assert(X.kv_stages == 1)
    gl.static_assert(X.bias_rows == 0)  # there is no room for a bias
    gl.static_assert(X.d0 == 128 and X.d1 > 0 and X.e0 == 128)
    inputs = Inputs(q_desc, k_desc, v_desc, do_desc, stats_desc, None)
    mask = mask_of(
        bits, lists, (bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at), X
    )
    call = Call(
        sums, turns, ticket, records, tiles, batch_heads, heads_together, rows, keys, row_blocks, all_blocks, left, right,
        key_heads, group, scale, score_scale, softcap, mask, None, blind, stats,
    )  # fmt: skip
    tiles_s = new_tiles(inputs, X)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [X.stages, X.keys, X.rows], gl.NVMMASharedLayout(128, 16, 2))
    p_s = gl.allocate_shared_memory(gl.float32, [X.keys * X.rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mailbox = new_mailbox(FIELDS, 5 if X.deterministic else 3)  # consumers and turns
    kv_full, kv_empty = new_barriers(1, 1), new_barriers(1, 2)
    q_full, q_empty = new_barriers(X.stages, 1), new_barriers(X.stages, 1)  # `weigh` is done with q before `derive` is
    do_full, do_empty = new_barriers(X.stages, 1), new_barriers(X.stages, 2)
    cut = None
    if X.masked or X.bias_rows > 0:
        cut = new_barriers(1, 1)
    buffers = Buffers(*tiles_s, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, cut, None)  # type: ignore[call-arg]
    handoff = Handoff(
        p_s, new_barriers(1, 1), new_barriers(1, 1), ds_s, new_barriers(X.stages, 1), new_barriers(X.stages, 1)
    )  # fmt: skip
    turn_barriers = Turns(new_barriers(X.stages, 1), new_barriers(X.stages, 1))
    fence_async_shared()
    # Argument tuples have to stand inside the call.
    if X.deterministic:
        gl.warp_specialize([
            (_weigh, (dv_desc, buffers, handoff, mailbox, call, X)),
            (_derive, (dk_desc, buffers, handoff, mailbox, call, X)),
            (_spread, (buffers, handoff, mailbox, turn_barriers.may_add, call, X)),
            (produce, (inputs, buffers, mailbox, call, X)),
            (await_turns, (mailbox, turn_barriers, call, X)),
            (pass_turns, (mailbox, handoff.ds_empty, turn_barriers, call, X)),
        ], [4, 4, 1, 1, 1], [208, 72, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_weigh, (dv_desc, buffers, handoff, mailbox, call, X)),
            (_derive, (dk_desc, buffers, handoff, mailbox, call, X)),
            (_spread, (buffers, handoff, mailbox, turn_barriers.may_add, call, X)),
            (produce, (inputs, buffers, mailbox, call, X)),
        ], [4, 4, 1], [208, 72, 24])  # fmt: skip
