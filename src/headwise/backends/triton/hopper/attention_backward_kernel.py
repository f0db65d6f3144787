"""The Gluon kernel of the attention backward on Hopper: five matrix products per pair of blocks, all five of them `wgmma`.

A program works on one tile of 128 keys after the other: two warpgroups (the consumers) hold dK and dV of 64 keys each in
registers and walk together over the blocks of queries that see some of the keys, from the last to the first, for every query
head of the key head. One warp draws tiles and loads, and where the result must be the same bits every time, two more take
turns for dQ (`attention_backward_parts`). Keys and values have two places in shared memory: those of the next tile arrive
while this one is worked on, and its gradients leave from where its keys and values were.

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
"""

# ruff: noqa: RUF005, RUF059  (Gluon has no starred lists; kernels unpack what they are given)

from __future__ import annotations

from headwise.backends.triton.hopper.attention_backward_parts import (
    FIELDS,
    MAIL,
    add_to_sums,
    all_consumers,
    await_turns,
    block_at,
    constants,
    is_first_at,
    next_tile,
    only_seen,
    opaque_zero,
    pass_turns,
    produce,
    score_gradients,
    weights_of,
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
from headwise.backends.triton.hopper.sequence_rows import store_rows


@gluon.jit
def _step(
    HALF: gl.constexpr, products, dk, dv, step, m, more, place, sums_at, first, numbers, low, offset, keys, left, right,
    buffers, ds_s, barriers, MASKED: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """One block of queries, of which the products q·k are known; returns those of the next one, too."""
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    mail_full, mail_empty, kv_full, kv_empty, full, empty, may_add = barriers
    scale, score_scale, softcap = numbers
    BM: gl.constexpr = X.rows
    D: gl.constexpr = X.dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    DQ_COLUMNS: gl.constexpr = D * BM // 128
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
    no_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, DQ_LAYOUT)
    place += opaque_zero()
    k = k_s.index(place).reshape([X.keys, D])
    own_k = k.slice(HALF * 64, 64, dim=0)
    own_v = v_s.index(place).reshape([X.keys, D]).slice(HALF * 64, 64, dim=0)
    # The two consumers share a block of dQ: 64 rows are split by columns, 128 by rows.
    if BM == 64:
        dq_k = k.slice(HALF * (D // 2), D // 2, dim=1)
    else:
        dq_k = k
    stage = step % X.stages
    q = q_s.index(stage).reshape([BM, D])
    do = do_s.index(stage).reshape([BM, D])

    dp_started = warpgroup_mma(own_v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    p = weights_of(products, lse_s.index(stage).load(S_LAYOUT), score_scale, softcap, X)
    if MASKED:
        p = only_seen(p, m, low, offset, keys, left, right, X)
    p_16 = gl.convert_layout(p.to(q_s.dtype), LEFT_OPERAND)
    dv_started = warpgroup_mma(p_16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_started])
    ds = score_gradients(
        p, dp, delta_s.index(stage).load(S_LAYOUT), lse_s.index(stage).load(S_LAYOUT), softcap, X
    )  # fmt: skip
    ds_16 = ds.to(q_s.dtype)
    ds_buffer = ds_s.index(step % 2)
    ds_buffer.slice(HALF * 64, 64, dim=0).store(ds_16)
    ds_started = gl.convert_layout(ds_16, LEFT_OPERAND)
    fence_async_shared()
    all_consumers("bar.sync 8, 256")

    if BM == 64:
        ds_rows = ds_buffer.permute((1, 0))
    else:
        ds_rows = ds_buffer.slice(HALF * 64, 64, dim=1).permute((1, 0))
    dq_started = warpgroup_mma(ds_rows, dq_k, no_dq, use_acc=False, is_async=True)
    dk_started = warpgroup_mma(ds_started, q, dk, is_async=True)
    dq, dv, p_16 = warpgroup_mma_wait(1, [dq_started, dv_started, p_16])
    if X.deterministic:
        mbarrier.wait(may_add.index(stage), (step // X.stages) & 1)
    add_to_sums(dq, sums_at, first, X)
    # S of the next step follows dK without a gap; after the last step it is of no use.
    next_stage = (step + 1) % X.stages
    mbarrier.wait(full.index(next_stage), ((step + 1) // X.stages) & 1, pred=more)
    next_q = q_s.index(next_stage).reshape([BM, D])
    s_started = warpgroup_mma(own_k, next_q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    products, dk, ds_started = warpgroup_mma_wait(0, [s_started, dk_started, ds_started])
    mbarrier.arrive(empty.index(stage))
    return products, dk, dv


@gluon.jit
def _consume(
    HALF: gl.constexpr, dk_desc, dv_desc, sums, buffers, ds_s, mail, barriers, where, numbers, X: gl.constexpr
):  # fmt: skip
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    mail_full, mail_empty, kv_full, kv_empty, full, empty, may_add = barriers
    _, _, _, _, _, _, _, all_blocks, left, right, key_heads, group = where
    scale, score_scale, softcap = numbers
    BM: gl.constexpr = X.rows
    D: gl.constexpr = X.dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    no_scores = gl.zeros([64, BM], gl.float32, S_LAYOUT)
    step = 0
    count = 0
    batch, head, key0, _, rows, keys, n, block0, begin, end, whole_begin, whole_end, edge, poison = next_tile(
        mail, mail_full, mail_empty, count, 4
    )
    while n >= 0:
        place = count % X.kv_stages
        offset = keys - rows
        low = n * X.keys + HALF * 64
        own_k = k_s.index(place).reshape([X.keys, D]).slice(HALF * 64, 64, dim=0)
        own_v = v_s.index(place).reshape([X.keys, D]).slice(HALF * 64, 64, dim=0)
        dv = gl.zeros([64, D], gl.float32, DK_LAYOUT)
        dk = gl.zeros([64, D], gl.float32, DK_LAYOUT)
        mbarrier.wait(kv_full.index(place), (count // X.kv_stages) & 1)
        past = step + (end - begin) * group
        members = 1  # as a constant, it leaves no loop behind
        if X.grouped:
            members = group
        if step < past:
            stage = step % X.stages
            mbarrier.wait(full.index(stage), (step // X.stages) & 1)
            s_started = warpgroup_mma(
                own_k, q_s.index(stage).reshape([BM, D]).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            products = warpgroup_mma_wait(0, [s_started])
            # The gradients of the tile before have left by now.
            wait_for_stores(0)
            mbarrier.arrive(kv_empty.index((count + 1) % X.kv_stages), pred=count > 0)
            for member in range(0, members):
                of_head = (
                    sums
                    + ((head * group + member).to(gl.int64) * all_blocks + block0) * (BM * D)
                    + HALF * (BM * D // 2)
                )
                # The blocks that need a mask lie at both ends; in a triangle that is walked upwards, at the first.
                masked_begin, masked_end = whole_end, end
                if X.upwards:
                    masked_begin, masked_end = begin, whole_begin
                if X.has_left or X.upwards:
                    for i in range(0, masked_end - masked_begin):
                        m = block_at(i, masked_begin, masked_end, X)
                        products, dk, dv = _step(
                            HALF, products, dk, dv, step, m, step + 1 < past, place, of_head + m.to(gl.int64) * (BM * D),
                            is_first_at(m, edge, X), numbers, low, offset, keys, left, right, buffers, ds_s, barriers, True,
                            X,
                        )  # fmt: skip
                        step += 1
                for i in range(0, whole_end - whole_begin):
                    m = block_at(i, whole_begin, whole_end, X)
                    products, dk, dv = _step(
                        HALF, products, dk, dv, step, m, step + 1 < past, place, of_head + m.to(gl.int64) * (BM * D),
                        is_first_at(m, edge, X), numbers, low, offset, keys, left, right, buffers, ds_s, barriers, False, X,
                    )  # fmt: skip
                    step += 1
                if not X.upwards:
                    for i in range(0, whole_begin - begin):
                        m = block_at(i, begin, whole_begin, X)
                        products, dk, dv = _step(
                            HALF, products, dk, dv, step, m, step + 1 < past, place, of_head + m.to(gl.int64) * (BM * D),
                            is_first_at(m, edge, X), numbers, low, offset, keys, left, right, buffers, ds_s, barriers, True,
                            X,
                        )  # fmt: skip
                        step += 1
        else:
            wait_for_stores(0)
            mbarrier.arrive(kv_empty.index((count + 1) % X.kv_stages), pred=count > 0)
        # K is read by both consumers, for dQ: its place is free for dK when both are here.
        all_consumers("bar.sync 8, 256")
        dk *= scale
        if X.packed:
            dk += poison.to(gl.float32, bitcast=True)
            dv += poison.to(gl.float32, bitcast=True)
        own_v.store(dv.to(q_s.dtype))
        own_k.store(dk.to(q_s.dtype))
        fence_async_shared()
        all_consumers("bar.sync 8, 256")
        if HALF == 0:
            store_rows(dv_desc, batch, head, key0, keys, n * X.keys, 0, v_s.index(place), X.packed)
        else:
            store_rows(dk_desc, batch, head, key0, keys, n * X.keys, 0, k_s.index(place), X.packed)
        count += 1
        batch, head, key0, _, rows, keys, n, block0, begin, end, whole_begin, whole_end, edge, poison = next_tile(
            mail, mail_full, mail_empty, count, 4
        )
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
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, GROUPED: gl.constexpr, DETERMINISTIC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(KV_STAGES == 2)  # the place that is given back is the other one
    X: gl.constexpr = constants(
        HAS_CAP, HAS_LEFT, HAS_RIGHT, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES, KV_STAGES
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES] + q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES] + do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [KV_STAGES] + k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [KV_STAGES] + v_desc.block_shape, v_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    mail = gl.allocate_shared_memory(gl.int32, [MAIL * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    mail_empty = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    may_add = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    passed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(MAIL):
        mbarrier.init(mail_full.index(i), 1)
        mbarrier.init(mail_empty.index(i), 4 if DETERMINISTIC else 2)  # consumers and turns
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_full.index(i), 1)
        mbarrier.init(kv_empty.index(i), 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(may_add.index(i), 1)
        mbarrier.init(passed.index(i), 1)
        mbarrier.init(full.index(i), 2)  # q, grad_out
        mbarrier.init(empty.index(i), 2)  # consumers
    fence_async_shared()
    where = (records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group)
    numbers = (scale, score_scale, softcap)
    descriptors = (q_desc, k_desc, v_desc, do_desc, stats_desc)
    buffers = (q_s, k_s, v_s, do_s, lse_s, delta_s)
    barriers = (mail_full, mail_empty, kv_full, kv_empty, full, empty, may_add)
    loading = (mail_full, mail_empty, kv_full, kv_empty, full, empty, full, empty)
    # Argument tuples have to stand inside the call.
    if DETERMINISTIC:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), dk_desc, dv_desc, sums, buffers, ds_s, mail, barriers, where, numbers, X)),
            (_consume, (gl.constexpr(1), dk_desc, dv_desc, sums, buffers, ds_s, mail, barriers, where, numbers, X)),
            (produce, (descriptors, buffers, mail, ticket, loading, where, X)),
            (await_turns, (turns, mail, mail_full, mail_empty, may_add, passed, where, X)),
            (pass_turns, (turns, mail, mail_full, mail_empty, empty, passed, where, X)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), dk_desc, dv_desc, sums, buffers, ds_s, mail, barriers, where, numbers, X)),
            (_consume, (gl.constexpr(1), dk_desc, dv_desc, sums, buffers, ds_s, mail, barriers, where, numbers, X)),
            (produce, (descriptors, buffers, mail, ticket, loading, where, X)),
        ], [4, 1], [240, 24])  # fmt: skip
