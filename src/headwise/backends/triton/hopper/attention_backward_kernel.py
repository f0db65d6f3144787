"""The Gluon kernel of the attention backward on Hopper: five matrix products per pair of blocks, all five of them `wgmma`.

A program owns 128 keys: two warpgroups (the consumers) hold dK and dV of 64 keys each in registers and walk together
over the blocks of queries that see some of the keys, from the last to the first, for every query head of the key head. One
warp loads (the producer), and one, where the result must be the same bits every time, takes turns for dQ (the turn keeper).

A step of a consumer, with everything transposed, keys down and queries across, so that P and dS feed dV and dK from
registers:

    dP = V dO'    P = exp(S - lse)    dV += P dO    dS = P (dP - delta), stored for both consumers
    dQ = dS' K    dK += dS Q          dQ is added to the sums        S of the next step = K Q'

Each line of arithmetic has a product beside it that does not wait for it: exp has dP, dS has dV, the sums have dK, and S of
the next step is in the queue before dK is done.

dQ is a sum over programs. A consumer adds its half straight from the registers to a float32 array that holds every block in
the order of the registers (`_in_fragment_order`), so that a warp adds 512 bytes in a row with one instruction.

Shared memory that a loop reads at a fixed place is indexed with a zero that the compiler cannot see through (`_zero`):
otherwise it keeps the descriptors of all the products in registers, dozens of them, and spills.
"""

# ruff: noqa: RUF005, RUF059, SIM102  (Gluon has no starred lists; kernels unpack what they are given; constants have an `if` of their own)

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Descriptors of packed tensors have two dims more, after whose last element an address comes round: (far, end of the
# sequence, far - length + row) is the row, and past the bounds of the third dim after the sequence's end. See `PackedBox`.
_FAR = gl.constexpr(2**30)


@gluon.jit
def _wait_for_turn(counter, turn):
    """Spin until ``*counter == turn``; what others wrote before they set it is seen afterwards."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred again;
        .reg .b32 value;
        SPIN: ld.acquire.gpu.global.b32 value, [$1];
        setp.ne.b32 again, value, $2;
        @again bra SPIN;
        mov.b32 $0, value;
        }""",
        "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(counter, turn):
    """Set ``*counter``, after everything that this program's threads did before."""
    gl.inline_asm_elementwise(
        "{ fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, $2; }",
        "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _both_consumers():
    """Wait until all 256 threads of the two consumers are here."""
    gl.inline_asm_elementwise(
        "{ bar.sync 8, 256; mov.b32 $0, $1; }", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _zero():
    """A zero that the compiler cannot see through, so that it does not keep what depends on it in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _in_fragment_order(x):
    """``[64, N]`` as a warpgroup holds a product of `wgmma`, flattened so that four numbers of a thread are neighbours.

    Row and column bits go from (row 16s, row 8, row, column 8s, column 2s, column) to (row 16s, column 8s, row, column 2s,
    row 8, column): the registers of a thread, two by two, then the lanes, then the rest.
    """
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([64 * N])


@gluon.jit
def _tile_of(
    tile, records, tiles, batch_heads, together, rows, keys, row_blocks, left, right, key_heads,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Where a tile lies and what it sees.

    (batch, key head, first key and first row of the sequence, its rows and keys, number of the tile in it, first block of
    the sequence among all blocks, first and past-last block of queries, the same of those that need no mask, and the
    past-last block of queries of the tile before.)
    """
    if PACKED:
        record = records + (tile // key_heads) * 8
        head = tile % key_heads
        batch = tile * 0
        first_row = gl.load(record)
        rows = gl.load(record + 1)
        first_key = gl.load(record + 2)
        keys = gl.load(record + 3)
        n = gl.load(record + 4)
        block0 = gl.load(record + 5)
    else:
        # `together` heads at a time, all their first tiles before all their second tiles.
        group = tile // (together * tiles)
        within = tile % (together * tiles)
        width = gl.minimum(together, batch_heads - group * together)
        n = within // width
        batch_head = group * together + within % width
        batch = batch_head // key_heads
        head = batch_head % key_heads
        first_row = tile * 0
        first_key = tile * 0
        block0 = batch * row_blocks
    offset = keys - rows
    low = n * BN
    high = gl.minimum(low + BN, keys) - 1
    begin = 0
    end = gl.cdiv(rows, BM)
    end_before = end  # of the tile before this one
    whole_end = end
    if HAS_RIGHT:
        begin = gl.maximum(low - right - offset, 0) // BM
    whole_begin = begin
    if HAS_RIGHT:
        whole_begin = gl.cdiv(gl.maximum(high - right - offset, 0), BM)
    if HAS_LEFT:
        end_before = gl.minimum(end, gl.cdiv(gl.maximum(low + left - offset, 0), BM))
        whole_end = gl.maximum(low + left - offset + 1, 0) // BM
        end = gl.minimum(end, gl.cdiv(gl.maximum(high + left - offset + 1, 0), BM))
    end = gl.maximum(end, begin)
    if low + BN > keys:
        whole_begin = end  # keys past the last one: every block needs the mask
    whole_end = gl.minimum(gl.maximum(whole_end, begin), end)
    if PACKED:
        if low >= keys:
            end = begin  # there are no such keys
    whole_end = gl.minimum(whole_end, end)
    whole_begin = gl.minimum(gl.maximum(whole_begin, begin), whole_end)
    if n == 0:
        end_before = 0
    return batch, head, first_key, first_row, rows, keys, n, block0, begin, end, whole_begin, whole_end, end_before


@gluon.jit
def _load(desc, batch, head, first, length, row, barrier, buffer, PACKED: gl.constexpr):
    """Rows ``row`` and on of a sequence of ``length`` rows; zeros past its end."""
    if PACKED:
        load_tile(desc, [_FAR, first + length, _FAR - length + row, head, 0], barrier, buffer)
    else:
        load_tile(desc, [batch, head, row, 0], barrier, buffer)


@gluon.jit
def _store(desc, batch, head, first, length, row, buffer, PACKED: gl.constexpr):
    if PACKED:
        store_tile(desc, [_FAR, first + length, _FAR - length + row, head, 0], buffer)
    else:
        store_tile(desc, [batch, head, row, 0], buffer)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, stats_desc, q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, full, empty, tile,
    records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    batch, head, key0, row0, rows, keys, n, block0, begin, end, _, _, _ = _tile_of(
        tile, records, tiles, batch_heads, together, rows, keys, row_blocks, left, right, key_heads,
        HAS_LEFT, HAS_RIGHT, PACKED, BM, BN,
    )  # fmt: skip
    mbarrier.expect(kv_full.index(0), 2 * BN * D * 2)
    _load(k_desc, batch, head, key0, keys, n * BN, kv_full.index(0), k_s.index(0), PACKED)
    _load(v_desc, batch, head, key0, keys, n * BN, kv_full.index(0), v_s.index(0), PACKED)
    step = 0
    for member in range(0, group):
        q_head = head * group + member
        for i in range(0, end - begin):
            m = end - 1 - i
            stage = step % STAGES
            phase = (step // STAGES) & 1
            at = (q_head * all_blocks + block0 + m) * 2
            mbarrier.wait(empty.index(stage), phase ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * BM * D * 2 + 2 * BM * 4)
            _load(q_desc, batch, q_head, row0, rows, m * BM, arrived, q_s.index(stage), PACKED)
            load_tile(stats_desc, [at, 0], arrived, lse_s.index(stage))
            _load(do_desc, batch, q_head, row0, rows, m * BM, arrived, do_s.index(stage), PACKED)
            load_tile(stats_desc, [at + 1, 0], arrived, delta_s.index(stage))
            step += 1


@gluon.jit
def _turn_keeper(
    turns, may_add, empty, tile, records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left,
    right, key_heads, group,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles add to a block of dQ in the order of their keys: each waits for the one before it, off the consumers' path."""
    batch, head, _, _, rows, keys, n, block0, begin, end, _, _, end_before = _tile_of(
        tile, records, tiles, batch_heads, together, rows, keys, row_blocks, left, right, key_heads,
        HAS_LEFT, HAS_RIGHT, PACKED, BM, BN,
    )  # fmt: skip
    step = 0
    for member in range(0, group):
        counters = turns + (head * group + member).to(gl.int64) * all_blocks + block0
        for i in range(0, end - begin):
            m = end - 1 - i
            if m < end_before:
                _wait_for_turn(counters + m, n)
            mbarrier.arrive(may_add.index(0))
            mbarrier.wait(empty.index(step % STAGES), (step // STAGES) & 1)
            _pass_turn(counters + m, n + 1)
            step += 1


@gluon.jit
def _weights(
    products, lse, scale, softcap, m, low, offset, keys, left, right,
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, MASKED: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """P of a block, transposed, from the products q·k: zeros where a query does not see a key."""
    LAYOUT: gl.constexpr = products.type.layout
    if HAS_CAP:
        # tanh(u) = 1 - 2 / (1 + exp(2u)); scale is 2 log2(e) scale / softcap here, and softcap has log2(e) in it.
        logits = softcap - (2.0 * softcap) / (1.0 + gl.exp2(products * scale))
        p = gl.exp2(logits - lse)
    else:
        p = gl.exp2(products * scale - lse)
    if MASKED:
        seen = _seen(m, low, offset, keys, left, right, HAS_LEFT, HAS_RIGHT, BM, LAYOUT)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _seen(
    m, low, offset, keys, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    position = m * BM + offset + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))[None, :]
    key = low + _zero() + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    seen = (key < keys) & (position == position)
    if HAS_LEFT:
        seen = seen & (key >= position - left)
    if HAS_RIGHT:
        seen = seen & (key <= position + right)
    return seen


@gluon.jit
def _add_dq(dq, sums_at, first, may_add, step, DETERMINISTIC: gl.constexpr):
    """Add a consumer's half of a block of dQ to the sums at ``sums_at``; with turns, the first one of all just stores."""
    flat = _in_fragment_order(dq)
    index = gl.arange(0, flat.shape[0], flat.type.layout)
    if DETERMINISTIC:
        mbarrier.wait(may_add.index(0), step & 1)
        if first:
            gl.store(sums_at + index, flat)
        else:
            _add_four(sums_at, index, flat)
    else:
        _add_four(sums_at, index, flat)


@gluon.jit
def _add_four(base, index, values):
    """``base[index] += values``, four neighbours at once. `gl.atomic_add` asks for the old values if it is in a branch."""
    offset = (index // 4) * 16  # in bytes, one for all four
    gl.inline_asm_elementwise(
        """{
        .reg .b64 at;
        cvt.u64.u32 at, $8;
        add.s64 at, at, $4;
        red.relaxed.gpu.global.add.v4.f32 [at], {$12, $13, $14, $15};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r,r,r,r,r", [base.to(gl.int64, bitcast=True), offset, values],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _step(
    HALF: gl.constexpr, products, dk, dv, step, m, more, sums_at, first, scale, softcap, low, offset, keys, left,
    right, k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, full, empty, may_add,
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, MASKED: gl.constexpr,
    DETERMINISTIC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One block of queries, of which the products q·k are known; returns those of the next one, too."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    DQ_COLUMNS: gl.constexpr = D * BM // 128
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
    no_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, DQ_LAYOUT)
    zero = _zero()
    k = k_s.index(zero).reshape([BN, D])
    own_k = k.slice(HALF * 64, 64, dim=0)
    own_v = v_s.index(zero).reshape([BN, D]).slice(HALF * 64, 64, dim=0)
    # The two consumers share a block of dQ: 64 rows are split by columns, 128 by rows.
    if BM == 64:
        dq_k = k.slice(HALF * (D // 2), D // 2, dim=1)
    else:
        dq_k = k
    stage = step % STAGES
    q = q_s.index(stage).reshape([BM, D])
    do = do_s.index(stage).reshape([BM, D])

    dp_started = warpgroup_mma(own_v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    p = _weights(
        products, lse_s.index(stage).load(S_LAYOUT), scale, softcap, m, low, offset, keys, left, right,
        HAS_CAP, HAS_LEFT, HAS_RIGHT, MASKED, BM,
    )  # fmt: skip
    p_16 = gl.convert_layout(p.to(q_s.dtype), LEFT_OPERAND)
    dv_started = warpgroup_mma(p_16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_started])
    ds = p * (dp - delta_s.index(stage).load(S_LAYOUT))
    if HAS_CAP:
        # The slope of the cap, from the logit that gave p: it costs less to take the logarithm than to keep the tanh.
        t = (gl.log2(gl.where(p > 0.0, p, 1.0)) + lse_s.index(stage).load(S_LAYOUT)) / softcap
        ds = gl.where(p > 0.0, ds * (1.0 - t * t), 0.0)
    ds_16 = ds.to(q_s.dtype)
    ds_buffer = ds_s.index(step % 2)
    ds_buffer.slice(HALF * 64, 64, dim=0).store(ds_16)
    ds_started = gl.convert_layout(ds_16, LEFT_OPERAND)
    fence_async_shared()
    _both_consumers()

    if BM == 64:
        ds_rows = ds_buffer.permute((1, 0))
    else:
        ds_rows = ds_buffer.slice(HALF * 64, 64, dim=1).permute((1, 0))
    dq_started = warpgroup_mma(ds_rows, dq_k, no_dq, use_acc=False, is_async=True)
    dk_started = warpgroup_mma(ds_started, q, dk, is_async=True)
    dq, dv, p_16 = warpgroup_mma_wait(1, [dq_started, dv_started, p_16])
    _add_dq(dq, sums_at, first, may_add, step, DETERMINISTIC)
    # S of the next step follows dK without a gap; after the last step it is of no use.
    next_stage = (step + 1) % STAGES
    mbarrier.wait(full.index(next_stage), ((step + 1) // STAGES) & 1, pred=more)
    next_q = q_s.index(next_stage).reshape([BM, D])
    s_started = warpgroup_mma(own_k, next_q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    products, dk, ds_started = warpgroup_mma_wait(0, [s_started, dk_started, ds_started])
    mbarrier.arrive(empty.index(stage))
    return products, dk, dv


@gluon.jit
def _consumer(
    HALF: gl.constexpr, dk_desc, dv_desc, sums, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, kv_full, full, empty,
    may_add, tile, records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left, right, key_heads,
    group, scale, score_scale, softcap,
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr,
    PACKED: gl.constexpr, GROUPED: gl.constexpr, DETERMINISTIC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    batch, head, key0, row0, rows, keys, n, block0, begin, end, whole_begin, whole_end, end_before = _tile_of(
        tile, records, tiles, batch_heads, together, rows, keys, row_blocks, left, right, key_heads,
        HAS_LEFT, HAS_RIGHT, PACKED, BM, BN,
    )  # fmt: skip
    offset = keys - rows
    low = n * BN + HALF * 64
    k = k_s.index(0).reshape([BN, D])
    own_k = k.slice(HALF * 64, 64, dim=0)
    own_v = v_s.index(0).reshape([BN, D]).slice(HALF * 64, 64, dim=0)
    dv = gl.zeros([64, D], gl.float32, DK_LAYOUT)
    dk = gl.zeros([64, D], gl.float32, DK_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    steps = (end - begin) * group
    members = 1  # as a constant, it leaves no loop behind
    if GROUPED:
        members = group
    if steps > 0:
        mbarrier.wait(full.index(0), 0)
        no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
        s_started = warpgroup_mma(
            own_k, q_s.index(0).reshape([BM, D]).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        products = warpgroup_mma_wait(0, [s_started])
        step = 0
        for member in range(0, members):
            of_head = (
                sums + ((head * group + member).to(gl.int64) * all_blocks + block0) * (BM * D) + HALF * (BM * D // 2)
            )
            if HAS_LEFT:
                for i in range(0, end - whole_end):
                    m = end - 1 - i
                    products, dk, dv = _step(
                        HALF, products, dk, dv, step, m, step + 1 < steps, of_head + m.to(gl.int64) * (BM * D),
                        m >= end_before, score_scale, softcap, low, offset, keys, left, right, k_s, v_s, q_s, do_s, lse_s,
                        delta_s, ds_s, full, empty, may_add,
                        HAS_CAP, HAS_LEFT, HAS_RIGHT, True, DETERMINISTIC, BM, BN, D, STAGES,
                    )  # fmt: skip
                    step += 1
            for i in range(0, whole_end - whole_begin):
                m = whole_end - 1 - i
                products, dk, dv = _step(
                    HALF, products, dk, dv, step, m, step + 1 < steps, of_head + m.to(gl.int64) * (BM * D),
                    m >= end_before, score_scale, softcap, low, offset, keys, left, right, k_s, v_s, q_s, do_s, lse_s,
                    delta_s, ds_s, full, empty, may_add,
                    HAS_CAP, HAS_LEFT, HAS_RIGHT, False, DETERMINISTIC, BM, BN, D, STAGES,
                )  # fmt: skip
                step += 1
            if HAS_RIGHT or HAS_TAIL:
                for i in range(0, whole_begin - begin):
                    m = whole_begin - 1 - i
                    products, dk, dv = _step(
                        HALF, products, dk, dv, step, m, step + 1 < steps, of_head + m.to(gl.int64) * (BM * D),
                        m >= end_before, score_scale, softcap, low, offset, keys, left, right, k_s, v_s, q_s, do_s, lse_s,
                        delta_s, ds_s, full, empty, may_add,
                        HAS_CAP, HAS_LEFT, HAS_RIGHT, True, DETERMINISTIC, BM, BN, D, STAGES,
                    )  # fmt: skip
                    step += 1
    # K is read by both consumers, for dQ: its place is free for dK when both are here.
    _both_consumers()
    dk *= scale
    if PACKED:
        # Offsets that make no sense: not a number everywhere.
        poison = gl.load(records + (tile // key_heads) * 8 + 6).to(gl.float32, bitcast=True)
        dk += poison
        dv += poison
    own_v.store(dv.to(q_s.dtype))
    own_k.store(dk.to(q_s.dtype))
    fence_async_shared()
    _both_consumers()
    if HALF == 0:
        _store(dv_desc, batch, head, key0, keys, n * BN, v_s.index(0), PACKED)
    else:
        _store(dk_desc, batch, head, key0, keys, n * BN, k_s.index(0), PACKED)
    wait_for_stores(0)


@gluon.jit(
    do_not_specialize=[
        "tiles", "batch_heads", "together", "rows", "keys", "row_blocks", "all_blocks", "left", "right", "key_heads",
        "group",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums, turns, ticket, records, tiles, batch_heads,
    together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr,
    PACKED: gl.constexpr, GROUPED: gl.constexpr, DETERMINISTIC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES] + q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES] + do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [1] + k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1] + v_desc.block_shape, v_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    may_add = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(kv_full.index(0), 1)
    mbarrier.init(may_add.index(0), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
    fence_async_shared()
    tile = gl.program_id(0)
    if DETERMINISTIC:
        # A tile waits for tiles before it only: the order of starting is what it goes by, not the order of the grid.
        tile = gl.atomic_add(ticket, 1, sem="relaxed")
        gl.warp_specialize([
            (_consumer, (
                gl.constexpr(0), dk_desc, dv_desc, sums, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, kv_full, full, empty,
                may_add, tile, records, tiles, batch_heads, together, rows, keys,
                row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
                HAS_CAP, HAS_LEFT, HAS_RIGHT, HAS_TAIL, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES,
            )),
            (_consumer, (
                gl.constexpr(1), dk_desc, dv_desc, sums, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, kv_full, full, empty,
                may_add, tile, records, tiles, batch_heads, together, rows, keys,
                row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
                HAS_CAP, HAS_LEFT, HAS_RIGHT, HAS_TAIL, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES,
            )),
            (_producer, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, full, empty,
                tile, records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left,
                right, key_heads, group, HAS_LEFT, HAS_RIGHT, PACKED, BM, BN, D, STAGES,
            )),
            (_turn_keeper, (
                turns, may_add, empty, tile, records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left,
                right, key_heads, group, HAS_LEFT, HAS_RIGHT, PACKED, BM, BN, STAGES,
            )),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (
                gl.constexpr(0), dk_desc, dv_desc, sums, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, kv_full, full, empty,
                may_add, tile, records, tiles, batch_heads, together, rows, keys,
                row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
                HAS_CAP, HAS_LEFT, HAS_RIGHT, HAS_TAIL, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES,
            )),
            (_consumer, (
                gl.constexpr(1), dk_desc, dv_desc, sums, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, kv_full, full, empty,
                may_add, tile, records, tiles, batch_heads, together, rows, keys,
                row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
                HAS_CAP, HAS_LEFT, HAS_RIGHT, HAS_TAIL, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES,
            )),
            (_producer, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, full, empty,
                tile, records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left,
                right, key_heads, group, HAS_LEFT, HAS_RIGHT, PACKED, BM, BN, D, STAGES,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
