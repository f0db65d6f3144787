"""Barriers and messages in shared memory, by which the warps of a program hand things to each other.

A ring is shared memory with room for a few tiles, each with two barriers: ``full`` (the tile has arrived) and ``empty``
(everybody is done with it). Tile number ``count`` is at place ``count % STAGES``. A mailbox is a ring of a few numbers: what
the producer tells the other warps of the next piece of work.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and does not unpack them into new ones)

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.gluon_names import gl, gluon, mbarrier, thread_barrier

_SLOTS = gl.constexpr(2)  # messages in flight


class Mailbox(NamedTuple):
    messages: Any
    full: Any
    empty: Any


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete after so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


@gluon.jit
def wait_full(full, count, STAGES: gl.constexpr, pred=True):
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, count, STAGES: gl.constexpr):
    """Until the tile that was in this place before is done with; the first one waits for nobody."""
    mbarrier.wait(empty.index(count % STAGES), ((count // STAGES) & 1) ^ 1)


@gluon.jit
def new_mailbox(FIELDS: gl.constexpr, READERS: gl.constexpr):
    messages = gl.allocate_shared_memory(gl.int32, [_SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Mailbox(messages, new_barriers(_SLOTS, 1), new_barriers(_SLOTS, READERS))


@gluon.jit
def post(mailbox, count, message):
    """Send the ``count``-th message, a tuple of numbers, to all readers."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FIELDS: gl.constexpr = mailbox.messages.shape[0] // _SLOTS
    none = gl.full([1], 0, gl.int32, LANES)
    at = count % _SLOTS
    wait_empty(mailbox.empty, count, _SLOTS)
    for i in gl.static_range(len(message)):
        mailbox.messages.index(at * FIELDS + i).store(none + message[i])
    thread_barrier()
    mbarrier.arrive(mailbox.full.index(at))


@gluon.jit
def read(mailbox, count, FIELDS: gl.constexpr):
    """The first fields of the ``count``-th message."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = count % _SLOTS
    first = at * (mailbox.messages.shape[0] // _SLOTS)
    wait_full(mailbox.full, count, _SLOTS)
    message = ()
    for i in gl.static_range(FIELDS):
        message = message + (gl.max(mailbox.messages.index(first + i).load(LANES), 0),)  # type: ignore[assignment]
    mbarrier.arrive(mailbox.empty.index(at))
    return message
