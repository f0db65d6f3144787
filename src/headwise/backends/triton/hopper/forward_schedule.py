"""Which tile of queries is next: the persistent forward kernel draws its tiles from a counter in memory.

The producer warp of a program draws a ticket, finds the tile that belongs to it and posts it to the consumers. A program
that is done early draws what others would have come to later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.gluon_names import gl, gluon
from headwise.backends.triton.hopper.mailbox import post, read
from headwise.backends.triton.hopper.mask_words import entry_at, lists_of
from headwise.backends.triton.hopper.tiles import ForwardTile

ROWS = gl.constexpr(64)  # queries of a consumer warpgroup: what one WGMMA multiplies
FIELDS = gl.constexpr(5)  # numbers in a message from the producer: `WorkItem`
# In place of the number of keys of a sequence.
BAD_LENGTHS = gl.constexpr(-1)  # lengths or offsets that make no sense: results are NaN
NO_SEQUENCE = gl.constexpr(-2)  # tokens past the last sequence, which do not exist
_SEARCH = gl.constexpr(128)  # offsets of a packed batch that are looked at in one go
_LANES = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


class Variant(NamedTuple):
    """The constants of a compiled forward kernel."""

    has_left: bool
    has_right: bool
    has_cap: bool
    packed: bool  # sequences lie one behind the other, between offsets that the kernel reads
    cut: bool  # keys end, or begin, inside the tensor: what lies beyond must not touch the result
    tile: ForwardTile
    masked: bool = False  # a packed mask, with lists of the blocks that tiles visit
    mask_is_endless: bool = False  # its bits know no end of the keys, because it is broadcast over them
    bias_rows: int = 0  # of a block of the bias: those of a tile, one if it is broadcast over the queries, or none


class Call(NamedTuple):
    """What a launch is given beside descriptors; some tensors may be None."""

    lse: Any
    sink: Any
    lengths: Any
    cu_q: Any
    cu_k: Any
    counter: Any
    q_length: Any  # queries of a sequence; of a packed batch, all of them
    k_length: Any
    heads: Any
    group: Any  # query heads of a key head
    tiles: Any  # of queries, per sequence and head
    works: Any  # tiles of all heads
    heads_at_once: Any
    left: Any
    right: Any
    sequences: Any
    longest_q: Any
    longest_k: Any
    logit_scale: Any  # times a product is a logit in base 2; with a cap, times its tanh
    cap_scale: Any  # times a product is what exp2 is taken of for its tanh
    mask: Any  # a `Mask`, or None
    bias_batch: Any  # 1, or 0 where the bias is broadcast over the batch
    bias_head: Any


class WorkItem(NamedTuple):
    """The unit of work that a ticket stands for, a tile of queries of one head, as consumers see it."""

    row: Any  # its first query, in its sequence; -1: there is no more work
    batch_head: Any  # batch · heads + head
    keys: Any  # of the sequence
    start: Any  # where the sequence begins in a packed batch
    rows: Any  # queries of the sequence
    posted_keys: Any  # keys, BAD_LENGTHS or NO_SEQUENCE
    parts: Any  # with a list: blocks that need the mask
    blocks: Any  # all of its blocks
    entry: Any  # the first of them


class Source(NamedTuple):
    """The same for the producer: where to load from."""

    row: Any
    batch: Any
    head: Any
    start: Any
    rows: Any
    k_start: Any
    keys: Any
    list_at: Any  # of a mask; of no use without
    parts: Any
    blocks: Any
    entry: Any


@gluon.jit
def block_range(row, rows, count, offset, keys, call, X: gl.constexpr):
    """[lowest, past): the blocks of keys that ``count`` queries from ``row`` on visit: at least one, seen or not."""
    lowest, past = 0, keys
    if X.has_left:
        lowest = gl.maximum(row + offset - call.left, 0) // X.keys
    if X.has_right:
        past = gl.minimum(gl.minimum(row + count, rows) + offset + call.right, keys)
    return lowest, gl.maximum(gl.cdiv(past, X.keys), lowest + 1)


@gluon.jit
def count_works(call, X: gl.constexpr):
    """How many tiles there are; and, int32: do the offsets not cut a packed batch into sequences?

    Then all of its queries are one sequence, whose keys make no sense.
    """
    works = call.works
    wrong = 0
    if X.packed:
        QUERIES: gl.constexpr = ROWS * X.consumers
        cu_q, cu_k, sequences = call.cu_q, call.cu_k, call.sequences
        wrong = ((gl.load(cu_q) != 0) | (gl.load(cu_k) != 0)).to(gl.int32)
        tiles = 0
        for first in range(0, sequences, _SEARCH):
            i = first + gl.arange(0, _SEARCH, _LANES)
            there = i < sequences
            q_stop, k_stop = gl.load(cu_q + i + 1, mask=there, other=0), gl.load(cu_k + i + 1, mask=there, other=0)
            q_here = q_stop - gl.load(cu_q + i, mask=there, other=0)
            k_here = k_stop - gl.load(cu_k + i, mask=there, other=0)
            odd = (q_here < 0) | (k_here < 0) | (q_here > call.longest_q) | (k_here > call.longest_k)
            odd = odd | (q_stop < 0) | (q_stop > call.q_length) | (k_stop < 0) | (k_stop > call.k_length)
            wrong = gl.maximum(wrong, gl.max(odd.to(gl.int32), 0))
            tiles += gl.sum(gl.cdiv(q_here.to(gl.int32), QUERIES), 0)
        unused = call.q_length - gl.load(cu_q + sequences).to(gl.int32)
        tiles += gl.cdiv(unused, QUERIES)
        if wrong > 0:
            tiles = gl.cdiv(call.q_length, QUERIES)
        works = tiles * call.heads
    return works, wrong


@gluon.jit
def find_tile(ticket, works, wrong, call, X: gl.constexpr):
    """The `Source` of the ticket-th tile; its row is -1 where work ends."""
    batch, head, start, rows, k_start, keys = 0, 0, 0, call.q_length, 0, call.k_length
    row = -1
    if ticket < works:
        if X.packed:
            entry = (works - 1 - ticket) // call.heads
            row, start, rows, k_start, keys = _packed_tile(entry, wrong, call, X)
            head = ticket % call.heads
        else:
            tile, batch_head = _dense_tile(ticket, works, call, X)
            row = tile * (ROWS * X.consumers)
            batch = batch_head // call.heads
            head = batch_head % call.heads
            if call.lengths is not None:
                length = gl.load(call.lengths + batch)
                keys = gl.where((length < 0) | (length > call.k_length), BAD_LENGTHS, length).to(gl.int32)
    if X.masked:
        number = gl.maximum(row, 0) // (ROWS * X.consumers)
        list_at = lists_of(call.mask, gl.to_tensor(batch), gl.to_tensor(head)) + number * call.mask.lists_tile
        parts = gl.load(list_at)
        visited, entry = parts + gl.load(list_at + 1), entry_at(list_at, 0)
        return Source(row, batch, head, start, rows, k_start, keys, list_at, parts, visited, entry)
    else:
        return Source(row, batch, head, start, rows, k_start, keys, 0, 0, 0, 0)


@gluon.jit
def _dense_tile(ticket, works, call, X: gl.constexpr):
    """The number of the tile in its head, and batch · heads + head.

    Under a causal mask or a window, groups of heads whose keys and values fit the L2 cache together; in a group the longest
    tiles first.
    """
    tiles = call.tiles
    if X.has_left or X.has_right or X.masked:
        first = ticket // (call.heads_at_once * tiles) * call.heads_at_once
        size = gl.minimum(call.heads_at_once, works // tiles - first)
        place = ticket - first * tiles
        return tiles - 1 - place // size, first + place % size
    else:
        return ticket % tiles, ticket // tiles


@gluon.jit
def _packed_tile(entry, wrong, call, X: gl.constexpr):
    """(row, first token, rows, first key, keys) of the ``entry``-th tile of a packed batch.

    Tokens past the last sequence are one more, NO_SEQUENCE. Keys before all windows are left out.
    """
    QUERIES: gl.constexpr = ROWS * X.consumers
    cu_q, cu_k, sequences = call.cu_q, call.cu_k, call.sequences
    before, tiles_before, tiles = 0, 0, 0  # sequences, and tiles of sequences, that end before this tile; tiles so far
    for first in range(0, sequences, _SEARCH):
        i = first + gl.arange(0, _SEARCH, _LANES)
        there = i < sequences
        stop = gl.load(cu_q + i + 1, mask=there, other=0).to(gl.int32)
        length = stop - gl.load(cu_q + i, mask=there, other=0).to(gl.int32)
        ends = tiles + gl.associative_scan(gl.cdiv(length, QUERIES), 0, _add)
        done = there & (ends <= entry)
        before += gl.sum(done.to(gl.int32), 0)
        tiles_before = gl.maximum(tiles_before, gl.max(gl.where(done, ends, 0), 0))
        tiles = gl.max(ends, 0)
    if wrong > 0:
        before = 0
    last = (before == sequences).to(gl.int32)
    start = gl.load(cu_q + before).to(gl.int32)
    rows = gl.load(cu_q + before + 1 - last).to(gl.int32) - start
    k_start = gl.load(cu_k + before).to(gl.int32)
    keys = gl.load(cu_k + before + 1 - last).to(gl.int32) - k_start
    row = (entry - tiles_before) * QUERIES
    if last == 1:
        rows = call.q_length - start
        k_start = 0
        keys = NO_SEQUENCE
    if wrong > 0:
        row = entry * QUERIES
        start = 0
        rows = call.q_length
        k_start = 0
        keys = BAD_LENGTHS
    if X.has_left:
        unseen = gl.maximum(keys - rows - call.left, 0)
        k_start += unseen
        keys -= unseen
    return row, start, rows, k_start, keys


@gluon.jit
def _add(a, b):
    return a + b


# Tickets. A counter is drawn from as often as there are tiles, and left at zero for the next launch.


@gluon.jit
def request_ticket(counter):
    """Ask for the next ticket; `await_ticket` waits for it. Only the first lane asks."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_ticket(requested, counter, works):
    """The ticket. As many are drawn as there are tiles; who draws the last leaves the counter as it found it."""
    drawn = from_first_lane(requested)
    if drawn == works - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + drawn


@gluon.jit
def from_first_lane(x):
    """What the first lane has. Of a number that all have, ptxas does not know that it is the same."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def post_tile(mailbox, count, source, call, X: gl.constexpr):
    """Tell the consumers what they work on next: a `WorkItem`, as far as it is not the same for all."""
    batch_head = source.batch * call.heads + source.head
    if X.packed:
        post(mailbox, count, (source.row, batch_head, source.keys, source.start, source.rows))
    elif X.masked:
        post(mailbox, count, (source.row, batch_head, source.parts, source.blocks, source.entry))
    elif X.cut:
        post(mailbox, count, (source.row, batch_head, source.keys))
    else:
        post(mailbox, count, (source.row, batch_head))


@gluon.jit
def read_tile(mailbox, count, call, X: gl.constexpr):
    keys, start, rows = call.k_length, 0, call.q_length
    parts, listed, entry = 0, 0, 0
    if X.packed:
        row, batch_head, keys, start, rows = read(mailbox, count, 5)
    elif X.masked:
        row, batch_head, parts, listed, entry = read(mailbox, count, 5)
    elif X.cut:
        row, batch_head, keys = read(mailbox, count, 3)
    else:
        row, batch_head = read(mailbox, count, 2)
    return WorkItem(row, batch_head, gl.maximum(keys, 0), start, rows, keys, parts, listed, entry)
