"""The arithmetic that both Hopper backward kernels share: weights, their gradients, and adding to the sums of dQ."""

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import gl, gluon, log2, reciprocal

LOG2E = gl.constexpr(1.4426950408889634)
LEAST_NORMAL = gl.constexpr(2.0**-126)  # of float32: `log2` takes anything below for zero


@gluon.jit
def weights_of(products, lse, call, X: gl.constexpr):
    """P of a block, transposed, from the products q·k, as if every query saw every key; and the slope of the cap, or 1."""
    if X.has_cap:
        # With y = 1 / (1 + exp(2u)), tanh(u) is 1 - 2y and its slope 4y (1 - y); score_scale is 2 log2(e) scale / cap here.
        y = reciprocal(1.0 + gl.exp2(products * call.score_scale))
        return gl.exp2(call.softcap - 2.0 * call.softcap * y - lse), 4.0 * (y - y * y)
    else:
        return gl.exp2(products * call.score_scale - lse), 1.0


@gluon.jit
def slope_of(p, lse, call, X: gl.constexpr):
    """The slope of the cap from the logit that gave P, or 1."""
    if X.has_cap:
        t = (log2(p) + lse) * (1.0 / call.softcap)
        return gl.where(p >= LEAST_NORMAL, 1.0 - t * t, 0.0)
    else:
        return 1.0


@gluon.jit
def only_seen(p, block, low, tile, call, X: gl.constexpr):
    """Zeros where a query of a block does not see a key; the first of the 64 keys is ``low``."""
    LAYOUT: gl.constexpr = p.type.layout
    offset = tile.keys - tile.rows
    position = block * X.rows + offset + gl.arange(0, X.rows, gl.SliceLayout(0, LAYOUT))[None, :]
    key = low + opaque_zero() + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    seen = (key < tile.keys) & (position == position)
    if X.has_left:
        seen = seen & (key >= position - call.left)
    if X.has_right:
        seen = seen & (key <= position + call.right)
    return gl.where(seen, p, 0.0)


@gluon.jit
def score_gradients(p, dp, delta, slope, X: gl.constexpr):
    """dS = P (dP - delta), times the slope of the cap."""
    ds = p * (dp - delta)
    if X.has_cap:
        ds = ds * slope.to(gl.float32)
    return ds


@gluon.jit
def add_to_sums(dq, sums_at, first, COLUMNS: gl.constexpr, X: gl.constexpr):
    """Add a piece of a block of dQ to the sums at ``sums_at``; with turns, the first one of all just stores.

    There is room for COLUMNS columns, of which dQ may have only the first.
    """
    flat = in_fragment_order(dq)
    index = gl.arange(0, flat.shape[0], flat.type.layout)
    if dq.shape[1] < COLUMNS:
        # Sixteen rows are together, and behind them the columns that are left out.
        index += index // (16 * dq.shape[1]) * (16 * (COLUMNS - dq.shape[1]))
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
def wait_for_consumers(THREADS: gl.constexpr):
    """Until all ``THREADS`` threads of the consumers are here."""
    gl.inline_asm_elementwise(
        f"{{ bar.sync 8, {THREADS}; mov.b32 $0, $1; }}",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque_zero():
    """A zero that the compiler cannot see through, so that it does not keep what depends on it in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
