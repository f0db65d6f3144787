"""Who works on what: programs draw tiles of queries one after the other, and tell their warpgroups of each.

A program's loading warp draws a ticket, finds the tile that belongs to it, and posts it in shared memory for the
warpgroups that compute. Tickets come from a counter in memory, so a program that is done early takes what others would
have come to later.
"""

# ruff: noqa: RUF059  (kernels unpack the tuples they are given and use what they need)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.gluon_names import constexpr_function, gl, gluon, mbarrier, thread_barrier
from headwise.backends.triton.hopper.variants import Constants

ROWS = gl.constexpr(64)  # queries of a computing warpgroup: what one WGMMA multiplies
MAIL = gl.constexpr(2)  # pieces of work on their way from the loading warp to the others
# What the loading warp tells the others of a piece of work.
ROW = gl.constexpr(0)  # the first query of the tile; -1: there is no more work
BATCH_HEAD = gl.constexpr(1)  # batch · heads + head
KEYS_THERE = gl.constexpr(2)  # keys of the sequence; -1: lengths or offsets that make no sense
FIRST_TOKEN = gl.constexpr(3)  # where the sequence begins in a packed batch
ROWS_THERE = gl.constexpr(4)  # queries of the sequence
FIELDS = gl.constexpr(5)


class Variant(NamedTuple):
    """The constants of a compiled forward kernel: its constexpr parameters, in this order."""

    has_left: Any
    has_right: Any
    has_cap: Any
    packed: Any  # sequences lie one behind the other, between offsets that the kernel reads
    cut: Any  # keys end, or begin, inside the tensor: what lies beyond must not touch the result
    consumers: Any
    keys: Any
    d0: Any
    d1: Any
    k_stages: Any
    v_stages: Any
    q_stages: Any
    one_o: Any
    ahead: Any
    keys_first: Any
    search: Any  # offsets of a packed batch that are looked at in one go


@constexpr_function
def constants(*values: Any) -> Any:
    return Constants(Variant._fields, values)


@gluon.jit
def _dense_tile(ticket, tiles, batch_heads, heads_at_once, BANDED: gl.constexpr):
    """The tile of queries, and batch · heads + head, of the ``ticket``-th piece of work.

    Under a causal mask or a window, groups of heads whose keys and values fit the L2 cache together; in a group the longest
    tiles first.
    """
    if BANDED:
        group = ticket // (heads_at_once * tiles)
        first = group * heads_at_once
        size = gl.minimum(heads_at_once, batch_heads - first)
        place = ticket - first * tiles
        return tiles - 1 - place // size, first + place % size
    else:
        return ticket % tiles, ticket // tiles


@gluon.jit
def count_works(tensors, numbers, X: gl.constexpr):
    """How many pieces of work there are; and, int32: do the offsets not cut a packed batch into sequences?

    Then all of its queries are one sequence, whose keys make no sense.
    """
    lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k
    ) = numbers  # fmt: skip
    wrong = 0
    if X.packed:
        QUERIES: gl.constexpr = ROWS * X.consumers
        LANES: gl.constexpr = gl.BlockedLayout([X.search // 32], [32], [1], [0])
        wrong = ((gl.load(cu_q) != 0) | (gl.load(cu_k) != 0)).to(gl.int32)
        tiles = 0
        for first in range(0, sequences, X.search):
            i = first + gl.arange(0, X.search, LANES)
            there = i < sequences
            q_stop, k_stop = gl.load(cu_q + i + 1, mask=there, other=0), gl.load(cu_k + i + 1, mask=there, other=0)
            q_here = q_stop - gl.load(cu_q + i, mask=there, other=0)
            k_here = k_stop - gl.load(cu_k + i, mask=there, other=0)
            odd = (q_here < 0) | (k_here < 0) | (q_here > longest_q) | (k_here > longest_k)
            odd = odd | (q_stop < 0) | (q_stop > q_length) | (k_stop < 0) | (k_stop > k_length)
            wrong = gl.maximum(wrong, gl.max(odd.to(gl.int32), 0))
            tiles += gl.sum(gl.cdiv(q_here.to(gl.int32), QUERIES), 0)
        unused = q_length - gl.load(cu_q + sequences).to(gl.int32)
        tiles += gl.cdiv(unused, QUERIES)
        if wrong > 0:
            tiles = gl.cdiv(q_length, QUERIES)
        works = tiles * heads
    return works, wrong


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _packed_tile(entry, wrong, cu_q, cu_k, sequences, q_length, left, QUERIES: gl.constexpr, X: gl.constexpr):
    """(row, first token, rows, first key, keys) of the ``entry``-th tile of a packed batch.

    Tokens past the last sequence are one more that has no keys. Keys before all windows are left out.
    """
    LANES: gl.constexpr = gl.BlockedLayout([X.search // 32], [32], [1], [0])
    before, tiles_before, tiles = 0, 0, 0  # sequences, and tiles of sequences, that end before this tile; tiles so far
    for first in range(0, sequences, X.search):
        i = first + gl.arange(0, X.search, LANES)
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
        rows = q_length - start
        k_start = 0
    if wrong > 0:
        row = entry * QUERIES
        start = 0
        rows = q_length
        k_start = 0
        keys = -1
    if X.has_left:
        unseen = gl.maximum(keys - rows - left, 0)
        k_start += unseen
        keys -= unseen
    return row, start, rows, k_start, keys


@gluon.jit
def block_range(row, rows, count, offset, keys, left, right, X: gl.constexpr):
    """[lowest, past): the blocks of keys that ``count`` queries from ``row`` on visit: at least one, seen or not."""
    lowest, past = 0, keys
    if X.has_left:
        lowest = gl.maximum(row + offset - left, 0) // X.keys
    if X.has_right:
        past = gl.minimum(gl.minimum(row + count, rows) + offset + right, keys)
    return lowest, gl.maximum(gl.cdiv(past, X.keys), lowest + 1)


@gluon.jit
def ask(counter):
    """Ask for the next piece of work; `answer` waits for it. Only the first lane asks."""
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
def answer(asked, counter, works):
    """The ticket. As many are drawn as there are works; who draws the last leaves the counter as it found it."""
    drawn = from_first_lane(asked)
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
def find_work(ticket, works, wrong, tensors, numbers, X: gl.constexpr):
    """(row, batch, head, first token, rows, first key, keys) of the ticket-th piece of work; row is -1 where work ends."""
    lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, _, heads_at_once, left, right, sequences, longest_q, longest_k
    ) = numbers  # fmt: skip
    QUERIES: gl.constexpr = ROWS * X.consumers
    batch, head, start, rows, k_start, keys = 0, 0, 0, q_length, 0, k_length
    row = -1
    if ticket < works:
        if X.packed:
            entry = (works - 1 - ticket) // heads
            row, start, rows, k_start, keys = _packed_tile(
                entry, wrong, cu_q, cu_k, sequences, q_length, left, QUERIES, X
            )
            head = ticket % heads
        else:
            tile, batch_head = _dense_tile(ticket, tiles, works // tiles, heads_at_once, X.has_left or X.has_right)
            row = tile * QUERIES
            batch = batch_head // heads
            head = batch_head % heads
            if lengths is not None:
                length = gl.load(lengths + batch)
                keys = gl.where((length < 0) | (length > k_length), -1, length).to(gl.int32)
    return row, batch, head, start, rows, k_start, keys


@gluon.jit
def post(mail, full, empty, posted, row, batch_head, keys, start, rows, X: gl.constexpr):
    """Tell the computing warpgroups what they work on next."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    none = gl.full([1], 0, gl.int32, LANES)
    at = posted % MAIL
    mbarrier.wait(empty.index(at), ((posted // MAIL) & 1) ^ 1)
    letter = at * FIELDS
    mail.index(letter + ROW).store(none + row)
    mail.index(letter + BATCH_HEAD).store(none + batch_head)
    if X.cut:
        mail.index(letter + KEYS_THERE).store(none + keys)
    if X.packed:
        mail.index(letter + FIRST_TOKEN).store(none + start)
        mail.index(letter + ROWS_THERE).store(none + rows)
    thread_barrier()
    mbarrier.arrive(full.index(at))


@gluon.jit
def read(mail, full, empty, read, q_length, k_length, X: gl.constexpr):
    """The next piece of work: (row, batch · heads + head, keys, first token, rows)."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = read % MAIL
    mbarrier.wait(full.index(at), (read // MAIL) & 1)
    letter = at * FIELDS
    row = gl.max(mail.index(letter + ROW).load(LANES), 0)
    batch_head = gl.max(mail.index(letter + BATCH_HEAD).load(LANES), 0)
    keys, start, rows = k_length, 0, q_length
    if X.cut:
        keys = gl.max(mail.index(letter + KEYS_THERE).load(LANES), 0)
    if X.packed:
        start = gl.max(mail.index(letter + FIRST_TOKEN).load(LANES), 0)
        rows = gl.max(mail.index(letter + ROWS_THERE).load(LANES), 0)
    mbarrier.arrive(empty.index(at))
    return row, batch_head, keys, start, rows
