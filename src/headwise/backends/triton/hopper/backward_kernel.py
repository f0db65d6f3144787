"""The Gluon kernel of the attention backward on Hopper: five matrix products per pair of blocks, all five of them `wgmma`.

A program works on one tile of 128 keys after the other: two warpgroups (the consumers) hold dK and dV of 64 keys each in
registers and walk together over the blocks of queries that see some of the keys, from the last to the first, for every query
head of the key head. One warp draws tiles and loads, and where the result must be the same bits every time, two more take
turns for dQ (`backward_schedule`). Keys and values have two places in shared memory: those of the next tile arrive while
this one is worked on, and its gradients leave from where its keys and values were.

A step of a consumer, with everything transposed, keys down and queries across, so that P and dS feed dV and dK from
registers:

    dP = V dO'    P = exp(S - lse)    dV += P dO    dS = P (dP - delta), stored for both consumers
    dQ = dS' K    dK += dS Q          dQ is added to the sums        S of the next step = K Q'

Each line of arithmetic has a product beside it that does not wait for it: exp has dP, dS has dV, the sums have dK, and S of
the next step is in the queue before dK is done.

dQ is a sum over programs. A consumer adds its half straight from the registers to a float32 array that holds every block in
the order of the registers (`in_fragment_order`), so that a warp adds 512 bytes in a row with one instruction.

Shared memory that a loop reads at a fixed place is indexed with a zero that the compiler cannot see through (`opaque_zero`):
otherwise it keeps the descriptors of all the products in registers, dozens of them, and spills.

A bias lies in shared memory as well, which then has one place for keys and values up to head dim 128.

Heads of 80 and 96 are two pieces, 64 + 16 and 64 + 32, in shared memory of their own: products over the head dim add up over
both, dK and dV have an accumulator for each, and of dQ each consumer makes one piece. The second one's has less to do, which
costs no time: the tensor cores serve both.

In the signatures, HALF is the number of a consumer and X are the constants of a `Variant`.
"""

# ruff: noqa: RUF005  (Gluon has no starred lists)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.backward_math import (
    LOG2E,
    add_to_sums,
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
    BiasPlace,
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
    new_second_tiles,
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
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from headwise.backends.triton.hopper.mailbox import new_barriers, new_mailbox, wait_full
from headwise.backends.triton.hopper.mask_words import LIST_HEADER, bits_of, load_words, mask_of, only_visible
from headwise.backends.triton.hopper.sequence_rows import store_rows


class Outputs(NamedTuple):
    """Descriptors of the gradients of keys and values, in one or two pieces of the head dim."""

    dk: Any
    dv: Any
    dk1: Any
    dv1: Any


class Listed(NamedTuple):
    """What a step needs to know of a mask."""

    first: Any  # no other tile adds to these sums before this one
    words: Any  # of its block
    bits: Any  # of its head
    coming: Any  # the entry of the next step


@gluon.jit
def _words_of(entry, bits, low, tile, call, S_LAYOUT: gl.constexpr, X: gl.constexpr):
    """The words of an entry's block; all bits are set where it needs no mask: cheaper than a branch around their use."""
    masked = needs_mask(entry)
    words = load_words(call.mask, bits, entry & 0x7FFF, low, tile.keys, masked, S_LAYOUT, 64, X.rows)
    return words | gl.where(masked, 0, -1)


@gluon.jit
def _issue_inner(keys0, keys1, rows0, rows1, none, X: gl.constexpr):
    """Issue keys · rows' over one or two pieces of the head dim."""
    s = warpgroup_mma(keys0, rows0.permute((1, 0)), none, use_acc=False, is_async=True)
    if X.d1 > 0:
        s = warpgroup_mma(keys1, rows1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _own(buffer0, buffer1, place, HALF: gl.constexpr, X: gl.constexpr):
    """Both pieces of a consumer's 64 keys or values."""
    x0 = buffer0.index(place).reshape([X.keys, X.d0]).slice(HALF * 64, 64, dim=0)
    x1 = x0
    if X.d1 > 0:
        x1 = buffer1.index(place).reshape([X.keys, X.d1]).slice(HALF * 64, 64, dim=0)
    return x0, x1


@gluon.jit
def _rows_of(buffer0, buffer1, stage, X: gl.constexpr):
    """Both pieces of a block of q or grad_out."""
    x0 = buffer0.index(stage).reshape([X.rows, X.d0])
    x1 = x0
    if X.d1 > 0:
        x1 = buffer1.index(stage).reshape([X.rows, X.d1])
    return x0, x1


@gluon.jit
def _issue_gradient(operand, x0, x1, acc, X: gl.constexpr):
    """Issue acc += operand · x; ``acc`` is a tuple of one or two pieces."""
    acc0 = warpgroup_mma(operand, x0, acc[0], is_async=True)
    if X.d1 > 0:
        layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d1, 16])
        operand1 = gl.convert_layout(operand, gl.DotOperandLayout(0, layout1, 2))
        return acc0, warpgroup_mma(operand1, x1, acc[1], is_async=True)
    else:
        return (acc0,)


@gluon.jit
def _step(
    HALF: gl.constexpr, products, dk, dv, step, block, listed, more, place, sums_at, low, tile, buffers, ds_s, turns, call,
    MASKED: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """One block of queries, of which the products q·k are known; returns those of the next one, too.

    ``dk``, ``dv``: tuples of one or two pieces. With a mask, ``listed``: a `Listed`, of which the words of the next step are
    returned.
    """
    BM: gl.constexpr = X.rows
    PIECES: gl.constexpr = 2 if X.d1 > 0 else 1
    LATE_SLOPE: gl.constexpr = X.has_cap and X.d0 == 128  # no registers keep it
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d0, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    # The two consumers share a block of dQ: 64 rows are split by columns, 128 by rows.
    ROOM: gl.constexpr = X.dim * BM // 128
    DQ_COLUMNS: gl.constexpr = X.d1 if X.d1 > 0 and HALF == 1 else ROOM
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
    no_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, DQ_LAYOUT)
    place += opaque_zero()
    k = buffers.k.index(place).reshape([X.keys, X.d0])
    own_k0, own_k1 = _own(buffers.k, buffers.k1, place, HALF, X)
    own_v0, own_v1 = _own(buffers.v, buffers.v1, place, HALF, X)
    if X.d1 > 0:
        dq_k = k
        if HALF == 1:
            dq_k = buffers.k1.index(place).reshape([X.keys, X.d1])
    elif BM == 64:
        dq_k = k.slice(HALF * (X.d0 // 2), X.d0 // 2, dim=1)
    else:
        dq_k = k
    stage = step % X.stages
    q0, q1 = _rows_of(buffers.q, buffers.q1, stage, X)
    do0, do1 = _rows_of(buffers.do, buffers.do1, stage, X)

    dp_started = _issue_inner(own_v0, own_v1, do0, do1, no_scores, X)
    lse = buffers.lse.index(stage).load(S_LAYOUT)
    if X.bias_rows > 0:
        bias = buffers.bias.index(stage).reshape([X.bias_rows, X.keys]).slice(HALF * 64, 64, dim=1)
        lse = lse - bias.permute((1, 0)).load(S_LAYOUT).to(gl.float32) * LOG2E
    p, slope = weights_of(products, lse, call, X)
    if X.has_cap and not LATE_SLOPE:
        slope = slope.to(q0.dtype)  # half the registers; dS is rounded as much
    if MASKED:
        if X.masked:
            p = only_visible(p, listed.words, 0.0)
        if X.has_left or X.has_right or not X.masked:
            p = only_seen(p, block, low, tile, call, X)
    p_16 = gl.convert_layout(p.to(q0.dtype), LEFT_OPERAND)
    dv_started = _issue_gradient(p_16, do0, do1, dv, X)
    dp = warpgroup_mma_wait(PIECES, [dp_started])
    delta = buffers.delta.index(stage).load(S_LAYOUT)
    if LATE_SLOPE:
        slope = slope_of(p, buffers.lse.index(stage).load(S_LAYOUT), call, X)
    ds_16 = score_gradients(p, dp, delta, slope, X).to(q0.dtype)
    ds_buffer = ds_s.index(step % 2)
    ds_buffer.slice(HALF * 64, 64, dim=0).store(ds_16)
    ds_operand = gl.convert_layout(ds_16, LEFT_OPERAND)
    fence_async_shared()
    wait_for_consumers(256)

    if BM == 64:
        ds_rows = ds_buffer.permute((1, 0))
    else:
        ds_rows = ds_buffer.slice(HALF * 64, 64, dim=1).permute((1, 0))
    dq_started = warpgroup_mma(ds_rows, dq_k, no_dq, use_acc=False, is_async=True)
    dk_started = _issue_gradient(ds_operand, q0, q1, dk, X)
    if X.d1 > 0:
        dq, dv0, dv1, p_16 = warpgroup_mma_wait(PIECES, [dq_started, dv_started[0], dv_started[1], p_16])
        dv = (dv0, dv1)
    else:
        dq, dv0, p_16 = warpgroup_mma_wait(PIECES, [dq_started, dv_started[0], p_16])
        dv = (dv0,)
    if X.deterministic:
        wait_full(turns.may_add, step, X.stages)
    if X.masked:
        add_to_sums(dq, sums_at, listed.first, ROOM, X)
    else:
        add_to_sums(dq, sums_at, is_first_at(block, tile, X), ROOM, X)
    # S of the next step follows dK without a gap; after the last step it is of no use.
    wait_full(buffers.q_full, step + 1, X.stages, more)
    next_q0, next_q1 = _rows_of(buffers.q, buffers.q1, (step + 1) % X.stages, X)
    s_started = _issue_inner(own_k0, own_k1, next_q0, next_q1, no_scores, X)
    words = 0
    if X.masked and MASKED:  # here registers are free, and the products take as long as memory does
        words = _words_of(listed.coming, listed.bits, low + opaque_zero(), tile, call, S_LAYOUT, X)
    if X.d1 > 0:
        products, dk0, dk1, ds_operand = warpgroup_mma_wait(0, [s_started, dk_started[0], dk_started[1], ds_operand])
        dk = (dk0, dk1)
    else:
        products, dk0, ds_operand = warpgroup_mma_wait(0, [s_started, dk_started[0], ds_operand])
        dk = (dk0,)
    mbarrier.arrive(buffers.q_empty.index(stage))
    return products, dk, dv, words


@gluon.jit
def _walk(
    HALF: gl.constexpr, products, dk, dv, step, begin, end, past, place, head_sums, low, tile, buffers, ds_s, turns, call,
    MASKED: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """The steps of the blocks of queries from ``begin`` to ``end``; ``past``: the last step of the tile, and one."""
    for i in range(0, end - begin):
        block = block_at(i, begin, end, X)
        products, dk, dv, _ = _step(
            HALF, products, dk, dv, step, block, None, step + 1 < past, place,
            head_sums + block.to(gl.int64) * (X.rows * X.dim), low, tile, buffers, ds_s, turns, call, MASKED, X,
        )  # fmt: skip
        step += 1
    return products, dk, dv, step


@gluon.jit
def _walk_list(
    HALF: gl.constexpr, products, dk, dv, step, list_at, bits, blocks, past, place, head_sums, low, tile, buffers, ds_s,
    turns, call, X: gl.constexpr,
):  # fmt: skip
    """The steps of a list; entries and words are loaded a step ahead."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.rows, 16])
    entry = gl.load(list_at + LIST_HEADER, mask=blocks > 0, other=0)
    words = _words_of(entry, bits, low, tile, call, S_LAYOUT, X)
    for i in range(0, blocks):
        block, rank = block_and_rank(entry)
        entry = gl.load(list_at + LIST_HEADER + i + 1, mask=i + 1 < blocks, other=0)
        listed = Listed(rank == 0, words, bits, entry)
        products, dk, dv, words = _step(
            HALF, products, dk, dv, step, block, listed, step + 1 < past, place,
            head_sums + block.to(gl.int64) * (X.rows * X.dim), low, tile, buffers, ds_s, turns, call, True, X,
        )  # fmt: skip
        step += 1
    return products, dk, dv, step


@gluon.jit
def _no_gradients(X: gl.constexpr):
    """dK or dV of a consumer's keys before the first step, in one or two pieces."""
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d0, 16])
    none = gl.zeros([64, X.d0], gl.float32, layout0)
    if X.d1 > 0:
        layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d1, 16])
        return none, gl.zeros([64, X.d1], gl.float32, layout1)
    else:
        return (none,)


@gluon.jit
def _keep(own_k, own_v, dk, dv, tile, call, X: gl.constexpr):
    """A piece of the gradients of a consumer's keys, to where these were."""
    dk *= call.scale
    if X.packed:
        dk += tile.poison.to(gl.float32, bitcast=True)
        dv += tile.poison.to(gl.float32, bitcast=True)
    own_v.store(dv.to(own_v.dtype))
    own_k.store(dk.to(own_k.dtype))


@gluon.jit
def _store_gradients(desc, desc1, buffer, buffer1, place, tile, X: gl.constexpr):
    """dK or dV of a tile, in one or two pieces."""
    row = tile.number * X.keys
    store_rows(desc, tile.batch, tile.head, tile.first_key, tile.keys, row, 0, buffer.index(place), X.packed)
    if X.d1 > 0:
        store_rows(desc1, tile.batch, tile.head, tile.first_key, tile.keys, row, X.d0, buffer1.index(place), X.packed)


@gluon.jit
def _consume(HALF: gl.constexpr, outputs, buffers, ds_s, mailbox, turns, call, X: gl.constexpr):
    """A consumer warpgroup: dK and dV of its half of one tile after the other."""
    BM: gl.constexpr = X.rows
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        place = count % X.kv_stages
        low = tile.number * X.keys + HALF * 64
        own_k0, own_k1 = _own(buffers.k, buffers.k1, place, HALF, X)
        own_v0, own_v1 = _own(buffers.v, buffers.v1, place, HALF, X)
        dv, dk = _no_gradients(X), _no_gradients(X)
        wait_full(buffers.kv_full, count, X.kv_stages)
        past = step + (tile.end - tile.begin) * call.group
        if X.masked:
            past = step + tile.end
        members = 1  # as a constant, it leaves no loop behind
        if X.grouped:
            members = call.group
        if step < past:
            wait_full(buffers.q_full, step, X.stages)
            q0, q1 = _rows_of(buffers.q, buffers.q1, step % X.stages, X)
            s_started = _issue_inner(own_k0, own_k1, q0, q1, no_scores, X)
            products = warpgroup_mma_wait(0, [s_started])
            # The gradients of the tile before have left by now.
            wait_for_stores(0)
            if X.kv_stages == 2:
                mbarrier.arrive(buffers.kv_empty.index((count + 1) % X.kv_stages), pred=count > 0)
            for member in range(0, members):
                head_sums = (
                    call.sums
                    + ((tile.head * call.group + member).to(gl.int64) * call.all_blocks + tile.first_block)
                    * (BM * X.dim)
                    + HALF * (BM * X.dim // 2)
                )
                # The blocks that need a mask lie at both ends; in a triangle that is walked upwards, at the first.
                masked_begin, masked_end = tile.whole_end, tile.end
                if X.upwards:
                    masked_begin, masked_end = tile.begin, tile.whole_begin
                if X.masked:
                    list_at, blocks = list_of(tile, member, call)
                    bits = bits_of(call.mask, tile.batch, tile.head * call.group + member)
                    products, dk, dv, step = _walk_list(
                        HALF, products, dk, dv, step, list_at, bits, blocks, past, place, head_sums, low, tile, buffers,
                        ds_s, turns, call, X,
                    )  # fmt: skip
                elif X.has_left or X.upwards:
                    products, dk, dv, step = _walk(
                        HALF, products, dk, dv, step, masked_begin, masked_end, past, place, head_sums, low, tile, buffers,
                        ds_s, turns, call, True, X,
                    )  # fmt: skip
                if not X.masked:
                    products, dk, dv, step = _walk(
                        HALF, products, dk, dv, step, tile.whole_begin, tile.whole_end, past, place, head_sums, low, tile,
                        buffers, ds_s, turns, call, False, X,
                    )  # fmt: skip
                if not X.upwards and not X.masked:
                    products, dk, dv, step = _walk(
                        HALF, products, dk, dv, step, tile.begin, tile.whole_begin, past, place, head_sums, low, tile,
                        buffers, ds_s, turns, call, True, X,
                    )  # fmt: skip
        else:
            wait_for_stores(0)
            if X.kv_stages == 2:
                mbarrier.arrive(buffers.kv_empty.index((count + 1) % X.kv_stages), pred=count > 0)
        # K is read by both consumers, for dQ: its place is free for dK when both are here.
        wait_for_consumers(256)
        _keep(own_k0, own_v0, dk[0], dv[0], tile, call, X)
        if X.d1 > 0:
            _keep(own_k1, own_v1, dk[1], dv[1], tile, call, X)
        fence_async_shared()
        wait_for_consumers(256)
        if HALF == 0:
            _store_gradients(outputs.dv, outputs.dv1, buffers.v, buffers.v1, place, tile, X)
        else:
            _store_gradients(outputs.dk, outputs.dk1, buffers.k, buffers.k1, place, tile, X)
        if X.kv_stages == 1:
            wait_for_stores(0)
            mbarrier.arrive(buffers.kv_empty.index(0))
        count += 1
        tile = next_tile(mailbox, count)
    wait_for_stores(0)


@gluon.jit(do_not_specialize=NO_CONSTANTS, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, bias_desc, q1_desc, k1_desc, v1_desc, do1_desc, dk1_desc,
    dv1_desc, sums, turns, ticket, records, bits, lists, blind, stats, tiles, batch_heads, heads_together, rows, keys,
    row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap, bits_batch, bits_head, bits_block,
    bits_row, lists_batch, lists_head, lists_tile, seen_at, bias_batch, bias_head, bias_row, bias_key, VARIANT: gl.constexpr,
):  # fmt: skip
    """A persistent program. The parameters are those of `Inputs` and `Call`, the gradients, and a `Variant`."""
    X: gl.constexpr = constants(VARIANT)
    gl.static_assert(X.d0 == X.e0 and X.d1 == X.e1)
    gl.static_assert(X.d1 == 0 or (X.rows == 64 and X.d0 == 64 and X.dim == 128 and not X.masked and X.bias_rows == 0))
    inputs = Inputs(
        q_desc, k_desc, v_desc, do_desc, stats_desc, bias_desc, q1_desc, k1_desc, v1_desc, do1_desc
    )  # fmt: skip
    outputs = Outputs(dk_desc, dv_desc, dk1_desc, dv1_desc)
    bias_place, bias_s = None, None
    if X.bias_rows > 0:
        bias_place = BiasPlace(bias_batch, bias_head, bias_row, bias_key)
        bias_s = gl.allocate_shared_memory(bias_desc.dtype, [X.stages] + bias_desc.block_shape, bias_desc.layout)
    mask = mask_of(
        bits, lists, (bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at), X
    )
    call = Call(
        sums, turns, ticket, records, tiles, batch_heads, heads_together, rows, keys, row_blocks, all_blocks, left, right,
        key_heads, group, scale, score_scale, softcap, mask, bias_place, blind, stats,
    )  # fmt: skip
    tiles_s = new_tiles(inputs, X)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [2, X.keys, X.rows], gl.NVMMASharedLayout(128, 16, 2))
    mailbox = new_mailbox(FIELDS, 4 if X.deterministic else 2)  # consumers and turns
    kv_full, kv_empty = new_barriers(X.kv_stages, 1), new_barriers(X.kv_stages, 2)
    full, empty = new_barriers(X.stages, 2), new_barriers(X.stages, 2)  # q and grad_out; consumers
    cut = None
    if X.masked or X.bias_rows > 0:
        cut = new_barriers(1, 1)
    second = (None, None, None, None)
    if X.d1 > 0:
        second = new_second_tiles(inputs, X)
    buffers = Buffers(*tiles_s, kv_full, kv_empty, full, empty, full, empty, cut, bias_s, *second)  # type: ignore[call-arg]
    turn_barriers = Turns(new_barriers(X.stages, 1), new_barriers(X.stages, 1))
    fence_async_shared()
    # Argument tuples have to stand inside the call.
    if X.deterministic:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), outputs, buffers, ds_s, mailbox, turn_barriers, call, X)),
            (_consume, (gl.constexpr(1), outputs, buffers, ds_s, mailbox, turn_barriers, call, X)),
            (produce, (inputs, buffers, mailbox, call, X)),
            (await_turns, (mailbox, turn_barriers, call, X)),
            (pass_turns, (mailbox, empty, turn_barriers, call, X)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), outputs, buffers, ds_s, mailbox, turn_barriers, call, X)),
            (_consume, (gl.constexpr(1), outputs, buffers, ds_s, mailbox, turn_barriers, call, X)),
            (produce, (inputs, buffers, mailbox, call, X)),
        ], [4, 1], [240, 24])  # fmt: skip
