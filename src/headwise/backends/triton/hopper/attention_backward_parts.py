"""What the Hopper backward kernels share: where a tile lies, loading, weights, sums of dQ, and turns to add to them.

Kernels here have one argument X, their constants, and one that says what there is to do (`where`).
"""

# ruff: noqa: RUF059, SIM102  (kernels unpack what they are given; constants have an `if` of their own)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.attention_backward_rows import RECORD
from headwise.backends.triton.hopper.gluon_names import (
    constexpr_function,
    gl,
    gluon,
    load_tile,
    mbarrier,
    thread_barrier,
)
from headwise.backends.triton.hopper.sequence_rows import load_rows
from headwise.backends.triton.hopper.variants import Constants

MAIL = gl.constexpr(2)  # tiles on their way from the warp that draws them to the others
FIELDS = gl.constexpr(14)  # what they are told of a tile: `_tile_of`


class Variant(NamedTuple):
    """The constants of a compiled backward kernel: its constexpr parameters, in this order."""

    has_cap: Any
    has_left: Any
    has_right: Any
    packed: Any
    grouped: Any  # several query heads share a key head
    deterministic: Any
    rows: Any  # of queries per step
    keys: Any  # per tile
    dim: Any  # of heads, filled up
    stages: Any  # steps that are loaded ahead
    kv_stages: Any  # tiles whose keys and values there is room for


@constexpr_function
def constants(*values: Any) -> Any:
    """With one name more: ``upwards``, for tiles that take turns in a triangle.

    Their last keys go first, and each walks from the first block of queries that sees it to the last one: tiles that start
    together then follow each other through the blocks, one step apart. In all other calls the first keys go first and
    blocks are walked from the last to the first.
    """
    x = Variant(*values)
    upwards = x.deterministic and x.has_right and not x.has_left and not x.packed
    return Constants((*Variant._fields, "upwards"), (*values, upwards))


@gluon.jit
def block_at(i, begin, end, X: gl.constexpr):
    """The i-th block of queries that a tile visits of those from ``begin`` to ``end``."""
    if X.upwards:
        return begin + i
    else:
        return end - 1 - i


@gluon.jit
def is_first_at(m, edge, X: gl.constexpr):
    """Is a tile the first of all to add to block ``m``? ``edge`` is where the blocks end that a tile before it adds to."""
    if X.upwards:
        return m < edge
    else:
        return m >= edge


@gluon.jit
def _turn_of(n, where, X: gl.constexpr):
    """The place of tile ``n`` of a head in the order of adding."""
    if X.upwards:
        return where[1] - 1 - n
    else:
        return n


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
def all_consumers(INSTRUCTION: gl.constexpr):
    """Wait until all threads of the consumers are here: "bar.sync 8, " and their number."""
    gl.inline_asm_elementwise(
        "{ " + INSTRUCTION + "; mov.b32 $0, $1; }", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_zero():
    """A zero that the compiler cannot see through, so that it does not keep what depends on it in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def in_fragment_order(x):
    """``[64, N]`` as a warpgroup holds a product of `wgmma`, flattened so that four numbers of a thread are neighbours.

    Row and column bits go from (row 16s, row 8, row, column 8s, column 2s, column) to (row 16s, column 8s, row, column 2s,
    row 8, column): the registers of a thread, two by two, then the lanes, then the rest.
    """
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([64 * N])


@gluon.jit
def from_fragment_order(flat, LAYOUT: gl.constexpr):
    """What `in_fragment_order` took, from what it gave."""
    N: gl.constexpr = flat.shape[0] // 64
    x = flat.reshape([4, N // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([64, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _tile_of(tile, where, X: gl.constexpr):
    """Where a tile lies and what it sees.

    (batch, key head, first key and first row of the sequence, its rows and keys, number of the tile in it, first block of
    the sequence among all blocks, first and past-last block of queries, the same of those that need no mask, where the
    blocks end that a tile before it adds to (see `is_first_at`), and bits to add to its gradients: zero or, where the
    offsets of a packed batch make no sense, not a number.)
    """
    records, tiles, batch_heads, together, rows, keys, row_blocks, all_blocks, left, right, key_heads, group = where
    BM: gl.constexpr = X.rows
    BN: gl.constexpr = X.keys
    poison = tile * 0
    if X.packed:
        record = records + (tile // key_heads) * RECORD
        head = tile % key_heads
        batch = tile * 0
        first_row = gl.load(record)
        rows = gl.load(record + 1)
        first_key = gl.load(record + 2)
        keys = gl.load(record + 3)
        n = gl.load(record + 4)
        block0 = gl.load(record + 5)
        poison = gl.load(record + 6)
    else:
        # `together` heads at a time, all their first tiles before all their second tiles.
        set_of_heads = tile // (together * tiles)
        within = tile % (together * tiles)
        width = gl.minimum(together, batch_heads - set_of_heads * together)
        n = within // width
        if X.upwards:
            n = tiles - 1 - n
        batch_head = set_of_heads * together + within % width
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
    edge = end
    whole_end = end
    if X.has_right:
        begin = gl.maximum(low - right - offset, 0) // BM
    whole_begin = begin
    if X.has_right:
        whole_begin = gl.cdiv(gl.maximum(high - right - offset, 0), BM)
    if X.has_left:
        edge = gl.minimum(end, gl.cdiv(gl.maximum(low + left - offset, 0), BM))
        whole_end = gl.maximum(low + left - offset + 1, 0) // BM
        end = gl.minimum(end, gl.cdiv(gl.maximum(high + left - offset + 1, 0), BM))
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
        if n < tiles - 1:
            edge = gl.maximum(low + BN - right - offset, 0) // BM
    else:
        if n == 0:
            edge = 0
    return (
        batch, head, first_key, first_row, rows, keys, n, block0, begin, end, whole_begin, whole_end, edge, poison
    )  # fmt: skip


@gluon.jit
def _post(mail, full, empty, posted, fields):
    """Tell the other warps which tile is next."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    none = gl.full([1], 0, gl.int32, LANES)
    at = posted % MAIL
    mbarrier.wait(empty.index(at), ((posted // MAIL) & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        mail.index(at * FIELDS + i).store(none + fields[i])
    thread_barrier()
    mbarrier.arrive(full.index(at))


@gluon.jit
def next_tile(mail, full, empty, read, WARPS: gl.constexpr):
    """What `_tile_of` says of the next tile. The number of the tile is -1 when there is none."""
    at = read % MAIL
    mbarrier.wait(full.index(at), (read // MAIL) & 1)
    tile = (
        _field(mail, at, 0, WARPS), _field(mail, at, 1, WARPS), _field(mail, at, 2, WARPS), _field(mail, at, 3, WARPS),
        _field(mail, at, 4, WARPS), _field(mail, at, 5, WARPS), _field(mail, at, 6, WARPS), _field(mail, at, 7, WARPS),
        _field(mail, at, 8, WARPS), _field(mail, at, 9, WARPS), _field(mail, at, 10, WARPS), _field(mail, at, 11, WARPS),
        _field(mail, at, 12, WARPS), _field(mail, at, 13, WARPS),
    )  # fmt: skip
    mbarrier.arrive(empty.index(at))
    return tile


@gluon.jit
def _field(mail, at, FIELD: gl.constexpr, WARPS: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(mail.index(at * FIELDS + FIELD).load(LANES), 0)


@gluon.jit
def _load_keys(k_desc, v_desc, k_s, v_s, full, empty, batch, head, first, keys, row, count, X: gl.constexpr):
    """K and V of the ``count``-th tile of this program."""
    at = count % X.kv_stages
    arrived = full.index(at)
    mbarrier.wait(empty.index(at), ((count // X.kv_stages) & 1) ^ 1)
    mbarrier.expect(arrived, 2 * X.keys * k_desc.block_shape[-1] * 2)
    load_rows(k_desc, batch, head, first, keys, row, 0, arrived, k_s.index(at), X.packed)
    load_rows(v_desc, batch, head, first, keys, row, 0, arrived, v_s.index(at), X.packed)


@gluon.jit
def produce(descriptors, buffers, mail, ticket, barriers, where, X: gl.constexpr):
    """Draw tiles; for each, load its keys and values, and grad_out and q of every block of queries as their places get free.

    A program draws its next tile before it is done with this one. Still, a tile waits only for tiles of lower tickets, and
    they are all being worked on, or are next in a program whose tile has a lower ticket.
    """
    q_desc, k_desc, v_desc, do_desc, stats_desc = descriptors
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    mail_full, mail_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    _, tiles, batch_heads, _, _, _, _, all_blocks, _, _, _, group = where
    BM: gl.constexpr = X.rows
    BYTES: gl.constexpr = BM * q_desc.block_shape[-1] * 2 + BM * 4
    step = 0
    count = 0
    tile = gl.atomic_add(ticket, 1, sem="relaxed")
    while tile < tiles * batch_heads:
        fields = _tile_of(tile, where, X)
        batch, head, key0, row0, rows, keys, n, block0, begin, end, _, _, _, _ = fields
        if n * X.keys < keys:  # a packed batch has some tiles more
            _post(mail, mail_full, mail_empty, count, fields)
            if begin == end:
                _load_keys(k_desc, v_desc, k_s, v_s, kv_full, kv_empty, batch, head, key0, keys, n * X.keys, count, X)
            for member in range(0, group):
                q_head = head * group + member
                for i in range(0, end - begin):
                    m = block_at(i, begin, end, X)
                    stage = step % X.stages
                    phase = (step // X.stages) & 1
                    at = (q_head * all_blocks + block0 + m) * 2
                    mbarrier.wait(do_empty.index(stage), phase ^ 1)
                    arrived = do_full.index(stage)
                    mbarrier.expect(arrived, BYTES)
                    load_rows(do_desc, batch, q_head, row0, rows, m * BM, 0, arrived, do_s.index(stage), X.packed)
                    load_tile(stats_desc, [at + 1, 0], arrived, delta_s.index(stage))
                    mbarrier.wait(q_empty.index(stage), phase ^ 1)
                    arrived = q_full.index(stage)
                    mbarrier.expect(arrived, BYTES)
                    load_rows(q_desc, batch, q_head, row0, rows, m * BM, 0, arrived, q_s.index(stage), X.packed)
                    load_tile(stats_desc, [at, 0], arrived, lse_s.index(stage))
                    # After the first q: these places may still be taken by the tile before.
                    if (member == 0) & (i == 0):
                        _load_keys(
                            k_desc, v_desc, k_s, v_s, kv_full, kv_empty, batch, head, key0, keys, n * X.keys, count, X
                        )
                    step += 1
            count += 1
        tile = gl.atomic_add(ticket, 1, sem="relaxed")
    nothing = tile * 0
    _post(
        mail, mail_full, mail_empty, count,
        (nothing, nothing, nothing, nothing, nothing, nothing, nothing - 1, nothing, nothing, nothing, nothing, nothing,
         nothing, nothing),
    )  # fmt: skip


@gluon.jit
def await_turns(turns, mail, mail_full, mail_empty, may_add, passed, where, X: gl.constexpr):
    """Tiles add to a block of dQ in one order: each waits for the one before it, off the consumers' path.

    One warp waits for turns and one passes them on: passing one takes as long as the sums of a step take to arrive.
    """
    all_blocks = where[7]
    group = where[11]
    step = 0
    count = 0
    batch, head, _, _, _, _, n, block0, begin, end, _, _, edge, _ = next_tile(mail, mail_full, mail_empty, count, 1)
    while n >= 0:
        for member in range(0, group):
            counters = turns + (head * group + member).to(gl.int64) * all_blocks + block0
            for i in range(0, end - begin):
                m = block_at(i, begin, end, X)
                stage = step % X.stages
                mbarrier.wait(passed.index(stage), ((step // X.stages) & 1) ^ 1)
                if not is_first_at(m, edge, X):
                    _wait_for_turn(counters + m, _turn_of(n, where, X))
                mbarrier.arrive(may_add.index(stage))
                step += 1
        count += 1
        batch, head, _, _, _, _, n, block0, begin, end, _, _, edge, _ = next_tile(mail, mail_full, mail_empty, count, 1)


@gluon.jit
def pass_turns(turns, mail, mail_full, mail_empty, added, passed, where, X: gl.constexpr):
    """Tell the tile after this one, block by block, that it may add to dQ."""
    all_blocks = where[7]
    group = where[11]
    step = 0
    count = 0
    batch, head, _, _, _, _, n, block0, begin, end, _, _, _, _ = next_tile(mail, mail_full, mail_empty, count, 1)
    while n >= 0:
        for member in range(0, group):
            counters = turns + (head * group + member).to(gl.int64) * all_blocks + block0
            for i in range(0, end - begin):
                stage = step % X.stages
                mbarrier.wait(added.index(stage), (step // X.stages) & 1)
                _pass_turn(counters + block_at(i, begin, end, X), _turn_of(n, where, X) + 1)
                mbarrier.arrive(passed.index(stage))
                step += 1
        count += 1
        batch, head, _, _, _, _, n, block0, begin, end, _, _, _, _ = next_tile(mail, mail_full, mail_empty, count, 1)


@gluon.jit
def weights_of(products, lse, scale, softcap, X: gl.constexpr):
    """P of a block, transposed, from the products q·k, as if every query saw every key."""
    if X.has_cap:
        # tanh(u) = 1 - 2 / (1 + exp(2u)); scale is 2 log2(e) scale / softcap here, and softcap has log2(e) in it.
        logits = softcap - (2.0 * softcap) / (1.0 + gl.exp2(products * scale))
        return gl.exp2(logits - lse)
    else:
        return gl.exp2(products * scale - lse)


@gluon.jit
def only_seen(p, m, low, offset, keys, left, right, X: gl.constexpr):
    """Zeros where a query of block ``m`` does not see a key; the first of the 64 keys is ``low``."""
    LAYOUT: gl.constexpr = p.type.layout
    position = m * X.rows + offset + gl.arange(0, X.rows, gl.SliceLayout(0, LAYOUT))[None, :]
    key = low + opaque_zero() + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    seen = (key < keys) & (position == position)
    if X.has_left:
        seen = seen & (key >= position - left)
    if X.has_right:
        seen = seen & (key <= position + right)
    return gl.where(seen, p, 0.0)


@gluon.jit
def score_gradients(p, dp, delta, lse, softcap, X: gl.constexpr):
    """dS = P (dP - delta), times the slope of the cap."""
    ds = p * (dp - delta)
    if X.has_cap:
        # The slope from the logit that gave p: it costs less to take the logarithm than to keep the tanh.
        t = (gl.log2(gl.where(p > 0.0, p, 1.0)) + lse) / softcap
        ds = gl.where(p > 0.0, ds * (1.0 - t * t), 0.0)
    return ds


@gluon.jit
def add_to_sums(dq, sums_at, first, X: gl.constexpr):
    """Add a piece of a block of dQ to the sums at ``sums_at``; with turns, the first one of all just stores."""
    flat = in_fragment_order(dq)
    index = gl.arange(0, flat.shape[0], flat.type.layout)
    if X.deterministic:
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
