"""The warp that loads: q, k and v through TMA into rings in shared memory, as far ahead as there is room."""

# ruff: noqa: RUF059  (kernels unpack the tuples they are given and use what they need)

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
)
from headwise.backends.triton.hopper.schedule import ROWS, answer, ask, block_range, count_works, find_work, post
from headwise.backends.triton.hopper.sequence_rows import load_rows


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
def _load_block(x0, x1, x0_s, x1_s, at, arrived, batch, head, start, keys, block, X: gl.constexpr):
    """A block of keys or values into place ``at``."""
    mbarrier.expect(arrived, X.keys * (X.d0 + X.d1) * 2)
    load_rows(x0, batch, head, start, keys, block * X.keys, 0, arrived, x0_s.index(at), X.packed)
    if X.d1 > 0:
        load_rows(x1, batch, head, start, keys, block * X.keys, X.d0, arrived, x1_s.index(at), X.packed)


@gluon.jit
def _load_keys(descriptors, shared, barriers, count, batch, head, start, keys, block, X: gl.constexpr):
    """A block of keys into its ring; ``count`` blocks went before it."""
    q0, q1, k0, k1, v0, v1 = descriptors
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    at = count % X.k_stages
    mbarrier.wait(k_empty.index(at), ((count // X.k_stages) & 1) ^ 1)
    _load_block(k0, k1, k0_s, k1_s, at, k_full.index(at), batch, head, start, keys, block, X)


@gluon.jit
def _load_values(
    descriptors, shared, barriers, count, cuts, batch, head, start, keys, block, first, X: gl.constexpr
):  # fmt: skip
    """A block of values into its ring; ``count`` blocks went before it. Returns how many were cut so far."""
    q0, q1, k0, k1, v0, v1 = descriptors
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    at = count % X.v_stages
    mbarrier.wait(v_empty.index(at), ((count // X.v_stages) & 1) ^ 1)
    if X.cut and not X.packed:  # sequences of a packed batch end with zeros
        here, past = first - block * X.keys, keys - block * X.keys
        if (here > 0) | (past < X.keys):
            _load_block(v0, v1, v0_s, v1_s, at, cut_full.index(0), batch, head, start, keys, block, X)
            mbarrier.wait(cut_full.index(0), cuts & 1)
            cuts += 1
            _blank(v0_s, at, here, past, X.keys, X.d0)
            if X.d1 > 0:
                _blank(v1_s, at, here, past, X.keys, X.d1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(v_full.index(at))
        else:
            _load_block(v0, v1, v0_s, v1_s, at, v_full.index(at), batch, head, start, keys, block, X)
    else:
        _load_block(v0, v1, v0_s, v1_s, at, v_full.index(at), batch, head, start, keys, block, X)
    return cuts


@gluon.jit
def produce(descriptors, tensors, numbers, shared, barriers, X: gl.constexpr):
    CONSUMERS: gl.constexpr = X.consumers
    q0, q1, k0, k1, v0, v1 = descriptors
    lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k
    ) = numbers  # fmt: skip
    q0_s, q1_s, k0_s, k1_s, v0_s, v1_s, o0_s, o1_s, mail = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty, cut_full = barriers
    QUERIES: gl.constexpr = ROWS * X.consumers
    works, wrong = count_works(tensors, numbers, X)
    done, blocks, cuts = 0, 0, 0
    row, batch, head, start, rows, k_start, keys = find_work(gl.program_id(0), works, wrong, tensors, numbers, X)
    post(mail, mail_full, mail_empty, 0, row, batch * heads + head, keys, start, rows, X)
    while row >= 0:
        asked = ask(counter)
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
            load_rows(q0, batch, head, start, rows, row + c * ROWS, 0, q_full.index(at), q0_s.index(at), X.packed)
            if X.d1 > 0:
                load_rows(
                    q1, batch, head, start, rows, row + c * ROWS, X.d0, q_full.index(at), q1_s.index(at), X.packed
                )
        _load_keys(descriptors, shared, barriers, blocks, batch, key_head, k_start, keys, past - 1, X)
        if not X.keys_first:
            cuts = _load_values(
                descriptors, shared, barriers, blocks, cuts, batch, key_head, k_start, keys, past - 1, first, X
            )
        blocks += 1
        done += 1
        # The next piece of work, found early so that nobody waits for it.
        next_row, next_batch, next_head, next_start, next_rows, next_k_start, next_keys = find_work(
            answer(asked, counter, works), works, wrong, tensors, numbers, X
        )
        post(
            mail, mail_full, mail_empty, done, next_row, next_batch * heads + next_head, next_keys, next_start, next_rows, X,
        )  # fmt: skip
        for i in range(1, past - lowest):
            _load_keys(descriptors, shared, barriers, blocks, batch, key_head, k_start, keys, past - 1 - i, X)
            if X.keys_first:
                cuts = _load_values(
                    descriptors, shared, barriers, blocks - 1, cuts, batch, key_head, k_start, keys, past - i, first, X
                )
            else:
                cuts = _load_values(
                    descriptors, shared, barriers, blocks, cuts, batch, key_head, k_start, keys, past - 1 - i, first, X
                )
            blocks += 1
        if X.keys_first:
            cuts = _load_values(
                descriptors, shared, barriers, blocks - 1, cuts, batch, key_head, k_start, keys, lowest, first, X
            )
        row, batch, head, start, rows, k_start, keys = (
            next_row, next_batch, next_head, next_start, next_rows, next_k_start, next_keys
        )  # fmt: skip
