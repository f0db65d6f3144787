"""What surrounds the products of the Hopper backward kernels: which tile is next, where it lies, loading, and turns.

A tile is a block of keys of one key head; a program works on one after the other. Tiles of one head add to the same blocks
of dQ. Where the result must be the same bits every time, they take turns.
"""

# ruff: noqa: RUF005, SIM102  (Gluon has no starred lists; constants have an `if` of their own)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.backward_rows import RECORD
from headwise.backends.triton.hopper.blank_rows import blank_blind, blank_unseen
from headwise.backends.triton.hopper.gluon_names import (
    Members,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    thread_barrier,
)
from headwise.backends.triton.hopper.mailbox import post, read, wait_empty, wait_full
from headwise.backends.triton.hopper.mask_words import (
    entry_at,
    lists_of,
    seen_words,
    some_unseen,
)
from headwise.backends.triton.hopper.sequence_rows import load_rows
from headwise.backends.triton.hopper.variants import Constants

FIELDS = gl.constexpr(14)  # of a `WorkItem`
# Parameters of both kernels of which no value is compiled for, and pointers that may lie anywhere.
NO_CONSTANTS = [
    "tiles", "batch_heads", "heads_together", "rows", "keys", "row_blocks", "all_blocks", "left", "right", "key_heads",
    "group", "bits_batch", "bits_head", "bits_block", "bits_row", "lists_batch", "lists_head", "lists_tile", "seen_at",
    "bias_batch", "bias_head", "bias_row", "bias_key",
]  # fmt: skip
ANY_ALIGNMENT = ["ticket", "bits", "lists", "blind", "stats"]


class Variant(NamedTuple):
    """The constants of a compiled backward kernel."""

    has_cap: bool
    has_left: bool
    has_right: bool
    packed: bool
    grouped: bool  # several query heads share a key head
    deterministic: bool
    rows: int  # of queries per step
    keys: int  # per tile
    dim: int  # columns of a block of sums of dQ
    d0: int  # the pieces of queries and keys that products are done in
    d1: int
    e0: int  # those of values and grad_out
    e1: int
    stages: int  # steps that are loaded ahead
    kv_stages: int  # tiles whose keys and values there is room for
    masked: bool = False  # a packed mask, with lists of the blocks that tiles visit
    bias_rows: int = 0  # of a block of the bias: those of a step, one if it is broadcast over the queries, or none


@constexpr_function
def constants(variant: Any) -> Any:
    """With one name more: ``upwards``, for tiles that take turns in a triangle.

    Their last keys go first, and each walks from the first block of queries that sees it to the last one: tiles that start
    together then follow each other through the blocks, one step apart. In all other calls the first keys go first and
    blocks are walked from the last to the first.
    """
    x = Members(variant)
    return Constants(**x, upwards=x["deterministic"] and x["has_right"] and not x["has_left"] and not x["packed"])


class Call(NamedTuple):
    """What a launch is given beside descriptors."""

    sums: Any  # of dQ, in float32, block by block in the order of a warpgroup's registers
    turns: Any  # of each block of dQ: how many tiles have added to it; or None
    ticket: Any  # how many tiles are drawn
    records: Any  # where the tiles of a packed batch lie: `backward_rows.find_tiles`; or None
    tiles: Any  # of keys, per head
    batch_heads: Any  # batch · key heads
    heads_together: Any
    rows: Any
    keys: Any
    row_blocks: Any  # of a sequence
    all_blocks: Any  # of a head
    left: Any
    right: Any
    key_heads: Any
    group: Any  # query heads of a key head
    scale: Any
    score_scale: Any  # times a product is a logit in base 2, or twice the argument of its tanh
    softcap: Any  # times log2(e)
    mask: Any  # a `Mask`, or None
    bias: Any  # where a tile's part of the bias lies: a `BiasPlace`, or None
    blind: Any  # with a mask or a bias: has a block of queries some that see nothing?
    stats: Any  # what ``Inputs.stats`` describes


class BiasPlace(NamedTuple):
    batch: Any  # 1, or 0 where the bias is broadcast over the batch
    head: Any
    row: Any  # of the first query and the first key
    key: Any


class WorkItem(NamedTuple):
    """The unit of work that a ticket stands for: where a tile of keys lies and what it sees."""

    batch: Any
    head: Any  # of keys
    first_key: Any  # of the sequence
    first_row: Any
    rows: Any  # of the sequence
    keys: Any
    number: Any  # in its sequence; -1: there is no more work
    first_block: Any  # of the sequence, among the blocks of queries of a head
    begin: Any  # blocks of queries that see some of its keys: [begin, end); with a mask, entries of its lists, of all heads
    end: Any
    whole_begin: Any  # those of them that need no mask
    whole_end: Any
    edge: Any  # where the blocks end that a tile before it adds to: `is_first_at`
    poison: Any  # bits to add to its gradients: zero or, where the offsets of a packed batch make no sense, NaN


class Inputs(NamedTuple):
    """Descriptors of what is loaded. ``stats``: lse and delta of a block of queries, a row each."""

    q: Any
    k: Any
    v: Any
    do: Any
    stats: Any
    bias: Any
    # Second pieces of q, k, v and grad_out, where they have shared memory of their own; else None.
    q1: Any = None
    k1: Any = None
    v1: Any = None
    do1: Any = None


class Buffers(NamedTuple):
    """Shared memory for what is loaded, and its barriers."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    kv_full: Any
    kv_empty: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    cut: Any  # what has arrived is to be zeroed in part; None without a mask or a bias
    bias: Any  # queries down; arrives with q, and its place is free when that of q is
    q1: Any = None  # as in `Inputs`; they arrive with the first pieces
    k1: Any = None
    v1: Any = None
    do1: Any = None


@gluon.jit
def list_of(tile, member, call):
    """``(list, blocks)`` of a tile and a query head of its key head."""
    lists = lists_of(call.mask, tile.batch, tile.head * call.group + member)
    at = lists + tile.number * call.mask.lists_tile
    return at, gl.load(at)


@gluon.jit
def block_and_rank(entry):
    """Of an entry of a list: a block of queries, and how many tiles add to it before this one."""
    return entry & 0x7FFF, entry >> 16


@gluon.jit
def needs_mask(entry):
    return (entry & 0x8000) != 0


@gluon.jit
def new_tiles(inputs, X: gl.constexpr):
    """Shared memory for what is loaded: q, k, v, grad_out, lse and delta, the first members of `Buffers`."""
    DTYPE: gl.constexpr = inputs.q.dtype
    q = gl.allocate_shared_memory(DTYPE, [X.stages] + inputs.q.block_shape, inputs.q.layout)
    do = gl.allocate_shared_memory(DTYPE, [X.stages] + inputs.do.block_shape, inputs.do.layout)
    k = gl.allocate_shared_memory(DTYPE, [X.kv_stages] + inputs.k.block_shape, inputs.k.layout)
    v = gl.allocate_shared_memory(DTYPE, [X.kv_stages] + inputs.v.block_shape, inputs.v.layout)
    lse = gl.allocate_shared_memory(gl.float32, [X.stages, 1, X.rows], inputs.stats.layout)
    delta = gl.allocate_shared_memory(gl.float32, [X.stages, 1, X.rows], inputs.stats.layout)
    return q, k, v, do, lse, delta


class Turns(NamedTuple):
    """Barriers for each step that is under way: its sums may be added; the turn has been passed on."""

    may_add: Any
    passed: Any


@gluon.jit
def new_second_tiles(inputs, X: gl.constexpr):
    """Shared memory for the second pieces of q, k, v and grad_out, the last members of `Buffers`."""
    DTYPE: gl.constexpr = inputs.q.dtype
    q = gl.allocate_shared_memory(DTYPE, [X.stages] + inputs.q1.block_shape, inputs.q1.layout)
    k = gl.allocate_shared_memory(DTYPE, [X.kv_stages] + inputs.k1.block_shape, inputs.k1.layout)
    v = gl.allocate_shared_memory(DTYPE, [X.kv_stages] + inputs.v1.block_shape, inputs.v1.layout)
    do = gl.allocate_shared_memory(DTYPE, [X.stages] + inputs.do1.block_shape, inputs.do1.layout)
    return q, k, v, do


@gluon.jit
def block_at(i, begin, end, X: gl.constexpr):
    """The i-th block of queries that a tile visits of those from ``begin`` to ``end``."""
    if X.upwards:
        return begin + i
    else:
        return end - 1 - i


@gluon.jit
def is_first_at(block, tile, X: gl.constexpr):
    """Is a tile the first of all to add to a block of dQ?"""
    if X.upwards:
        return block < tile.edge
    else:
        return block >= tile.edge


@gluon.jit
def next_tile(mailbox, count):
    return WorkItem(*read(mailbox, count, FIELDS))


@gluon.jit
def produce(inputs, buffers, mailbox, call, X: gl.constexpr):
    """Draw tiles; for each, load its keys and values, and grad_out and q of every block of queries as there is room.

    A program draws its next tile before it is done with this one. Still, a tile waits only for tiles of lower tickets, and
    they are all being worked on, or are next in a program whose tile has a lower ticket.
    """
    BM: gl.constexpr = X.rows
    SECOND: gl.constexpr = inputs.q1 is not None
    Q_BYTES: gl.constexpr = BM * (inputs.q.block_shape[-1] + (X.d1 if SECOND else 0)) * 2 + BM * 4
    DO_BYTES: gl.constexpr = BM * (inputs.do.block_shape[-1] + (X.e1 if SECOND else 0)) * 2 + BM * 4
    BIAS_BITS: gl.constexpr = 0 if X.bias_rows == 0 else inputs.bias.dtype.primitive_bitwidth
    BIAS_BYTES: gl.constexpr = X.bias_rows * X.keys * BIAS_BITS // 8
    step = 0
    count = 0
    works = call.tiles * call.batch_heads
    cuts = 0
    ticket = gl.atomic_add(call.ticket, 1, sem="relaxed")
    while ticket < works:
        tile = _tile_of(ticket, call, X)
        if tile.number * X.keys < tile.keys:  # a packed batch has some tiles more
            post(mailbox, count, tile)
            if tile.begin == tile.end:
                cuts = _load_keys(inputs, buffers, tile, count, cuts, call, X)
            first_step = step
            for member in range(0, call.group):
                q_head = tile.head * call.group + member
                blocks = tile.end - tile.begin
                if X.masked:
                    list_at, blocks = list_of(tile, member, call)
                for i in range(0, blocks):
                    block = block_at(i, tile.begin, tile.end, X)
                    if X.masked:
                        block, _ = block_and_rank(entry_at(list_at, i))
                    stage = step % X.stages
                    stats_row = (q_head * call.all_blocks + tile.first_block + block) * 2
                    wait_empty(buffers.do_empty, step, X.stages)
                    arrived = buffers.do_full.index(stage)
                    blind = False
                    if X.masked or X.bias_rows > 0:
                        blind = gl.load(call.blind + q_head * call.all_blocks + tile.first_block + block) != 0
                        if blind:
                            arrived = buffers.cut.index(0)
                            wait_empty(buffers.q_empty, step, X.stages)
                            mbarrier.expect(arrived, Q_BYTES + DO_BYTES + BIAS_BYTES)
                        else:
                            mbarrier.expect(arrived, DO_BYTES)
                    else:
                        mbarrier.expect(arrived, DO_BYTES)
                    _load_queries(inputs.do, tile, q_head, block, 0, arrived, buffers.do.index(stage), X)
                    if SECOND:
                        _load_queries(inputs.do1, tile, q_head, block, X.e0, arrived, buffers.do1.index(stage), X)
                    load_tile(inputs.stats, [stats_row + 1, 0], arrived, buffers.delta.index(stage))
                    if X.masked or X.bias_rows > 0:
                        if not blind:
                            wait_empty(buffers.q_empty, step, X.stages)
                            arrived = buffers.q_full.index(stage)
                            mbarrier.expect(arrived, Q_BYTES + BIAS_BYTES)
                    else:
                        wait_empty(buffers.q_empty, step, X.stages)
                        arrived = buffers.q_full.index(stage)
                        mbarrier.expect(arrived, Q_BYTES + BIAS_BYTES)
                    if X.bias_rows > 0:
                        _load_bias(inputs.bias, call, tile, q_head, block, arrived, buffers.bias.index(stage), X)
                    _load_queries(inputs.q, tile, q_head, block, 0, arrived, buffers.q.index(stage), X)
                    if SECOND:
                        _load_queries(inputs.q1, tile, q_head, block, X.d0, arrived, buffers.q1.index(stage), X)
                    load_tile(inputs.stats, [stats_row, 0], arrived, buffers.lse.index(stage))
                    if X.masked or X.bias_rows > 0:
                        if blind:  # what they hold must not meet the products: zero times NaN is NaN
                            mbarrier.wait(arrived, cuts & 1)
                            cuts += 1
                            lse = call.stats + stats_row.to(gl.int64) * BM
                            blank_blind(buffers.q, stage, lse, BM, inputs.q.block_shape[-1])
                            blank_blind(buffers.do, stage, lse, BM, inputs.do.block_shape[-1])
                            fence_async_shared()
                            thread_barrier()
                            mbarrier.arrive(buffers.do_full.index(stage))
                            mbarrier.arrive(buffers.q_full.index(stage))
                    # After the first q: these places may still be taken by the tile before.
                    if X.masked:
                        if step == first_step:
                            cuts = _load_keys(inputs, buffers, tile, count, cuts, call, X)
                    else:
                        if (member == 0) & (i == 0):
                            cuts = _load_keys(inputs, buffers, tile, count, cuts, call, X)
                    step += 1
            count += 1
        ticket = gl.atomic_add(call.ticket, 1, sem="relaxed")
    if ticket == works + gl.num_programs(0) - 1:  # nobody draws after this one: the next launch finds a zero
        gl.store(call.ticket, 0)
    post(mailbox, count, WorkItem(0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def _load_queries(desc, tile, head, block, column, arrived, buffer, X: gl.constexpr):
    load_rows(desc, tile.batch, head, tile.first_row, tile.rows, block * X.rows, column, arrived, buffer, X.packed)


@gluon.jit
def _load_bias(desc, call, tile, head, block, arrived, buffer, X: gl.constexpr):
    place, row = call.bias, 0
    if X.bias_rows > 1:
        row = place.row + block * X.rows
    key = place.key + tile.number * X.keys
    load_tile(desc, [tile.batch * place.batch, head * place.head, row, key], arrived, buffer)


@gluon.jit
def _load_keys(inputs, buffers, tile, count, cuts, call, X: gl.constexpr):
    """K and V of the ``count``-th tile of this program. Returns how many tiles had keys cut out so far.

    Keys that a mask hides from all queries may hold NaN: they and their values are overwritten with zeros.
    """
    at = count % X.kv_stages
    arrived = buffers.kv_full.index(at)
    wait_empty(buffers.kv_empty, count, X.kv_stages)
    if X.masked:
        members, step = 1, 0
        if X.grouped:
            if call.mask.lists_head > 0:
                members, step = call.group, call.mask.lists_head
        lists = lists_of(call.mask, tile.batch, tile.head * call.group)
        seen, half = seen_words(call.mask, lists, tile.number, X.keys)
        if some_unseen(seen, half, members, step, X.keys):
            cut = buffers.cut.index(0)
            _copy_keys(inputs, buffers, at, tile, cut, X)
            mbarrier.wait(cut, cuts & 1)
            cuts += 1
            blank_unseen(buffers.k, at, seen, half, members, step, X.keys, inputs.k.block_shape[-1])
            blank_unseen(buffers.v, at, seen, half, members, step, X.keys, inputs.v.block_shape[-1])
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(arrived)
        else:
            _copy_keys(inputs, buffers, at, tile, arrived, X)
    else:
        _copy_keys(inputs, buffers, at, tile, arrived, X)
    return cuts


@gluon.jit
def _copy_keys(inputs, buffers, at, tile, arrived, X: gl.constexpr):
    row, first, keys = tile.number * X.keys, tile.first_key, tile.keys
    SECOND: gl.constexpr = inputs.k1 is not None
    WIDTH: gl.constexpr = inputs.k.block_shape[-1] + inputs.v.block_shape[-1] + (X.d1 + X.e1 if SECOND else 0)
    mbarrier.expect(arrived, X.keys * WIDTH * 2)
    load_rows(inputs.k, tile.batch, tile.head, first, keys, row, 0, arrived, buffers.k.index(at), X.packed)
    load_rows(inputs.v, tile.batch, tile.head, first, keys, row, 0, arrived, buffers.v.index(at), X.packed)
    if SECOND:
        load_rows(inputs.k1, tile.batch, tile.head, first, keys, row, X.d0, arrived, buffers.k1.index(at), X.packed)
        load_rows(inputs.v1, tile.batch, tile.head, first, keys, row, X.e0, arrived, buffers.v1.index(at), X.packed)


@gluon.jit
def _tile_of(ticket, call, X: gl.constexpr):
    """The `WorkItem` of a ticket."""
    BM: gl.constexpr = X.rows
    BN: gl.constexpr = X.keys
    rows, keys = call.rows, call.keys
    poison = ticket * 0
    if X.packed:
        record = call.records + (ticket // call.key_heads) * RECORD
        head = ticket % call.key_heads
        batch = ticket * 0
        first_row = gl.load(record)
        rows = gl.load(record + 1)
        first_key = gl.load(record + 2)
        keys = gl.load(record + 3)
        number = gl.load(record + 4)
        first_block = gl.load(record + 5)
        poison = gl.load(record + 6)
    else:
        # `heads_together` heads at a time, all their first tiles before all their second tiles.
        together, tiles = call.heads_together, call.tiles
        set_of_heads = ticket // (together * tiles)
        within = ticket % (together * tiles)
        width = gl.minimum(together, call.batch_heads - set_of_heads * together)
        number = within // width
        if X.upwards:
            number = tiles - 1 - number
        batch_head = set_of_heads * together + within % width
        batch = batch_head // call.key_heads
        head = batch_head % call.key_heads
        first_row = ticket * 0
        first_key = ticket * 0
        first_block = batch * call.row_blocks
    offset = keys - rows
    low = number * BN
    high = gl.minimum(low + BN, keys) - 1
    begin = 0
    end = gl.cdiv(rows, BM)
    edge = end
    whole_end = end
    if X.has_right:
        begin = gl.maximum(low - call.right - offset, 0) // BM
    whole_begin = begin
    if X.has_right:
        whole_begin = gl.cdiv(gl.maximum(high - call.right - offset, 0), BM)
    if X.has_left:
        edge = gl.minimum(end, gl.cdiv(gl.maximum(low + call.left - offset, 0), BM))
        whole_end = gl.maximum(low + call.left - offset + 1, 0) // BM
        end = gl.minimum(end, gl.cdiv(gl.maximum(high + call.left - offset + 1, 0), BM))
    end = gl.maximum(end, begin)
    if low + BN > keys:
        whole_begin = end  # keys past the last one: every block needs the mask
    whole_end = gl.minimum(gl.maximum(whole_end, begin), end)
    if X.packed:
        if low >= keys:
            end = begin  # there are no such keys
    whole_end = gl.minimum(whole_end, end)
    whole_begin = gl.minimum(gl.maximum(whole_begin, begin), whole_end)
    if X.upwards:
        if number < call.tiles - 1:
            edge = gl.maximum(low + BN - call.right - offset, 0) // BM
    else:
        if number == 0:
            edge = 0
    if X.masked:
        begin, end = ticket * 0, ticket * 0
        place = WorkItem(batch, head, 0, 0, 0, 0, number, 0, 0, 0, 0, 0, 0, 0)
        for member in range(0, call.group):
            _, blocks = list_of(place, member, call)
            end += blocks
    return WorkItem(
        batch, head, first_key, first_row, rows, keys, number, first_block, begin, end, whole_begin, whole_end, edge, poison
    )  # fmt: skip


# Turns. Tiles add to a block of dQ in one order: each waits for the one before it, off the consumers' path. One warp waits
# for turns and one passes them on: passing one takes as long as the sums of a step take to arrive.


@gluon.jit
def await_turns(mailbox, turns, call, X: gl.constexpr):
    """Let this program's consumers add to a block as soon as the tile before has."""
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        for member in range(0, call.group):
            counters = _turn_counters(tile, member, call)
            blocks = tile.end - tile.begin
            if X.masked:
                list_at, blocks = list_of(tile, member, call)
            for i in range(0, blocks):
                block = block_at(i, tile.begin, tile.end, X)
                if X.masked:
                    block, rank = block_and_rank(entry_at(list_at, i))
                wait_empty(turns.passed, step, X.stages)
                if X.masked:
                    if rank > 0:
                        _wait_for_turn(counters + block, rank)
                else:
                    if not is_first_at(block, tile, X):
                        _wait_for_turn(counters + block, _turn_of(tile, call, X))
                mbarrier.arrive(turns.may_add.index(step % X.stages))
                step += 1
        count += 1
        tile = next_tile(mailbox, count)


@gluon.jit
def pass_turns(mailbox, added, turns, call, X: gl.constexpr):
    """Tell the tile after this one, block by block, that it may add; ``added``: barriers of this tile's steps."""
    step = 0
    count = 0
    tile = next_tile(mailbox, count)
    while tile.number >= 0:
        for member in range(0, call.group):
            counters = _turn_counters(tile, member, call)
            blocks = tile.end - tile.begin
            if X.masked:
                list_at, blocks = list_of(tile, member, call)
            for i in range(0, blocks):
                if X.masked:
                    block, rank = block_and_rank(entry_at(list_at, i))
                    wait_full(added, step, X.stages)
                    _pass_turn(counters + block, rank + 1)
                else:
                    wait_full(added, step, X.stages)
                    _pass_turn(counters + block_at(i, tile.begin, tile.end, X), _turn_of(tile, call, X) + 1)
                mbarrier.arrive(turns.passed.index(step % X.stages))
                step += 1
        count += 1
        tile = next_tile(mailbox, count)


@gluon.jit
def _turn_counters(tile, member, call):
    """Of the blocks of queries of a tile's sequence, for one query head."""
    return call.turns + (tile.head * call.group + member).to(gl.int64) * call.all_blocks + tile.first_block


@gluon.jit
def _turn_of(tile, call, X: gl.constexpr):
    """The place of a tile of a head in the order of adding."""
    if X.upwards:
        return call.tiles - 1 - tile.number
    else:
        return tile.number


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
