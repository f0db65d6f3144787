"""The producer warp of the forward: q, k and v through TMA into rings in shared memory, as far ahead as there is room."""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.blank_rows import blank_outside, blank_unseen
from headwise.backends.triton.hopper.forward_schedule import (
    ROWS,
    await_ticket,
    block_range,
    count_works,
    find_tile,
    post_tile,
    request_ticket,
)
from headwise.backends.triton.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    thread_barrier,
)
from headwise.backends.triton.hopper.mailbox import wait_empty
from headwise.backends.triton.hopper.mask_words import entry_at, lists_of, seen_words
from headwise.backends.triton.hopper.sequence_rows import load_rows


class Ring(NamedTuple):
    """Tiles in shared memory, in one or two pieces of the head dim, and their barriers."""

    x0: Any
    x1: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """The shared memory of a program."""

    q: Any  # Ring; each consumer has q_stages places of its own
    k: Any
    v: Any
    o0: Any
    o1: Any
    mailbox: Any
    cut_full: Any  # a block of values has arrived, of which some are to be zeroed
    bias: Any  # Ring, or None


class Inputs(NamedTuple):
    """Descriptors of q, k and v, in one or two pieces of the head dim."""

    q0: Any
    q1: Any
    k0: Any
    k1: Any
    v0: Any
    v1: Any
    bias: Any


@gluon.jit
def produce(inputs, call, shared, X: gl.constexpr):
    """Draw tiles, post them to the consumers, and load their q, k and v, blocks of keys from the last one downward."""
    CONSUMERS: gl.constexpr = X.consumers
    QUERIES: gl.constexpr = ROWS * X.consumers
    works, wrong = count_works(call, X)
    done, blocks, cuts = 0, 0, 0
    source = find_tile(gl.program_id(0), works, wrong, call, X)
    post_tile(shared.mailbox, 0, source, call, X)
    while source.row >= 0:
        requested = request_ticket(call.counter)
        keys = gl.maximum(source.keys, 0)
        offset = keys - source.rows
        lowest, past = block_range(source.row, source.rows, QUERIES, offset, keys, call, X)
        first = 0  # key that some query of the sequence sees
        if X.has_left:
            first = gl.maximum(offset - call.left, 0)
        if X.masked:
            lowest, past = 0, source.blocks
        entry = source.entry
        for c in gl.static_range(CONSUMERS):
            _load_queries(inputs, shared.q, done, source, c, X)
        block, unseen = _block_of(entry, past - 1, X)
        _load_keys(inputs, shared.k, blocks, source, call, keys, block, X)
        if X.bias_rows > 0:
            _load_bias(inputs.bias, shared.bias, blocks, source, call, block, X)
        if not X.keys_first:
            cuts = _load_values(inputs, shared, blocks, cuts, source, call, keys, block, unseen, first, X)
        blocks += 1
        done += 1
        # The next tile, found early so that nobody waits for it.
        coming = find_tile(await_ticket(requested, call.counter, works), works, wrong, call, X)
        post_tile(shared.mailbox, done, coming, call, X)
        for i in range(1, past - lowest):
            if X.masked:
                entry = entry_at(source.list_at, i)
            block, unseen = _block_of(entry, past - 1 - i, X)
            _load_keys(inputs, shared.k, blocks, source, call, keys, block, X)
            if X.bias_rows > 0:
                _load_bias(inputs.bias, shared.bias, blocks, source, call, block, X)
            if X.keys_first:
                cuts = _load_values(inputs, shared, blocks - 1, cuts, source, call, keys, past - i, False, first, X)
            else:
                cuts = _load_values(inputs, shared, blocks, cuts, source, call, keys, block, unseen, first, X)
            blocks += 1
        if X.keys_first:
            cuts = _load_values(inputs, shared, blocks - 1, cuts, source, call, keys, lowest, False, first, X)
        source = coming


@gluon.jit
def _block_of(entry, block, X: gl.constexpr):
    """(block, are there keys in it that nobody sees?) of an entry of a list; without one, as given."""
    if X.masked:
        return entry >> 1, (entry & 1) != 0
    else:
        return block, False


@gluon.jit
def _load_queries(inputs, ring, done, source, C: gl.constexpr, X: gl.constexpr):
    """The 64 queries of consumer ``C``; ``done`` tiles went before."""
    at = C * X.q_stages + done % X.q_stages
    row, start, rows = source.row + C * ROWS, source.start, source.rows
    arrived = ring.full.index(at)
    mbarrier.wait(ring.empty.index(at), ((done // X.q_stages) & 1) ^ 1)
    mbarrier.expect(arrived, ROWS * (X.d0 + X.d1) * 2)
    load_rows(inputs.q0, source.batch, source.head, start, rows, row, 0, arrived, ring.x0.index(at), X.packed)
    if X.d1 > 0:
        load_rows(inputs.q1, source.batch, source.head, start, rows, row, X.d0, arrived, ring.x1.index(at), X.packed)


@gluon.jit
def _load_keys(inputs, ring, count, source, call, keys, block, X: gl.constexpr):
    """A block of keys; ``count`` blocks went before it."""
    wait_empty(ring.empty, count, X.k_stages)
    at = count % X.k_stages
    _load_block(inputs.k0, inputs.k1, ring, at, ring.full.index(at), source, call, keys, block, X.d0, X.d1, X)


@gluon.jit
def _load_bias(bias, ring, count, source, call, block, X: gl.constexpr):
    """The bias of a tile of queries and a block of keys."""
    wait_empty(ring.empty, count, X.b_stages)
    at = count % X.b_stages
    arrived = ring.full.index(at)
    entry, head, row = source.batch * call.bias_batch, source.head * call.bias_head, source.row
    if X.bias_rows == 1:
        row = 0
    mbarrier.expect(arrived, X.bias_rows * X.keys * (bias.dtype.primitive_bitwidth // 8))
    load_tile(bias, [entry, head, row, block * X.keys], arrived, ring.x0.index(at))


@gluon.jit
def _load_values(inputs, shared, count, cuts, source, call, keys, block, unseen, first, X: gl.constexpr):
    """A block of values; ``count`` blocks went before it. Returns how many blocks were cut so far.

    What nobody sees may hold NaN, and zero times NaN is NaN: values outside [first, keys), and where a mask hides them from
    everybody (``unseen``), are overwritten with zeros before the block is handed on. Sequences of a packed batch end with
    zeros.
    """
    ring = shared.v
    wait_empty(ring.empty, count, X.v_stages)
    at = count % X.v_stages
    if (X.cut and not X.packed) or X.masked:
        here, past = first - block * X.keys, keys - block * X.keys
        outside = (here > 0) | (past < X.keys)
        if not X.cut:
            outside = unseen
        elif X.masked:
            outside = outside | unseen
        if outside:
            arrived = shared.cut_full.index(0)
            _load_block(inputs.v0, inputs.v1, ring, at, arrived, source, call, keys, block, X.e0, X.e1, X)
            mbarrier.wait(arrived, cuts & 1)
            cuts += 1
            if X.cut:
                blank_outside(ring.x0, at, here, past, X.keys, X.e0)
                if X.e1 > 0:
                    blank_outside(ring.x1, at, here, past, X.keys, X.e1)
            if X.masked:
                lists = lists_of(call.mask, source.batch, source.head)
                seen, half = seen_words(call.mask, lists, block, X.keys)
                blank_unseen(ring.x0, at, seen, half, 1, 0, X.keys, X.e0)
                if X.e1 > 0:
                    blank_unseen(ring.x1, at, seen, half, 1, 0, X.keys, X.e1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ring.full.index(at))
        else:
            _load_block(inputs.v0, inputs.v1, ring, at, ring.full.index(at), source, call, keys, block, X.e0, X.e1, X)
    else:
        _load_block(inputs.v0, inputs.v1, ring, at, ring.full.index(at), source, call, keys, block, X.e0, X.e1, X)
    return cuts


@gluon.jit
def _load_block(
    x0, x1, ring, at, arrived, source, call, keys, block, W0: gl.constexpr, W1: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """A block of keys or values, in one or two pieces of the widths W0 and W1, into place ``at``."""
    head, row = source.head // call.group, block * X.keys
    mbarrier.expect(arrived, X.keys * (W0 + W1) * 2)
    load_rows(x0, source.batch, head, source.k_start, keys, row, 0, arrived, ring.x0.index(at), X.packed)
    if W1 > 0:
        load_rows(x1, source.batch, head, source.k_start, keys, row, W0, arrived, ring.x1.index(at), X.packed)
