"""The tiles of the Hopper kernels: what a program works on at once, and what calls it is for."""

from __future__ import annotations

from typing import NamedTuple


class ForwardTile(NamedTuple):
    """What a program of the forward kernel works on at once. A head dim is cut into one or two powers of two."""

    consumers: int  # warpgroups that compute, of 64 queries each
    keys: int
    d0: int  # the pieces of queries and keys
    d1: int
    e0: int  # those of values and of the output
    e1: int
    k_stages: int  # blocks of keys, and of values, that shared memory holds
    v_stages: int
    q_stages: int  # tiles of queries that it holds for each consumer
    one_o: bool = False  # the two pieces of the output leave through one buffer, one after the other
    # What of the next tile is under way before this one is stored: 0: nothing; 1: its first products; 2: these, and under a
    # causal mask they do not wait for the last products of this one. (Without a mask they never do, with a window always.)
    ahead: int = 1
    keys_first: bool = False  # a block of keys is loaded before the values of the block above it, as they are needed
    b_stages: int = 0  # blocks of a bias that shared memory holds


class ForwardRow(NamedTuple):
    """A row of the table of measurements: the tiles for head dims up to ``widest``."""

    widest: int
    tile: ForwardTile
    short: ForwardTile  # for sequences of up to SHORT queries
    short_banded: ForwardTile  # under a causal mask or a window, for sequences of up to ``banded_up_to`` queries
    few: ForwardTile  # for longer sequences where there are few tiles: less than FEW for every multiprocessor
    # For sequences of up to SHORT queries, of up to MEDIUM under a causal mask or a window, if its queries are filled by
    # nearly whole sequences and there are MANY tiles for every multiprocessor. For packed batches, of which the kernel alone
    # knows the lengths, under a band, from where ``short_banded`` ends.
    wide: ForwardTile | None = None
    banded_up_to: int = 512


class BackwardTile(NamedTuple):
    """How the backward kernel cuts its work for heads up to a width, and when it is worth it."""

    keys: int  # per tile
    rows: int  # of queries per step
    width: int  # of heads, filled up: columns of a block of sums of dQ
    d0: int  # the pieces of queries and keys that products are done in
    d1: int
    e0: int  # those of values and grad_out
    e1: int
    stages: int  # steps that are loaded ahead
    kv_stages: int  # tiles whose keys and values shared memory holds
    least_tiles: int  # over all heads of a call: smaller calls were not measured to gain
    unordered_from: int  # keys, from which on sums of dQ in any order (where that is allowed) are faster than turns
    banded_unordered_from: int  # the same under a causal mask or a window
