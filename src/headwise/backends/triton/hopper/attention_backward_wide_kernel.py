"""The Gluon kernel of the attention backward on Hopper for heads wider than 128, with three warpgroups.

A program works on one tile of 64 keys after the other; dK and dV of so many are half the register file. Each warpgroup has a
part of every step, and hands on through shared memory (everything transposed: keys down, queries across):

    weigh   S = K Q'     P = exp(S - lse)          dV += P dO      P goes to `derive`
    derive  dP = V dO'   dS = P (dP - delta)       dK += dS Q      dS goes to `spread`
    spread  dQ = dS' K                             which is added to the sums

No product is done twice, and P and dS feed dV and dK from the registers they were made in. A warpgroup's arithmetic has no
product of its own beside it: the other two are there for that. There is room for one tile of keys and values only, whose
gradients leave from the same place; grad_out and q of the next tile arrive meanwhile.

A head dim is 128 and D1 more: dK, dV and the inner products are done in two pieces, so that 192 costs three quarters of 256.
In shared memory both are 256 wide, with zeros past the end.
"""

# ruff: noqa: RUF005, RUF059, SIM102  (Gluon has no starred lists; kernels unpack what they are given; constants have an `if` of their own)

from __future__ import annotations

from headwise.backends.triton.hopper.attention_backward_parts import (
    FIELDS,
    MAIL,
    add_to_sums,
    all_consumers,
    await_turns,
    block_at,
    constants,
    from_fragment_order,
    in_fragment_order,
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
    reinterpret,
    thread_barrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from headwise.backends.triton.hopper.sequence_rows import store_rows

_D0 = gl.constexpr(128)  # the first piece of a head dim
_SUMS = gl.constexpr(64)  # columns of dQ that are added at once
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LAYOUT0 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _tile(buffer, at, WIDTH: gl.constexpr):
    return buffer.index(at).reshape([64, WIDTH])


@gluon.jit
def _scores(keys, rows, D1: gl.constexpr):
    """Issue keys · rows': two products, both pending."""
    none = gl.zeros([64, 64], gl.float32, _SCORES)
    s = warpgroup_mma(
        keys.slice(0, _D0, dim=1), rows.slice(0, _D0, dim=1).permute((1, 0)), none, use_acc=False, is_async=True
    )
    return warpgroup_mma(
        keys.slice(_D0, D1, dim=1), rows.slice(_D0, D1, dim=1).permute((1, 0)), s, is_async=True
    )  # fmt: skip


@gluon.jit
def _store_gradient(acc0, acc1, buffer, D1: gl.constexpr):
    place = buffer.index(0).reshape([64, 2 * _D0])
    place.slice(0, _D0, dim=1).store(acc0.to(buffer.dtype))
    place.slice(_D0, D1, dim=1).store(acc1.to(buffer.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _weigh(dv_desc, buffers, p_s, mail, barriers, where, numbers, X: gl.constexpr):
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    (
        mail_full, mail_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, p_full, p_empty, ds_full, ds_empty,
        may_add,
    ) = barriers  # fmt: skip
    _, _, _, _, _, _, _, _, left, right, _, group = where
    scale, score_scale, softcap = numbers
    D1: gl.constexpr = X.dim - _D0
    WIDTH: gl.constexpr = 2 * _D0
    step = 0
    count = 0
    batch, head, key0, _, rows, keys, n, block0, begin, end, whole_begin, whole_end, _, poison = next_tile(
        mail, mail_full, mail_empty, count, 4
    )
    while n >= 0:
        dv0 = gl.zeros([64, _D0], gl.float32, _LAYOUT0)
        dv1 = gl.zeros([64, D1], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16]))
        mbarrier.wait(kv_full.index(0), count & 1)
        steps = (end - begin) * group
        if steps > 0:
            stage = step % X.stages
            mbarrier.wait(q_full.index(stage), (step // X.stages) & 1)
            products = warpgroup_mma_wait(
                0, [_scores(_tile(k_s, opaque_zero(), WIDTH), _tile(q_s, stage, WIDTH), D1)]
            )  # fmt: skip
            m = block_at(0, begin, end, X)
            for i in range(0, steps):
                stage = step % X.stages
                p = weights_of(products, lse_s.index(stage).load(_SCORES), score_scale, softcap, X)
                if (m < whole_begin) | (m >= whole_end):
                    p = only_seen(p, m, n * X.keys, keys - rows, keys, left, right, X)
                p_16 = gl.convert_layout(p.to(q_s.dtype), gl.DotOperandLayout(0, _LAYOUT0, 2))
                mbarrier.wait(p_empty.index(0), (step & 1) ^ 1)
                p_s.store(in_fragment_order(p))
                mbarrier.arrive(p_full.index(0))
                mbarrier.wait(do_full.index(stage), (step // X.stages) & 1)
                do = _tile(do_s, stage, WIDTH)
                dv0_started = warpgroup_mma(p_16, do.slice(0, _D0, dim=1), dv0, is_async=True)
                dv1_started = warpgroup_mma(p_16, do.slice(_D0, D1, dim=1), dv1, is_async=True)
                # After the last step these products are of no use.
                next_stage = (step + 1) % X.stages
                mbarrier.wait(q_full.index(next_stage), ((step + 1) // X.stages) & 1, pred=i + 1 < steps)
                started = _scores(_tile(k_s, opaque_zero(), WIDTH), _tile(q_s, next_stage, WIDTH), D1)
                dv0, dv1, p_16 = warpgroup_mma_wait(2, [dv0_started, dv1_started, p_16])
                mbarrier.arrive(do_empty.index(stage))
                products = warpgroup_mma_wait(0, [started])
                m = m + 1 if X.upwards else m - 1
                if X.grouped:
                    if (m < begin) | (m >= end):
                        m = block_at(0, begin, end, X)
                step += 1
        if X.packed:
            dv0 += poison.to(gl.float32, bitcast=True)
            dv1 += poison.to(gl.float32, bitcast=True)
        # The place of V is free when `derive` is here, that of K when `spread` is.
        all_consumers("bar.sync 8, 384")
        _store_gradient(dv0, dv1, v_s, D1)
        store_rows(dv_desc, batch, head, key0, keys, n * X.keys, 0, v_s.index(0), X.packed)
        wait_for_stores(0)
        mbarrier.arrive(kv_empty.index(0))
        count += 1
        batch, head, key0, _, rows, keys, n, block0, begin, end, whole_begin, whole_end, _, poison = next_tile(
            mail, mail_full, mail_empty, count, 4
        )


@gluon.jit
def _derive(dk_desc, buffers, p_s, ds_s, mail, barriers, where, numbers, X: gl.constexpr):
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    (
        mail_full, mail_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, p_full, p_empty, ds_full, ds_empty,
        may_add,
    ) = barriers  # fmt: skip
    group = where[11]
    scale, score_scale, softcap = numbers
    D1: gl.constexpr = X.dim - _D0
    WIDTH: gl.constexpr = 2 * _D0
    step = 0
    count = 0
    batch, head, key0, _, _, keys, n, _, begin, end, _, _, _, poison = next_tile(mail, mail_full, mail_empty, count, 4)
    while n >= 0:
        dk0 = gl.zeros([64, _D0], gl.float32, _LAYOUT0)
        dk1 = gl.zeros([64, D1], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1, 16]))
        mbarrier.wait(kv_full.index(0), count & 1)
        steps = (end - begin) * group
        if steps > 0:
            stage = step % X.stages
            mbarrier.wait(do_full.index(stage), (step // X.stages) & 1)
            dp = warpgroup_mma_wait(0, [_scores(_tile(v_s, opaque_zero(), WIDTH), _tile(do_s, stage, WIDTH), D1)])
            for i in range(0, steps):
                stage = step % X.stages
                phase = (step // X.stages) & 1
                mbarrier.wait(p_full.index(0), step & 1)
                p = from_fragment_order(p_s.load(in_fragment_order(dp).type.layout), _SCORES)
                ds = score_gradients(
                    p, dp, delta_s.index(stage).load(_SCORES), lse_s.index(stage).load(_SCORES), softcap, X
                )
                mbarrier.arrive(p_empty.index(0))
                mbarrier.arrive(do_empty.index(stage))
                ds_16 = ds.to(q_s.dtype)
                mbarrier.wait(ds_empty.index(stage), phase ^ 1)
                ds_s.index(stage).store(ds_16)
                ds_operand = gl.convert_layout(ds_16, gl.DotOperandLayout(0, _LAYOUT0, 2))
                fence_async_shared()
                mbarrier.arrive(ds_full.index(stage))
                mbarrier.wait(q_full.index(stage), phase)
                q = _tile(q_s, stage, WIDTH)
                dk0_started = warpgroup_mma(ds_operand, q.slice(0, _D0, dim=1), dk0, is_async=True)
                dk1_started = warpgroup_mma(ds_operand, q.slice(_D0, D1, dim=1), dk1, is_async=True)
                # After the last step these products are of no use.
                next_stage = (step + 1) % X.stages
                mbarrier.wait(do_full.index(next_stage), ((step + 1) // X.stages) & 1, pred=i + 1 < steps)
                started = _scores(_tile(v_s, opaque_zero(), WIDTH), _tile(do_s, next_stage, WIDTH), D1)
                dk0, dk1, ds_operand = warpgroup_mma_wait(2, [dk0_started, dk1_started, ds_operand])
                mbarrier.arrive(q_empty.index(stage))
                dp = warpgroup_mma_wait(0, [started])
                step += 1
        dk0 *= scale
        dk1 *= scale
        if X.packed:
            dk0 += poison.to(gl.float32, bitcast=True)
            dk1 += poison.to(gl.float32, bitcast=True)
        all_consumers("bar.sync 8, 384")
        _store_gradient(dk0, dk1, k_s, D1)
        store_rows(dk_desc, batch, head, key0, keys, n * X.keys, 0, k_s.index(0), X.packed)
        wait_for_stores(0)
        mbarrier.arrive(kv_empty.index(0))
        count += 1
        batch, head, key0, _, _, keys, n, _, begin, end, _, _, _, poison = next_tile(
            mail, mail_full, mail_empty, count, 4
        )


@gluon.jit
def _spread(
    sums, k_s, ds_s, mail, mail_full, mail_empty, kv_full, ds_full, ds_empty, may_add, where, X: gl.constexpr
):  # fmt: skip
    all_blocks = where[7]
    group = where[11]
    WIDTH: gl.constexpr = 2 * _D0
    none = gl.zeros([64, _SUMS], gl.float32, _SCORES)
    # In shared memory, columns lie in slabs of 128 bytes.
    k = reinterpret(k_s, [WIDTH // _SUMS, 64, _SUMS], gl.NVMMASharedLayout(128, 16, 2))
    step = 0
    count = 0
    _, head, _, _, _, _, n, block0, begin, end, _, _, edge, _ = next_tile(mail, mail_full, mail_empty, count, 4)
    while n >= 0:
        mbarrier.wait(kv_full.index(0), count & 1)
        for member in range(0, group):
            of_head = sums + ((head * group + member).to(gl.int64) * all_blocks + block0) * (64 * X.dim)
            for i in range(0, end - begin):
                m = block_at(i, begin, end, X)
                at = of_head + m.to(gl.int64) * (64 * X.dim)
                stage = step % X.stages
                mbarrier.wait(ds_full.index(stage), (step // X.stages) & 1)
                ds = ds_s.index(stage).permute((1, 0))
                # A loop, so that the compiler does not put off the sums of one piece until the next one is there.
                for piece in range(0, X.dim // _SUMS):
                    started = warpgroup_mma(ds, k.index(piece), none, use_acc=False, is_async=True)
                    dq = warpgroup_mma_wait(0, [started])
                    if X.deterministic:
                        mbarrier.wait(may_add.index(stage), (step // X.stages) & 1)
                    add_to_sums(dq, at + piece * (64 * _SUMS), is_first_at(m, edge, X), X)
                mbarrier.arrive(ds_empty.index(stage))
                step += 1
        all_consumers("bar.sync 8, 384")
        count += 1
        _, head, _, _, _, _, n, block0, begin, end, _, _, edge, _ = next_tile(mail, mail_full, mail_empty, count, 4)


@gluon.jit(
    do_not_specialize=[
        "tiles", "batch_heads", "together", "rows", "keys", "row_blocks", "all_blocks", "left", "right", "key_heads",
        "group",
    ]
)  # fmt: skip
def wide_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums, turns, ticket, records, tiles, batch_heads,
    together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group, scale, score_scale, softcap,
    HAS_CAP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, GROUPED: gl.constexpr, DETERMINISTIC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(KV_STAGES == 1)
    X: gl.constexpr = constants(
        HAS_CAP, HAS_LEFT, HAS_RIGHT, PACKED, GROUPED, DETERMINISTIC, BM, BN, D, STAGES, KV_STAGES
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES] + q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES] + do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [1] + k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1] + v_desc.block_shape, v_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    p_s = gl.allocate_shared_memory(gl.float32, [BN * BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stats_desc.layout)
    mail = gl.allocate_shared_memory(gl.int32, [MAIL * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    mail_empty = gl.allocate_shared_memory(gl.int64, [MAIL, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    may_add = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    passed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(MAIL):
        mbarrier.init(mail_full.index(i), 1)
        mbarrier.init(mail_empty.index(i), 5 if DETERMINISTIC else 3)  # consumers and turns
    mbarrier.init(kv_full.index(0), 1)
    mbarrier.init(kv_empty.index(0), 2)
    mbarrier.init(p_full.index(0), 1)
    mbarrier.init(p_empty.index(0), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(may_add.index(i), 1)
        mbarrier.init(passed.index(i), 1)
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)  # `weigh` is done with q before `derive` is
        mbarrier.init(do_full.index(i), 1)
        mbarrier.init(do_empty.index(i), 2)
        mbarrier.init(ds_full.index(i), 1)
        mbarrier.init(ds_empty.index(i), 1)
    fence_async_shared()
    where = (records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group)
    numbers = (scale, score_scale, softcap)
    descriptors = (q_desc, k_desc, v_desc, do_desc, stats_desc)
    buffers = (q_s, k_s, v_s, do_s, lse_s, delta_s)
    loading = (mail_full, mail_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty)
    barriers = (
        mail_full, mail_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, p_full, p_empty, ds_full, ds_empty,
        may_add,
    )  # fmt: skip
    # Argument tuples have to stand inside the call.
    if DETERMINISTIC:
        gl.warp_specialize([
            (_weigh, (dv_desc, buffers, p_s, mail, barriers, where, numbers, X)),
            (_derive, (dk_desc, buffers, p_s, ds_s, mail, barriers, where, numbers, X)),
            (_spread, (sums, k_s, ds_s, mail, mail_full, mail_empty, kv_full, ds_full, ds_empty, may_add, where, X)),
            (produce, (descriptors, buffers, mail, ticket, loading, where, X)),
            (await_turns, (turns, mail, mail_full, mail_empty, may_add, passed, where, X)),
            (pass_turns, (turns, mail, mail_full, mail_empty, ds_empty, passed, where, X)),
        ], [4, 4, 1, 1, 1], [208, 72, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_weigh, (dv_desc, buffers, p_s, mail, barriers, where, numbers, X)),
            (_derive, (dk_desc, buffers, p_s, ds_s, mail, barriers, where, numbers, X)),
            (_spread, (sums, k_s, ds_s, mail, mail_full, mail_empty, kv_full, ds_full, ds_empty, may_add, where, X)),
            (produce, (descriptors, buffers, mail, ticket, loading, where, X)),
        ], [4, 4, 1], [208, 72, 24])  # fmt: skip
