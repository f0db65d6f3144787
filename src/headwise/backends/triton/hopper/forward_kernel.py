"""Attention forward for Hopper (sm_90): one persistent kernel in Triton Gluon. docs/hopper-attention.md tells how it works.

A program has a producer warp and two to four consumer warpgroups. The producer copies tiles of q, k and v into shared memory
through the tensor memory accelerator (TMA), as far ahead as there is room. Each consumer owns 64 queries; it issues q·kᵀ of
one block of keys before it adds up weights·v of the block before, and takes the exponentials while the tensor cores work on
the products of another consumer.

In the signatures, C is the number of a consumer, X are the constants of a `Variant`, S is the register layout of scores, and
O0 and O1 are those of the two pieces of the output.
"""

# ruff: noqa: RUF005  (Gluon has no starred lists)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.forward_producer import Inputs, Ring, Shared, produce
from headwise.backends.triton.hopper.forward_schedule import (
    BAD_LENGTHS,
    FIELDS,
    NO_SEQUENCE,
    ROWS,
    Call,
    block_range,
    from_first_lane,
    read_tile,
)
from headwise.backends.triton.hopper.forward_scores import (
    AT_THE_EDGES,
    AT_THE_END,
    EVERYWHERE,
    LOG2E,
    NOWHERE,
    biased,
    capped,
    first_words,
    logit_scale_of,
    shown,
    words_at,
)
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
from headwise.backends.triton.hopper.mailbox import new_barriers, new_mailbox, wait_full
from headwise.backends.triton.hopper.mask_words import LIST_HEADER, bits_of, lists_of, mask_of
from headwise.backends.triton.hopper.sequence_rows import store_rows
from headwise.backends.triton.hopper.variants import constants

LN2 = gl.constexpr(0.6931471805599453)


class Rows(NamedTuple):
    """A consumer's 64 queries so far: online softmax statistics, output, and the weights that are not added up yet."""

    highest: Any  # product, of each row
    total: Any  # of the exponentials, for each lane of a row by itself
    acc0: Any  # the output, in one or two pieces of the head dim
    acc1: Any
    weights: Any


class Span(NamedTuple):
    """The blocks of keys that a tile and a consumer's queries in it visit, from the last one downward.

    All of the consumer's queries see all keys of the blocks in [whole, whole_past); its last block is not counted there.
    """

    row: Any  # the consumer's first query
    offset: Any  # from a query to its position among the keys
    keys: Any
    tile_lowest: Any
    tile_past: Any
    lowest: Any
    past: Any
    whole: Any
    whole_past: Any
    # Of a mask: its blocks are entries of a list, counted from the last one; the first ``parts`` of them need the bits.
    parts: Any
    list_at: Any
    bits: Any
    rows: Any  # queries of the sequence


@gluon.jit
def _new_ring(x0, x1, STAGES: gl.constexpr, READERS: gl.constexpr):
    """With its barriers. Two arrays by turns: after each of one and the same array, all threads wait for each other."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), READERS)
    return Ring(x0, x1, full, empty)


@gluon.jit
def _span(tile, call, C: gl.constexpr, X: gl.constexpr):
    row, rows, keys, offset = tile.row + C * ROWS, tile.rows, tile.keys, tile.keys - tile.rows
    tile_lowest, tile_past = block_range(tile.row, rows, ROWS * X.consumers, offset, keys, call, X)
    if X.masked:
        tile_lowest, tile_past = 0, tile.blocks
    lowest, past = tile_lowest, tile_past
    if (X.has_left or X.has_right) and not X.masked:
        lowest, past = block_range(row, rows, ROWS, offset, keys, call, X)
        past = gl.minimum(gl.maximum(past, tile_lowest + 1), tile_past)
        lowest = gl.maximum(gl.minimum(lowest, past - 1), tile_lowest)
    if X.packed:  # without queries it visits one block, the first
        none = row >= rows
        lowest = gl.where(none, tile_past - 1, lowest)
        past = gl.where(none, tile_past, past)
    whole, whole_past = lowest, keys // X.keys
    if X.has_right:
        whole_past = gl.maximum(gl.minimum(row + offset + call.right + 1, keys), 0) // X.keys
    if X.has_left:
        whole = gl.cdiv(gl.maximum(gl.minimum(row + ROWS, rows) - 1 + offset - call.left, 0), X.keys)
    if X.masked:
        whole, whole_past = 0, tile.blocks - tile.parts
    whole_past = gl.minimum(gl.maximum(whole_past, lowest), past - 1)
    whole = gl.minimum(gl.maximum(whole, lowest), whole_past)
    if X.masked:
        batch, head = tile.batch_head // call.heads, tile.batch_head % call.heads
        list_at = lists_of(call.mask, batch, head) + tile.row // (ROWS * X.consumers) * call.mask.lists_tile
        bits = bits_of(call.mask, batch, head)
        return Span(
            row, offset, keys, tile_lowest, tile_past, lowest, past, whole, whole_past, tile.parts, list_at, bits, rows
        )
    else:
        return Span(row, offset, keys, tile_lowest, tile_past, lowest, past, whole, whole_past, 0, 0, 0, 0)


# Turns: consumers issue their products one after the other, so that one's exponentials meet another's products. Turn t is
# the named barrier 8 + t of the one who waits for it and the one before it.


@gluon.jit
def _barrier(INSTRUCTION: gl.constexpr, TURN: gl.constexpr):
    gl.inline_asm_elementwise(
        f"{{ {INSTRUCTION} {8 + TURN}, 256; mov.u32 $0, $1; }}",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _take_turn(C: gl.constexpr):
    _barrier("bar.sync", C)


@gluon.jit
def _pass_turn(C: gl.constexpr, X: gl.constexpr):
    _barrier("bar.arrive", (C + 1) % X.consumers)


@gluon.jit
def _skip(count, blocks, shared, C: gl.constexpr, X: gl.constexpr):
    """Give back ``count`` blocks that only the queries of other consumers see."""
    for _ in range(count):
        _take_turn(C)
        _pass_turn(C, X)
        wait_full(shared.k.full, blocks, X.k_stages)
        mbarrier.arrive(shared.k.empty.index(blocks % X.k_stages))
        wait_full(shared.v.full, blocks, X.v_stages)
        mbarrier.arrive(shared.v.empty.index(blocks % X.v_stages))
        if X.bias_rows > 0:
            wait_full(shared.bias.full, blocks, X.b_stages)
            mbarrier.arrive(shared.bias.empty.index(blocks % X.b_stages))
        blocks += 1
    return blocks


@gluon.jit
def _skip_to_own(blocks, tile, call, shared, C: gl.constexpr, X: gl.constexpr):
    """Give back the first blocks of a tile, as far as only other consumers see them. No tile: its row is -1."""
    span = _span(tile, call, C, X)
    return _skip(gl.where(tile.row >= 0, span.tile_past - span.past, 0), blocks, shared, C, X)


@gluon.jit
def _queries(shared, at, X: gl.constexpr):
    """Both pieces of the tile of queries at ``at``."""
    q0 = shared.q.x0.index(at).reshape([ROWS, X.d0])
    q1 = q0
    if X.d1 > 0:
        q1 = shared.q.x1.index(at).reshape([ROWS, X.d1])
    return q0, q1


@gluon.jit
def _issue_scores(queries, shared, blocks, zeros, X: gl.constexpr):
    """Issue q·kᵀ of block ``blocks``, over one or two pieces of the head dim."""
    q0, q1 = queries
    at = blocks % X.k_stages
    k = shared.k.x0.index(at).reshape([X.keys, X.d0])
    s = warpgroup_mma(q0, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if X.d1 > 0:
        k = shared.k.x1.index(at).reshape([X.keys, X.d1])
        s = warpgroup_mma(q1, k.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _issue_first_scores(done, blocks, more, zeros, shared, C: gl.constexpr, X: gl.constexpr):
    """Issue the first q·kᵀ of a tile; if there is no more, of what happens to lie there."""
    at = C * X.q_stages + done % X.q_stages
    mbarrier.wait(shared.q.full.index(at), (done // X.q_stages) & 1, pred=more)
    queries = _queries(shared, at, X)
    wait_full(shared.k.full, blocks, X.k_stages, more)
    return _issue_scores(queries, shared, blocks, zeros, X)


@gluon.jit
def _issue_output(rows, shared, at, O1: gl.constexpr, X: gl.constexpr):
    """Issue output += weights · v of the block of values at ``at``. Returns both pieces, and the weights of each."""
    acc0 = warpgroup_mma(rows.weights, shared.v.x0.index(at).reshape([X.keys, X.e0]), rows.acc0, is_async=True)
    acc1, weights1 = rows.acc1, rows.weights
    if X.e1 > 0:
        weights1 = gl.convert_layout(rows.weights, gl.DotOperandLayout(0, O1, 2))
        acc1 = warpgroup_mma(weights1, shared.v.x1.index(at).reshape([X.keys, X.e1]), rows.acc1, is_async=True)
    return acc0, acc1, weights1


@gluon.jit
def _lane_sums(p, KEYS: gl.constexpr):
    """Sums over what a lane holds of a row; the four lanes of a row meet once, at the end."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _first_block(
    s, block, words, blocks, span, call, shared, C: gl.constexpr, S: gl.constexpr, O0: gl.constexpr, O1: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """The `Rows` after their first block, whose products are ``s``; ``words``: of a mask."""
    MASK: gl.constexpr = EVERYWHERE if X.masked or X.has_left or X.has_right or X.cut else AT_THE_END
    if X.has_cap:
        s = shown(s, words, block, span, call, MASK, S, X)
    s = biased(capped(s, call, X), shared, blocks, call, C, S, X)
    scale = logit_scale_of(call, X)
    s = shown(s, words, block, span, call, MASK, S, X)
    highest = gl.max(s, 1)
    reference = highest * scale
    if X.has_left or X.has_right or X.cut or X.masked or X.bias_rows > 0:
        reference = gl.where(highest == -float("inf"), 0.0, reference)
    p = gl.exp2(s * scale - reference[:, None])
    total = _lane_sums(p, X.keys)
    weights = gl.convert_layout(p.to(shared.q.x0.dtype), gl.DotOperandLayout(0, O0, 2))
    acc0 = gl.zeros([ROWS, X.e0], gl.float32, O0)
    acc1 = acc0
    if X.e1 > 0:
        acc1 = gl.zeros([ROWS, X.e1], gl.float32, O1)
    return Rows(highest, total, acc0, acc1, weights)


@gluon.jit
def _visit(
    rows, block, count, blocks, q_at, zeros, span, call, shared, MASK: gl.constexpr,
    C: gl.constexpr, S: gl.constexpr, O0: gl.constexpr, O1: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """The online softmax over the ``count`` blocks below ``block``; ``rows.weights`` are those of ``block``.

    MASK: for none of them (NOWHERE), for all, or for those outside [whole, whole_past) (AT_THE_EDGES).
    """
    highest, total, acc0, acc1, weights = rows
    queries = _queries(shared, q_at, X)
    LISTED: gl.constexpr = X.masked and MASK == EVERYWHERE
    if LISTED:  # the words of a block, and the entry of the one after it, are loaded a block ahead
        first = span.past - block
        entry = gl.load(span.list_at + LIST_HEADER + first, mask=count > 0, other=0)
        coming_words = words_at(entry, count > 0, span, call, S, X)
        coming_entry = gl.load(span.list_at + LIST_HEADER + first + 1, mask=count > 1, other=0)
    for i in range(count):
        if LISTED:
            words, here = coming_words, entry >> 1
            entry = coming_entry
            coming_words = words_at(entry, i + 1 < count, span, call, S, X)
            coming_entry = gl.load(span.list_at + LIST_HEADER + first + i + 2, mask=i + 2 < count, other=0)
        else:
            words, here = 0, block - 1 - i
        v_at = blocks % X.v_stages
        v_phase = (blocks // X.v_stages) & 1
        blocks += 1
        wait_full(shared.k.full, blocks, X.k_stages)
        _take_turn(C)
        s_coming = _issue_scores(queries, shared, blocks, zeros, X)
        mbarrier.wait(shared.v.full.index(v_at), v_phase)
        acc0_coming, acc1_coming, weights1 = _issue_output(
            Rows(highest, total, acc0, acc1, weights), shared, v_at, O1, X
        )
        _pass_turn(C, X)
        if X.e1 > 0:
            s = warpgroup_mma_wait(2, [s_coming])
        else:
            s = warpgroup_mma_wait(1, [s_coming])
        mbarrier.arrive(shared.k.empty.index(blocks % X.k_stages))
        if X.has_cap:
            s = shown(s, words, here, span, call, MASK, S, X)
        s = biased(capped(s, call, X), shared, blocks, call, C, S, X)
        scale = logit_scale_of(call, X)
        s = shown(s, words, here, span, call, MASK, S, X)
        higher = gl.maximum(highest, gl.max(s, 1))
        reference = higher * scale
        if MASK != NOWHERE or X.bias_rows > 0:  # a row may have seen nothing so far
            reference = gl.where(higher == -float("inf"), 0.0, reference)
        shrink = gl.exp2(highest * scale - reference)
        p = gl.exp2(s * scale - reference[:, None])
        sums = _lane_sums(p, X.keys)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        highest = higher
        # Named in the wait so that the registers of the products under way are not given away before they are done.
        new_weights = gl.convert_layout(p.to(weights.dtype), gl.DotOperandLayout(0, O0, 2))
        if X.e1 > 0:
            acc0, acc1, weights, weights1, new_weights = warpgroup_mma_wait(
                0, [acc0_coming, acc1_coming, weights, weights1, new_weights]
            )
        else:
            acc0, weights, new_weights = warpgroup_mma_wait(0, [acc0_coming, weights, new_weights])
        mbarrier.arrive(shared.v.empty.index(v_at))
        weights = new_weights
        acc0 = acc0 * gl.convert_layout(shrink, gl.SliceLayout(1, O0))[:, None]
        if X.e1 > 0:
            acc1 = acc1 * gl.convert_layout(shrink, gl.SliceLayout(1, O1))[:, None]
    return Rows(highest, total, acc0, acc1, weights), blocks


@gluon.jit
def _visit_all(
    rows, block, blocks, q_at, zeros, span, call, shared,
    C: gl.constexpr, S: gl.constexpr, O0: gl.constexpr, O1: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """The online softmax over all blocks below ``block``, the first one."""
    if (X.has_right and not X.has_left) or X.masked:
        # The masked blocks come first, if there are any, in a loop of their own: a branch in the one that runs for most of
        # the time costs up to a tenth. To ptxas 12.8 the two must not seem to share the tile of queries: it makes the
        # descriptor in front of the first and uses it in the second, also where the first is not entered.
        rows, blocks = _visit(
            rows, block, block - span.whole_past, blocks, q_at, zeros, span, call, shared, EVERYWHERE, C, S, O0, O1, X
        )  # fmt: skip
        return _visit(
            rows, span.whole_past, span.whole_past - span.lowest, blocks, from_first_lane(q_at), zeros, span, call, shared,
            NOWHERE, C, S, O0, O1, X,
        )  # fmt: skip
    else:
        MASK: gl.constexpr = AT_THE_EDGES if X.has_left or X.has_right else NOWHERE
        return _visit(rows, block, block - span.lowest, blocks, q_at, zeros, span, call, shared, MASK, C, S, O0, O1, X)


@gluon.jit
def _store_statistics(rows, tile, span, call, S: gl.constexpr, X: gl.constexpr):
    """Write lse of a consumer's queries; returns what their outputs are to be multiplied with.

    A row that sees nothing has an output of zeros, and the sink for its lse: that is its denominator.
    """
    sums = gl.convert_layout(gl.sum(rows.total, 1), gl.SliceLayout(1, S))
    top = rows.highest * logit_scale_of(call, X)  # of the logits, in base 2
    empty = sums == 0.0
    factor = 1.0 / gl.where(empty, 1.0, sums)
    empty_lse = -float("inf")
    if call.sink is not None:
        sink = gl.load(call.sink + tile.batch_head % call.heads).to(gl.float32)
        higher = gl.maximum(top, sink * LOG2E)
        shrink = gl.where(empty, 0.0, gl.exp2(top - higher))
        sums = sums * shrink + gl.exp2(sink * LOG2E - higher)
        top = higher
        factor = shrink / sums
        empty_lse = sink
        if X.packed:
            empty_lse = gl.where(tile.posted_keys == NO_SEQUENCE, -float("inf"), sink)
    lse = gl.where(empty, empty_lse, (top + gl.log2(sums)) * LN2)
    if X.cut:
        bad = tile.posted_keys == BAD_LENGTHS
        lse = gl.where(bad, float("nan"), lse)
        factor = gl.where(bad, float("nan"), gl.where(empty, 0.0, factor))
    elif X.masked or X.bias_rows > 0:
        factor = gl.where(empty, 0.0, factor)
    lane = span.row + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    base = call.lse + tile.batch_head.to(gl.int64) * call.q_length + tile.start
    gl.store(base + lane, lse, mask=lane < tile.rows)
    return factor


@gluon.jit
def _scaled(acc, factor, LAYOUT: gl.constexpr, X: gl.constexpr):
    """The output of rows. Rows that see nothing have factor zero: their sums may hold NaN of values that others see."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT))[:, None]
    scaled = acc * factor
    if X.cut or X.masked or X.bias_rows > 0:
        scaled = gl.where(factor == 0.0, 0.0, scaled)
    return scaled


@gluon.jit
def _store_output(o0, o1, acc0, acc1, tile, row, call, shared, C: gl.constexpr, X: gl.constexpr):
    """A tile of the output through shared memory; rows past the sequence and columns past the tensor are left out."""
    batch, head = tile.batch_head // call.heads, tile.batch_head % call.heads
    o0_s, o1_s = shared.o0, shared.o1
    wait_for_stores(0)  # of the tile before
    thread_barrier()
    o0_s.index(C).reshape([ROWS, X.e0]).store(acc0.to(o0_s.dtype))
    if X.e1 > 0 and not X.one_o:
        o1_s.index(C).reshape([ROWS, X.e1]).store(acc1.to(o0_s.dtype))
    fence_async_shared()
    thread_barrier()
    store_rows(o0, batch, head, tile.start, tile.rows, row, 0, o0_s.index(C), X.packed)
    if X.e1 > 0:
        if X.one_o:
            wait_for_stores(0)
            thread_barrier()
            o0_s.index(C).reshape([ROWS, X.e1]).store(acc1.to(o0_s.dtype))
            fence_async_shared()
            thread_barrier()
            store_rows(o0, batch, head, tile.start, tile.rows, row, X.e0, o0_s.index(C), X.packed)
        else:
            store_rows(o1, batch, head, tile.start, tile.rows, row, X.e0, o1_s.index(C), X.packed)


@gluon.jit
def _consume(C: gl.constexpr, o0, o1, call, shared, X: gl.constexpr):
    """A consumer warpgroup: 64 queries of one tile after the other. The first q·kᵀ of a tile is issued in the one before."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.keys, 16])
    O0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.e0, 16])
    O1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X.e1 if X.e1 > 0 else 16, 16])
    BANDED: gl.constexpr = (X.has_left or X.has_right) and not X.masked  # consumers visit blocks of their own
    PV_FIRST: gl.constexpr = (X.has_left and not X.masked) or X.ahead == 0 or (BANDED and X.ahead == 1)
    SCORE_PRODUCTS: gl.constexpr = 2 if X.d1 > 0 else 1  # under way behind the last weights·v
    words = 0
    zeros = gl.zeros([ROWS, X.keys], gl.float32, S)
    done, blocks = 0, 0
    if X.consumers - 1 == C:
        _pass_turn(C, X)  # the first goes first
    tile = read_tile(shared.mailbox, 0, call, X)
    if X.masked:
        words = first_words(tile, call, C, S, X)
    if BANDED:
        blocks = _skip_to_own(blocks, tile, call, shared, C, X)
    s = warpgroup_mma_wait(0, [_issue_first_scores(0, blocks, tile.row >= 0, zeros, shared, C, X)])
    mbarrier.arrive(shared.k.empty.index(blocks % X.k_stages), pred=tile.row >= 0)
    while tile.row >= 0:
        span = _span(tile, call, C, X)
        q_at = C * X.q_stages + done % X.q_stages
        block = span.past - 1
        first = block
        if X.masked:
            first = tile.entry >> 1
        rows = _first_block(s, first, words, blocks, span, call, shared, C, S, O0, O1, X)
        rows, blocks = _visit_all(rows, block, blocks, q_at, zeros, span, call, shared, C, S, O0, O1, X)
        mbarrier.arrive(shared.q.empty.index(q_at))

        # The last weights·v. It overlaps with the first q·kᵀ of the next tile, but where a window lets this consumer skip
        # blocks in between: the ring may have no room for those until these values are given back.
        v_at = blocks % X.v_stages
        wait_full(shared.v.full, blocks, X.v_stages)
        acc0_coming, acc1_coming, weights1 = _issue_output(rows, shared, v_at, O1, X)
        acc0, acc1, weights = rows.acc0, rows.acc1, rows.weights
        blocks += 1
        done += 1
        coming = read_tile(shared.mailbox, done, call, X)
        if X.masked:
            words = first_words(coming, call, C, S, X)
        more = coming.row >= 0
        if PV_FIRST:
            if X.e1 > 0:
                acc0, acc1, weights, weights1 = warpgroup_mma_wait(0, [acc0_coming, acc1_coming, weights, weights1])
            else:
                acc0, weights = warpgroup_mma_wait(0, [acc0_coming, weights])
            mbarrier.arrive(shared.v.empty.index(v_at))
        elif X.packed:  # for the same reason; what is added up for no query may be wrong
            mbarrier.arrive(shared.v.empty.index(v_at), pred=span.row >= tile.rows)
        if (X.has_left and not X.masked) or X.packed:
            blocks = _skip(span.lowest - span.tile_lowest, blocks, shared, C, X)
        if X.ahead > 0:
            if BANDED:
                blocks = _skip_to_own(blocks, coming, call, shared, C, X)
            s_coming = _issue_first_scores(done, blocks, more, zeros, shared, C, X)
            if not PV_FIRST:
                if X.e1 > 0:
                    acc0, acc1, weights, weights1 = warpgroup_mma_wait(
                        SCORE_PRODUCTS, [acc0_coming, acc1_coming, weights, weights1]
                    )
                else:
                    acc0, weights = warpgroup_mma_wait(SCORE_PRODUCTS, [acc0_coming, weights])
                if X.packed:
                    mbarrier.arrive(shared.v.empty.index(v_at), pred=span.row < tile.rows)
                else:
                    mbarrier.arrive(shared.v.empty.index(v_at))

        # Epilogue.
        factor = _store_statistics(rows, tile, span, call, S, X)
        acc0 = _scaled(acc0, factor, O0, X)
        if X.e1 > 0:
            acc1 = _scaled(acc1, factor, O1, X)
        if X.packed:
            if span.row < tile.rows:
                _store_output(o0, o1, acc0, acc1, tile, span.row, call, shared, C, X)
        else:
            _store_output(o0, o1, acc0, acc1, tile, span.row, call, shared, C, X)
        if X.ahead == 0:
            if BANDED:
                blocks = _skip_to_own(blocks, coming, call, shared, C, X)
            s_coming = _issue_first_scores(done, blocks, more, zeros, shared, C, X)
        s = warpgroup_mma_wait(0, [s_coming])
        mbarrier.arrive(shared.k.empty.index(blocks % X.k_stages), pred=more)
        tile = coming
    wait_for_stores(0)
    if C == 0:
        _take_turn(C)


@gluon.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "tiles", "works", "heads_at_once", "left", "right", "sequences",
        "longest_q", "longest_k", "bits_batch", "bits_head", "bits_block", "bits_row", "lists_batch", "lists_head",
        "lists_tile", "seen_at", "bias_batch", "bias_head",
    ],
    do_not_specialize_on_alignment=["lse", "sink", "lengths", "cu_q", "cu_k", "counter", "bits", "lists"],
)  # fmt: skip
def forward_kernel(
    q0, q1, k0, k1, v0, v1, o0, o1, bias, lse, sink, lengths, cu_q, cu_k, counter, bits, lists,
    q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k,
    logit_scale, cap_scale, bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at,
    bias_batch, bias_head, VARIANT: gl.constexpr,
):  # fmt: skip
    """A persistent program. The parameters are those of `Inputs` and `Call`, the output, and a `Variant`."""
    X: gl.constexpr = constants(VARIANT)
    gl.static_assert(not (X.masked and X.keys_first))  # values of the block above are found by counting
    inputs = Inputs(q0, q1, k0, k1, v0, v1, bias)
    mask = mask_of(
        bits, lists, (bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at), X
    )
    call = Call(
        lse, sink, lengths, cu_q, cu_k, counter, q_length, k_length, heads, group, tiles, works, heads_at_once, left, right,
        sequences, longest_q, longest_k, logit_scale, cap_scale, mask,
        bias_batch if X.bias_rows > 0 else 0, bias_head if X.bias_rows > 0 else 0,
    )  # fmt: skip
    QUERY_TILES: gl.constexpr = X.consumers * X.q_stages
    q0_s = gl.allocate_shared_memory(q0.dtype, [QUERY_TILES] + q0.block_shape, q0.layout)
    k0_s = gl.allocate_shared_memory(q0.dtype, [X.k_stages] + k0.block_shape, k0.layout)
    v0_s = gl.allocate_shared_memory(q0.dtype, [X.v_stages] + v0.block_shape, v0.layout)
    o0_s = gl.allocate_shared_memory(q0.dtype, [X.consumers] + o0.block_shape, o0.layout)
    q1_s, k1_s, v1_s, o1_s = q0_s, k0_s, v0_s, o0_s
    if X.d1 > 0:
        q1_s = gl.allocate_shared_memory(q0.dtype, [QUERY_TILES] + q1.block_shape, q1.layout)
        k1_s = gl.allocate_shared_memory(q0.dtype, [X.k_stages] + k1.block_shape, k1.layout)
    if X.e1 > 0:
        v1_s = gl.allocate_shared_memory(q0.dtype, [X.v_stages] + v1.block_shape, v1.layout)
        if not X.one_o:
            o1_s = gl.allocate_shared_memory(q0.dtype, [X.consumers] + o1.block_shape, o1.layout)
    q = _new_ring(q0_s, q1_s, QUERY_TILES, 1)
    k = _new_ring(k0_s, k1_s, X.k_stages, X.consumers)
    v = _new_ring(v0_s, v1_s, X.v_stages, X.consumers)
    b = None
    if X.bias_rows > 0:
        b_s = gl.allocate_shared_memory(bias.dtype, [X.b_stages] + bias.block_shape, bias.layout)
        b = _new_ring(b_s, b_s, X.b_stages, X.consumers)
    shared = Shared(q, k, v, o0_s, o1_s, new_mailbox(FIELDS, X.consumers), new_barriers(1, 1), b)
    fence_async_shared()
    # Argument tuples have to stand inside the call.
    if X.consumers == 2:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(1), o0, o1, call, shared, X)),
            (produce, (inputs, call, shared, X)),
        ], [4, 1], [232, 40] if X.cut or X.masked or X.bias_rows > 0 else [240, 24])  # fmt: skip
    elif X.consumers == 3:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(1), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(2), o0, o1, call, shared, X)),
            (produce, (inputs, call, shared, X)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(1), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(2), o0, o1, call, shared, X)),
            (_consume, (gl.constexpr(3), o0, o1, call, shared, X)),
            (produce, (inputs, call, shared, X)),
        ], [4, 4, 4, 1], [112, 112, 112, 32])  # fmt: skip
