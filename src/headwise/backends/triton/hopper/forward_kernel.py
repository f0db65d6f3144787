"""Attention forward for Hopper (sm_90): one persistent kernel in Triton Gluon. docs/hopper-attention.md tells how it works.

A program has one warp that loads and two to four warpgroups that compute. The loading warp copies tiles of q, k and v into
shared memory through the tensor memory accelerator (TMA), as far ahead as there is room. Each computing warpgroup owns 64
queries; it issues q·kᵀ of one block of keys before it adds up weights·v of the block before, and takes the exponentials
while the tensor cores work on the other's products.
"""

# ruff: noqa: RUF005, RUF059  (Gluon has no starred lists; kernels unpack the tuples they are given)

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from headwise.backends.triton.hopper.loading import produce
from headwise.backends.triton.hopper.schedule import FIELDS, MAIL, ROWS, block_range, constants, from_first_lane, read
from headwise.backends.triton.hopper.sequence_rows import store_rows

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Which blocks of a loop over keys are masked.
NOWHERE, EVERYWHERE, AT_THE_EDGES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


# Turns: the computing warpgroups issue their products one after the other, so that one's exponentials meet the other's
# products. Turn t is the named barrier 8 + t of the one who waits for it and the one before it.


@gluon.jit
def _barrier(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(
        "{ " + INSTRUCTION + ", 256; mov.u32 $0, $1; }",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _take_turn(C: gl.constexpr):
    if C == 0:
        _barrier("bar.sync 8")
    elif C == 1:
        _barrier("bar.sync 9")
    elif C == 2:
        _barrier("bar.sync 10")
    else:
        _barrier("bar.sync 11")


@gluon.jit
def _pass_turn(C: gl.constexpr, X: gl.constexpr):
    if X.consumers - 1 == C:
        _barrier("bar.arrive 8")
    elif C == 0:
        _barrier("bar.arrive 9")
    elif C == 1:
        _barrier("bar.arrive 10")
    else:
        _barrier("bar.arrive 11")


@gluon.jit
def _skip(
    count, blocks, k_full, k_empty, v_full, v_empty, C: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Give back ``count`` blocks that only the other warpgroups' queries see."""
    for _ in range(count):
        _take_turn(C)
        _pass_turn(C, X)
        at = blocks % X.k_stages
        mbarrier.wait(k_full.index(at), (blocks // X.k_stages) & 1)
        mbarrier.arrive(k_empty.index(at))
        at = blocks % X.v_stages
        mbarrier.wait(v_full.index(at), (blocks // X.v_stages) & 1)
        mbarrier.arrive(v_empty.index(at))
        blocks += 1
    return blocks


@gluon.jit
def _products(q, k, q1, k1, zeros, X: gl.constexpr):
    """Issue q·kᵀ over one or two pieces of the head dim."""
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if X.d1 > 0:
        s = warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _capped(s, inner, X: gl.constexpr):
    """tanh of the products times ``inner``: 1 − 2/(1 + e²ˣ), whose error is small against 1, as a logit's has to be."""
    if X.has_cap:
        return 1.0 - 2.0 / (1.0 + gl.exp2(s * inner))
    else:
        return s


@gluon.jit
def _hidden(
    s, block, row, offset, keys, left, right,
    S: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """−∞ where a query does not see a key."""
    key = block * X.keys + gl.arange(0, X.keys, gl.SliceLayout(0, S))[None, :]
    position = row + offset + gl.arange(0, ROWS, gl.SliceLayout(1, S))[:, None]
    if X.has_right:
        seen = key <= gl.minimum(position + right, keys - 1)
    else:
        seen = key < keys
    if X.has_left:
        seen = seen & (key >= position - left)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _lane_sums(p, KEYS: gl.constexpr):
    """Sums over what a lane holds of a row; the four lanes of a row meet once, at the end."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _visit(
    block, count, whole, whole_past, highest, total, acc0, acc1, weights, blocks, q_at, zeros, row, offset, keys, left,
    right, unit, inner, shared, barriers, MASK: gl.constexpr,
    C: gl.constexpr, S: gl.constexpr, O0: gl.constexpr, O1: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """The online softmax over the ``count`` blocks below ``block``; ``weights`` are those of ``block``.

    MASK: for none of them (NOWHERE), for all, or for those outside [whole, whole_past) (AT_THE_EDGES).
    """
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    q = q0_s.index(q_at).reshape([ROWS, X.d0])
    q1 = q
    if X.d1 > 0:
        q1 = q1_s.index(q_at).reshape([ROWS, X.d1])
    for i in range(count):
        v_at = blocks % X.v_stages
        v_phase = (blocks // X.v_stages) & 1
        blocks += 1
        at = blocks % X.k_stages
        mbarrier.wait(k_full.index(at), (blocks // X.k_stages) & 1)
        _take_turn(C)
        k = k0_s.index(at).reshape([X.keys, X.d0])
        k1 = k
        if X.d1 > 0:
            k1 = k1_s.index(at).reshape([X.keys, X.d1])
        s_coming = _products(q, k, q1, k1, zeros, X)
        mbarrier.wait(v_full.index(v_at), v_phase)
        acc0_coming = warpgroup_mma(weights, v0_s.index(v_at).reshape([X.keys, X.d0]), acc0, is_async=True)
        if X.d1 > 0:
            weights1 = gl.convert_layout(weights, gl.DotOperandLayout(0, O1, 2))
            acc1_coming = warpgroup_mma(weights1, v1_s.index(v_at).reshape([X.keys, X.d1]), acc1, is_async=True)
        _pass_turn(C, X)
        if X.d1 > 0:
            s = warpgroup_mma_wait(2, [s_coming])
        else:
            s = warpgroup_mma_wait(1, [s_coming])
        mbarrier.arrive(k_empty.index(at))
        s = _capped(s, inner, X)
        here = block - 1 - i
        if MASK == EVERYWHERE:
            s = _hidden(s, here, row, offset, keys, left, right, S, X)
        elif MASK == AT_THE_EDGES:
            edge = (here >= whole_past) | (here < whole)
            if edge:
                s = _hidden(s, here, row, offset, keys, left, right, S, X)
        higher = gl.maximum(highest, gl.max(s, 1))
        reference = higher * unit
        if MASK != NOWHERE:  # a row may have seen nothing so far
            reference = gl.where(higher == -float("inf"), 0.0, reference)
        shrink = gl.exp2(highest * unit - reference)
        p = gl.exp2(s * unit - reference[:, None])
        sums = _lane_sums(p, X.keys)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        highest = higher
        # Named in the wait so that the registers of the products under way are not given away before they are done.
        new_weights = gl.convert_layout(p.to(weights.dtype), gl.DotOperandLayout(0, O0, 2))
        if X.d1 > 0:
            acc0, acc1, weights, weights1, new_weights = warpgroup_mma_wait(
                0, [acc0_coming, acc1_coming, weights, weights1, new_weights]
            )
        else:
            acc0, weights, new_weights = warpgroup_mma_wait(0, [acc0_coming, weights, new_weights])
        mbarrier.arrive(v_empty.index(v_at))
        weights = new_weights
        acc0 = acc0 * gl.convert_layout(shrink, gl.SliceLayout(1, O0))[:, None]
        if X.d1 > 0:
            acc1 = acc1 * gl.convert_layout(shrink, gl.SliceLayout(1, O1))[:, None]
    return highest, total, acc0, acc1, weights, blocks


@gluon.jit
def _scaled(acc, factor, X: gl.constexpr):
    """The output of rows. Rows that see nothing have factor zero: their sums may hold NaN of values that others see."""
    scaled = acc * factor
    if X.cut:
        scaled = gl.where(factor == 0.0, 0.0, scaled)
    return scaled


@gluon.jit
def _store_tile(
    o0, o1, acc0, acc1, batch, head, start, rows, row, o0_s, o1_s, C: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """A tile of the output through shared memory; rows past the sequence and columns past the tensor are left out."""
    wait_for_stores(0)  # of the tile before
    thread_barrier()
    o0_s.index(C).reshape([ROWS, X.d0]).store(acc0.to(o0_s.dtype))
    if X.d1 > 0 and not X.one_o:
        o1_s.index(C).reshape([ROWS, X.d1]).store(acc1.to(o0_s.dtype))
    fence_async_shared()
    thread_barrier()
    store_rows(o0, batch, head, start, rows, row, 0, o0_s.index(C), X.packed)
    if X.d1 > 0:
        if X.one_o:
            wait_for_stores(0)
            thread_barrier()
            o0_s.index(C).reshape([ROWS, X.d1]).store(acc1.to(o0_s.dtype))
            fence_async_shared()
            thread_barrier()
            store_rows(o0, batch, head, start, rows, row, X.d0, o0_s.index(C), X.packed)
        else:
            store_rows(o1, batch, head, start, rows, row, X.d0, o1_s.index(C), X.packed)


@gluon.jit
def _ranges(tile_row, row, rows, keys, left, right, X: gl.constexpr):
    """(tile's lowest block, and past its last; own lowest, past; whole, whole_past) of a warpgroup's queries at ``row``.

    All of its queries see all keys of the blocks in [whole, whole_past); the last of its own is not counted among them.
    """
    offset = keys - rows
    tile_lowest, tile_past = block_range(tile_row, rows, ROWS * X.consumers, offset, keys, left, right, X)
    lowest, past = tile_lowest, tile_past
    if X.has_left or X.has_right:
        lowest, past = block_range(row, rows, ROWS, offset, keys, left, right, X)
        past = gl.minimum(gl.maximum(past, tile_lowest + 1), tile_past)
        lowest = gl.maximum(gl.minimum(lowest, past - 1), tile_lowest)
    if X.packed:  # without queries it visits one block, the first
        none = row >= rows
        lowest = gl.where(none, tile_past - 1, lowest)
        past = gl.where(none, tile_past, past)
    whole, whole_past = lowest, keys // X.keys
    if X.has_right:
        whole_past = gl.maximum(gl.minimum(row + offset + right + 1, keys), 0) // X.keys
    if X.has_left:
        whole = gl.cdiv(gl.maximum(gl.minimum(row + ROWS, rows) - 1 + offset - left, 0), X.keys)
    whole_past = gl.minimum(gl.maximum(whole_past, lowest), past - 1)
    whole = gl.minimum(gl.maximum(whole, lowest), whole_past)
    return tile_lowest, tile_past, lowest, past, whole, whole_past


@gluon.jit
def _skip_to_own(
    blocks, tile_row, rows, keys, left, right, k_full, k_empty, v_full, v_empty, C: gl.constexpr, X: gl.constexpr
):
    """Give back the first blocks of a tile, as far as only the queries of other warpgroups see them. No tile: row is -1."""
    _, tile_past, _, past, _, _ = _ranges(tile_row, tile_row + C * ROWS, rows, keys, left, right, X)
    skipped = gl.where(tile_row >= 0, tile_past - past, 0)
    return _skip(skipped, blocks, k_full, k_empty, v_full, v_empty, C, X)


@gluon.jit
def _first_products(tiles_before, blocks, more, zeros, shared, barriers, C: gl.constexpr, X: gl.constexpr):
    """Issue the first q·kᵀ of a tile; if there is no more, of what happens to lie there."""
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    at = C * X.q_stages + tiles_before % X.q_stages
    mbarrier.wait(q_full.index(at), (tiles_before // X.q_stages) & 1, pred=more)
    q = q0_s.index(at).reshape([ROWS, X.d0])
    q1 = q
    if X.d1 > 0:
        q1 = q1_s.index(at).reshape([ROWS, X.d1])
    at = blocks % X.k_stages
    mbarrier.wait(k_full.index(at), (blocks // X.k_stages) & 1, pred=more)
    k = k0_s.index(at).reshape([X.keys, X.d0])
    k1 = k
    if X.d1 > 0:
        k1 = k1_s.index(at).reshape([X.keys, X.d1])
    return _products(q, k, q1, k1, zeros, X)


@gluon.jit
def _consume(C: gl.constexpr, o0, o1, tensors, numbers, unit, inner, shared, barriers, X: gl.constexpr):
    lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k
    ) = numbers  # fmt: skip
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.keys, 16])
    O0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d0, 16])
    O1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.d1 if X.d1 > 0 else 16, 16])
    BANDED: gl.constexpr = X.has_left or X.has_right
    PV_FIRST: gl.constexpr = X.has_left or X.ahead == 0 or (X.has_right and X.ahead == 1)
    zeros = gl.zeros([ROWS, X.keys], gl.float32, S)
    done, blocks = 0, 0
    if X.consumers - 1 == C:
        _pass_turn(C, X)  # the first goes first
    tile_row, batch_head, keys, start, rows = read(mail, mail_full, mail_empty, 0, q_length, k_length, X)
    bad = keys < 0
    keys = gl.maximum(keys, 0)
    if BANDED:
        blocks = _skip_to_own(blocks, tile_row, rows, keys, left, right, k_full, k_empty, v_full, v_empty, C, X)
    s = warpgroup_mma_wait(0, [_first_products(0, blocks, tile_row >= 0, zeros, shared, barriers, C, X)])
    mbarrier.arrive(k_empty.index(blocks % X.k_stages), pred=tile_row >= 0)
    while tile_row >= 0:
        offset = keys - rows
        row = tile_row + C * ROWS
        tile_lowest, tile_past, lowest, past, whole, whole_past = _ranges(tile_row, row, rows, keys, left, right, X)
        block = past - 1
        q_at = C * X.q_stages + done % X.q_stages
        s = _capped(s, inner, X)
        if BANDED or X.cut:
            s = _hidden(s, block, row, offset, keys, left, right, S, X)
        else:
            if past * X.keys > keys:
                s = _hidden(s, block, row, offset, keys, left, right, S, X)
        highest = gl.max(s, 1)
        reference = highest * unit
        if BANDED or X.cut:
            reference = gl.where(highest == -float("inf"), 0.0, reference)
        p = gl.exp2(s * unit - reference[:, None])
        total = _lane_sums(p, X.keys)
        weights = gl.convert_layout(p.to(q0_s.dtype), gl.DotOperandLayout(0, O0, 2))
        acc0 = gl.zeros([ROWS, X.d0], gl.float32, O0)
        acc1 = acc0
        if X.d1 > 0:
            acc1 = gl.zeros([ROWS, X.d1], gl.float32, O1)

        if X.has_right and not X.has_left:
            # The masked blocks come first, if there are any, in a loop of their own: a branch in the one that runs for most
            # of the time costs up to a tenth. To ptxas 12.8 the two must not seem to share the tile of queries: it makes the
            # descriptor in front of the first and uses it in the second, also where the first is not entered.
            highest, total, acc0, acc1, weights, blocks = _visit(
                block, block - whole_past, whole, whole_past, highest, total, acc0, acc1, weights, blocks, q_at, zeros, row,
                offset, keys, left, right, unit, inner, shared, barriers, EVERYWHERE, C, S, O0, O1, X,
            )  # fmt: skip
            highest, total, acc0, acc1, weights, blocks = _visit(
                whole_past, whole_past - lowest, whole, whole_past, highest, total, acc0, acc1, weights, blocks,
                from_first_lane(q_at), zeros, row, offset, keys, left, right, unit, inner, shared, barriers, NOWHERE,
                C, S, O0, O1, X,
            )  # fmt: skip
        else:
            highest, total, acc0, acc1, weights, blocks = _visit(
                block, block - lowest, whole, whole_past, highest, total, acc0, acc1, weights, blocks, q_at, zeros, row,
                offset, keys, left, right, unit, inner, shared, barriers, AT_THE_EDGES if BANDED else NOWHERE,
                C, S, O0, O1, X,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(q_at))

        # The last weights·v. It overlaps with the first q·kᵀ of the next tile, but where a window lets this warpgroup skip
        # blocks in between: the ring may have no room for those until these values are given back.
        v_at = blocks % X.v_stages
        mbarrier.wait(v_full.index(v_at), (blocks // X.v_stages) & 1)
        acc0_coming = warpgroup_mma(weights, v0_s.index(v_at).reshape([X.keys, X.d0]), acc0, is_async=True)
        if X.d1 > 0:
            weights1 = gl.convert_layout(weights, gl.DotOperandLayout(0, O1, 2))
            acc1_coming = warpgroup_mma(weights1, v1_s.index(v_at).reshape([X.keys, X.d1]), acc1, is_async=True)
        blocks += 1
        done += 1
        next_tile_row, next_batch_head, next_keys, next_start, next_rows = read(
            mail,
            mail_full,
            mail_empty,
            done,
            q_length,
            k_length,
            X,
        )
        next_bad = next_keys < 0
        next_keys = gl.maximum(next_keys, 0)
        more = next_tile_row >= 0
        if PV_FIRST:
            if X.d1 > 0:
                acc0, acc1, weights, weights1 = warpgroup_mma_wait(0, [acc0_coming, acc1_coming, weights, weights1])
            else:
                acc0, weights = warpgroup_mma_wait(0, [acc0_coming, weights])
            mbarrier.arrive(v_empty.index(v_at))
        elif X.packed:  # for the same reason; what is added up for no query may be wrong
            mbarrier.arrive(v_empty.index(v_at), pred=row >= rows)
        if X.has_left or X.packed:
            blocks = _skip(lowest - tile_lowest, blocks, k_full, k_empty, v_full, v_empty, C, X)
        if X.ahead > 0:
            if BANDED:
                blocks = _skip_to_own(
                    blocks, next_tile_row, next_rows, next_keys, left, right, k_full, k_empty, v_full, v_empty, C, X
                )
            s_coming = _first_products(done, blocks, more, zeros, shared, barriers, C, X)
            if not PV_FIRST:
                if X.d1 > 0:
                    acc0, acc1, weights, weights1 = warpgroup_mma_wait(2, [acc0_coming, acc1_coming, weights, weights1])
                else:
                    acc0, weights = warpgroup_mma_wait(1, [acc0_coming, weights])
                if X.packed:
                    mbarrier.arrive(v_empty.index(v_at), pred=row < rows)
                else:
                    mbarrier.arrive(v_empty.index(v_at))

        sums = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S))
        top = highest * unit  # of the logits, in base 2
        empty = sums == 0.0
        factor = 1.0 / gl.where(empty, 1.0, sums)
        if sink is not None:
            at_sink = gl.load(sink + batch_head % heads).to(gl.float32) * LOG2E
            higher = gl.maximum(top, at_sink)
            shrink = gl.where(empty, 0.0, gl.exp2(top - higher))
            sums = sums * shrink + gl.exp2(at_sink - higher)
            top = higher
            factor = shrink / sums
        row_lse = gl.where(empty, -float("inf"), (top + gl.log2(sums)) * LN2)
        if X.cut:
            row_lse = gl.where(bad, float("nan"), row_lse)
            factor = gl.where(bad, float("nan"), gl.where(empty, 0.0, factor))
        lane = row + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        gl.store(lse + batch_head.to(gl.int64) * q_length + start + lane, row_lse, mask=lane < rows)

        batch = batch_head // heads
        head = batch_head % heads
        acc0 = _scaled(acc0, gl.convert_layout(factor, gl.SliceLayout(1, O0))[:, None], X)
        if X.d1 > 0:
            acc1 = _scaled(acc1, gl.convert_layout(factor, gl.SliceLayout(1, O1))[:, None], X)
        if X.packed:
            if row < rows:
                _store_tile(o0, o1, acc0, acc1, batch, head, start, rows, row, o0_s, o1_s, C, X)
        else:
            _store_tile(o0, o1, acc0, acc1, batch, head, start, rows, row, o0_s, o1_s, C, X)
        if X.ahead == 0:
            if BANDED:
                blocks = _skip_to_own(
                    blocks, next_tile_row, next_rows, next_keys, left, right, k_full, k_empty, v_full, v_empty, C, X
                )
            s_coming = _first_products(done, blocks, more, zeros, shared, barriers, C, X)
        s = warpgroup_mma_wait(0, [s_coming])
        mbarrier.arrive(k_empty.index(blocks % X.k_stages), pred=more)
        tile_row, batch_head, keys, start, rows, bad = (
            next_tile_row, next_batch_head, next_keys, next_start, next_rows, next_bad
        )  # fmt: skip
    wait_for_stores(0)
    if C == 0:
        _take_turn(C)


@gluon.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "tiles", "works", "heads_at_once", "left", "right", "sequences",
        "longest_q", "longest_k",
    ],
    do_not_specialize_on_alignment=["lse", "sink", "lengths", "cu_q", "cu_k", "counter"],
)  # fmt: skip
def forward(
    q0, q1, k0, k1, v0, v1, o0, o1, lse, sink, lengths, cu_q, cu_k, counter,
    q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k,
    unit, inner,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CAP: gl.constexpr, PACKED: gl.constexpr, CUT: gl.constexpr,
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, ONE_O: gl.constexpr,
    AHEAD: gl.constexpr, KEYS_FIRST: gl.constexpr, SEARCH: gl.constexpr,
):  # fmt: skip
    """A persistent program. ``unit`` times a product is a logit in base 2; with a cap, ``unit`` times its tanh is."""
    X: gl.constexpr = constants(
        HAS_LEFT,
        HAS_RIGHT,
        HAS_CAP,
        PACKED,
        CUT,
        CONSUMERS,
        KEYS,
        D0,
        D1,
        K_STAGES,
        V_STAGES,
        Q_STAGES,
        ONE_O,
        AHEAD,
        KEYS_FIRST,
        SEARCH,
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q0_s = gl.allocate_shared_memory(q0.dtype, [X.consumers * X.q_stages] + q0.block_shape, q0.layout)
    k0_s = gl.allocate_shared_memory(q0.dtype, [X.k_stages] + k0.block_shape, k0.layout)
    v0_s = gl.allocate_shared_memory(q0.dtype, [X.v_stages] + v0.block_shape, v0.layout)
    o0_s = gl.allocate_shared_memory(q0.dtype, [X.consumers] + o0.block_shape, o0.layout)
    q1_s, k1_s, v1_s, o1_s = q0_s, k0_s, v0_s, o0_s
    if X.d1 > 0:
        q1_s = gl.allocate_shared_memory(q0.dtype, [X.consumers * X.q_stages] + q1.block_shape, q1.layout)
        k1_s = gl.allocate_shared_memory(q0.dtype, [X.k_stages] + k1.block_shape, k1.layout)
        v1_s = gl.allocate_shared_memory(q0.dtype, [X.v_stages] + v1.block_shape, v1.layout)
        if not X.one_o:
            o1_s = gl.allocate_shared_memory(q0.dtype, [X.consumers] + o1.block_shape, o1.layout)
    mail = gl.allocate_shared_memory(gl.int32, [MAIL * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [X.consumers * X.q_stages, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [X.consumers * X.q_stages, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [X.k_stages, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [X.k_stages, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [X.v_stages, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [X.v_stages, 1], BARRIER)
    mail_full = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    mail_empty = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    cut_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(cut_full.index(0), 1)
    for i in gl.static_range(X.consumers * X.q_stages):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), X.consumers)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), X.consumers)
    for i in gl.static_range(MAIL):
        mbarrier.init(mail_full.index(i), 1)
        mbarrier.init(mail_empty.index(i), X.consumers)
    fence_async_shared()
    shared = (q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full)
    descriptors = (q0, q1, k0, k1, v0, v1)
    tensors = (lse, sink, lengths, cu_q, cu_k, counter)
    numbers = (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k
    )  # fmt: skip
    # Argument tuples have to stand inside the call.
    if X.consumers == 2:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(1), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (produce, (descriptors, tensors, numbers, shared, barriers, X)),
        ], [4, 1], [232, 40] if X.cut else [240, 24])  # fmt: skip
    elif X.consumers == 3:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(1), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(2), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (produce, (descriptors, tensors, numbers, shared, barriers, X)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(1), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(2), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (_consume, (gl.constexpr(3), o0, o1, tensors, numbers, unit, inner, shared, barriers, X)),
            (produce, (descriptors, tensors, numbers, shared, barriers, X)),
        ], [4, 4, 4, 1], [112, 112, 112, 32])  # fmt: skip
