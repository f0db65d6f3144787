"""The warp that loads: q, k and v through TMA into rings in shared memory, as far ahead as there is room."""

# ruff: noqa: RUF059  (kernels unpack the tuples they are given and use what they need)

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    thread_barrier,
)
from headwise.backends.triton.hopper.schedule import ROWS, block_range, draw, find_work, offsets_are_wrong, post


@gluon.jit
def _blank(
    values, at, first, past,
    KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Zero the rows outside [first, past) of a block of values: what nobody sees may hold NaN, and zero times NaN is NaN.

    Shared memory holds columns of 64 elements (or all, if fewer), in groups of eight rows.
    """
    WIDTH: gl.constexpr = D if D < 64 else 64
    GROUPS: gl.constexpr = KEYS // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, 2)
    groups = reinterpret(values, [values.shape[0] * D // WIDTH * GROUPS, 8, WIDTH], SHARED)
    row = gl.arange(0, 8, gl.SliceLayout(1, TILE))
    for group in range(0, GROUPS):
        if (group * 8 < first) | (group * 8 + 8 > past):
            here = ((row + group * 8 >= first) & (row + group * 8 < past))[:, None]
            for column in gl.static_range(D // WIDTH):
                piece = groups.index((at * (D // WIDTH) + column) * GROUPS + group)
                x = piece.load(TILE)
                piece.store(gl.where(here, x, 0.0).to(x.dtype))


@gluon.jit
def _load_keys(descriptors, shared, barriers, count, batch, head, start, block, X: gl.constexpr):
    """A block of keys into its ring; ``count`` blocks went before it."""
    q0, q1, k0, k1, v0, v1 = descriptors
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    BYTES: gl.constexpr = X.keys * (X.d0 + X.d1) * 2
    token = start + block * X.keys
    at = count % X.k_stages
    mbarrier.wait(k_empty.index(at), ((count // X.k_stages) & 1) ^ 1)
    mbarrier.expect(k_full.index(at), BYTES)
    load_tile(k0, [batch, head, token, 0], k_full.index(at), k0_s.index(at))
    if X.d1 > 0:
        load_tile(k1, [batch, head, token, X.d0], k_full.index(at), k1_s.index(at))


@gluon.jit
def _load_values(descriptors, shared, barriers, count, cuts, batch, head, start, block, first, keys, X: gl.constexpr):
    """A block of values into its ring; ``count`` blocks went before it. Returns how many were cut so far."""
    q0, q1, k0, k1, v0, v1 = descriptors
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    BYTES: gl.constexpr = X.keys * (X.d0 + X.d1) * 2
    token = start + block * X.keys
    at = count % X.v_stages
    mbarrier.wait(v_empty.index(at), ((count // X.v_stages) & 1) ^ 1)
    if X.cut:
        here, past = first - block * X.keys, keys - block * X.keys
        if (here > 0) | (past < X.keys):
            bar = cut_full.index(0)
            mbarrier.expect(bar, BYTES)
            load_tile(v0, [batch, head, token, 0], bar, v0_s.index(at))
            if X.d1 > 0:
                load_tile(v1, [batch, head, token, X.d0], bar, v1_s.index(at))
            mbarrier.wait(bar, cuts & 1)
            cuts += 1
            _blank(v0_s, at, here, past, X.keys, X.d0)
            if X.d1 > 0:
                _blank(v1_s, at, here, past, X.keys, X.d1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(v_full.index(at))
        else:
            mbarrier.expect(v_full.index(at), BYTES)
            load_tile(v0, [batch, head, token, 0], v_full.index(at), v0_s.index(at))
            if X.d1 > 0:
                load_tile(v1, [batch, head, token, X.d0], v_full.index(at), v1_s.index(at))
    else:
        mbarrier.expect(v_full.index(at), BYTES)
        load_tile(v0, [batch, head, token, 0], v_full.index(at), v0_s.index(at))
        if X.d1 > 0:
            load_tile(v1, [batch, head, token, X.d0], v_full.index(at), v1_s.index(at))
    return cuts


@gluon.jit
def produce(descriptors, tensors, numbers, shared, barriers, X: gl.constexpr):
    CONSUMERS: gl.constexpr = X.consumers
    q0, q1, k0, k1, v0, v1 = descriptors
    out, lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k, o_h,
        o_s, head_dim,
    ) = numbers  # fmt: skip
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    QUERIES: gl.constexpr = ROWS * X.consumers
    wrong = 0
    if X.packed:
        wrong = offsets_are_wrong(cu_q, cu_k, sequences, q_length, k_length, longest_q, longest_k, X)
    done, blocks, cuts = 0, 0, 0
    ticket, row, batch, head, start, rows, k_start, keys = find_work(
        gl.program_id(0),
        wrong,
        tensors,
        numbers,
        X,
    )
    post(mail, mail_full, mail_empty, 0, row, batch * heads + head, keys, start, rows, X)
    while row >= 0:
        keys = gl.maximum(keys, 0)
        key_head = head // group
        offset = keys - rows
        lowest, past = block_range(row, rows, QUERIES, offset, keys, left, right, X)
        first = 0  # key that some query of the sequence sees
        if X.has_left:
            first = gl.maximum(offset - left, 0)
        for c in gl.static_range(CONSUMERS):
            at = c * X.q_stages + done % X.q_stages
            mbarrier.wait(q_empty.index(at), ((done // X.q_stages) & 1) ^ 1)
            mbarrier.expect(q_full.index(at), ROWS * (X.d0 + X.d1) * 2)
            load_tile(q0, [batch, head, start + row + c * ROWS, 0], q_full.index(at), q0_s.index(at))
            if X.d1 > 0:
                load_tile(q1, [batch, head, start + row + c * ROWS, X.d0], q_full.index(at), q1_s.index(at))
        _load_keys(descriptors, shared, barriers, blocks, batch, key_head, k_start, past - 1, X)
        if not X.keys_first:
            cuts = _load_values(
                descriptors, shared, barriers, blocks, cuts, batch, key_head, k_start, past - 1, first, keys, X
            )
        blocks += 1
        done += 1
        # The next piece of work, drawn early so that nobody waits for it.
        ticket, next_row, next_batch, next_head, next_start, next_rows, next_k_start, next_keys = find_work(
            draw(counter, works),
            wrong,
            tensors,
            numbers,
            X,
        )
        post(
            mail, mail_full, mail_empty, done, next_row, next_batch * heads + next_head, next_keys, next_start, next_rows, X,
        )  # fmt: skip
        for i in range(1, past - lowest):
            _load_keys(descriptors, shared, barriers, blocks, batch, key_head, k_start, past - 1 - i, X)
            if X.keys_first:
                cuts = _load_values(
                    descriptors, shared, barriers, blocks - 1, cuts, batch, key_head, k_start, past - i, first, keys, X
                )
            else:
                cuts = _load_values(
                    descriptors, shared, barriers, blocks, cuts, batch, key_head, k_start, past - 1 - i, first, keys, X
                )
            blocks += 1
        if X.keys_first:
            cuts = _load_values(
                descriptors, shared, barriers, blocks - 1, cuts, batch, key_head, k_start, lowest, first, keys, X
            )
        row, batch, head, start, rows, k_start, keys = (
            next_row, next_batch, next_head, next_start, next_rows, next_k_start, next_keys
        )  # fmt: skip
