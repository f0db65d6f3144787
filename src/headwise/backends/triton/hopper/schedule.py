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
def offsets_are_wrong(cu_q, cu_k, sequences, q_length, k_length, longest_q, longest_k, X: gl.constexpr):
    """int32: do these offsets not cut a packed batch into sequences?"""
    LANES: gl.constexpr = gl.BlockedLayout([X.search // 32], [32], [1], [0])
    wrong = ((gl.load(cu_q) != 0) | (gl.load(cu_k) != 0)).to(gl.int32)
    for first in range(0, sequences, X.search):
        i = first + gl.arange(0, X.search, LANES)
        there = i < sequences
        q_stop, k_stop = gl.load(cu_q + i + 1, mask=there, other=0), gl.load(cu_k + i + 1, mask=there, other=0)
        q_here = q_stop - gl.load(cu_q + i, mask=there, other=0)
        k_here = k_stop - gl.load(cu_k + i, mask=there, other=0)
        odd = (q_here < 0) | (k_here < 0) | (q_here > longest_q) | (k_here > longest_k)
        odd = odd | (q_stop < 0) | (q_stop > q_length) | (k_stop < 0) | (k_stop > k_length)
        wrong = gl.maximum(wrong, gl.max(odd.to(gl.int32), 0))
    return wrong


@gluon.jit
def _packed_tile(entry, wrong, cu_q, cu_k, sequences, q_length, QUERIES: gl.constexpr, X: gl.constexpr):
    """(row, first token, rows, first key, keys) of the ``entry``-th tile of a packed batch; it may be past the rows.

    Sequence i has the tiles from cu[i] // QUERIES + i on: more than it needs, and found without adding up lengths. Tokens
    past the last sequence are one more that has no keys.
    """
    LANES: gl.constexpr = gl.BlockedLayout([X.search // 32], [32], [1], [0])
    before = 0  # sequences that begin at this tile or before it, the first not counted
    for first in range(0, sequences, X.search):
        i = first + 1 + gl.arange(0, X.search, LANES)
        begins = gl.load(cu_q + i, mask=i <= sequences, other=0).to(gl.int32) // QUERIES + i
        before += gl.sum(((i <= sequences) & (begins <= entry)).to(gl.int32), 0)
    if wrong > 0:
        before = 0
    last = (before == sequences).to(gl.int32)
    start = gl.load(cu_q + before).to(gl.int32)
    rows = gl.load(cu_q + before + 1 - last).to(gl.int32) - start
    k_start = gl.load(cu_k + before).to(gl.int32)
    keys = gl.load(cu_k + before + 1 - last).to(gl.int32) - k_start
    row = (entry - start // QUERIES - before) * QUERIES
    if last == 1:
        rows = q_length - start
        k_start = 0
    if wrong > 0:
        row = entry * QUERIES
        start = 0
        rows = q_length
        k_start = 0
        keys = -1
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
def draw(counter, works):
    """The next piece of work. As many are drawn as there are; who draws the last leaves the counter as it found it."""
    drawn = gl.atomic_add(counter, 1)
    if drawn == works - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + drawn


@gluon.jit
def find_work(ticket, wrong, tensors, numbers, X: gl.constexpr):
    """(ticket, row, batch, head, first token, rows, first key, keys) from this ticket on; row is -1 where work ends."""
    out, lse, sink, lengths, cu_q, cu_k, counter = tensors
    (
        q_length, k_length, heads, group, tiles, works, heads_at_once, left, right, sequences, longest_q, longest_k, o_h,
        o_s, head_dim,
    ) = numbers  # fmt: skip
    QUERIES: gl.constexpr = ROWS * X.consumers
    batch, head, start, rows, k_start, keys = 0, 0, 0, q_length, 0, k_length
    row = -1
    if X.packed:
        while (row < 0) & (ticket < works):
            entry = tiles - 1 - ticket // heads
            row, start, rows, k_start, keys = _packed_tile(entry, wrong, cu_q, cu_k, sequences, q_length, QUERIES, X)
            head = ticket % heads
            if row >= rows:
                row = -1
                ticket = draw(counter, works)
    else:
        if ticket < works:
            tile, batch_head = _dense_tile(ticket, tiles, works // tiles, heads_at_once, X.has_left or X.has_right)
            row = tile * QUERIES
            batch = batch_head // heads
            head = batch_head % heads
            if lengths is not None:
                length = gl.load(lengths + batch)
                keys = gl.where((length < 0) | (length > k_length), -1, length).to(gl.int32)
    return ticket, row, batch, head, start, rows, k_start, keys


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
