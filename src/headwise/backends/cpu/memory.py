"""Memory of large results, in huge pages where the system lends them.

The C library asks the system anew for blocks of 32 MiB and more, unless a freed one that large lies inside its heap, and
often for smaller ones. Each page of 4 KiB is then a page fault, which the system clears and maps: writing a fresh tensor
takes many times as long as writing it again. Where Linux leaves it to programs ("madvise", the default of most
distributions), asking for pages of 2 MiB makes that one fault of 512. NumPy does the same for its arrays of 4 MiB and more.

Both are questions about addresses inside the tensor's own memory. Where there is no answer, nothing changes but the time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_HUGE = 2 << 20  # bytes; of a huge page on x86 and most ARM systems
_LARGE = 2 * _HUGE
_OFTEN_FRESH = 32 << 20  # bytes: smaller blocks stay with the C library when they are freed
_PROBES = 16  # pages that are looked at


def huge_pages(x: Tensor) -> Tensor:
    """``x`` itself, which nothing has been written to yet."""
    advise, size = _from_c("madvise", ctypes.c_int), x.untyped_storage().nbytes()
    if advise is not None and size >= _LARGE:
        first = -(-x.data_ptr() // _HUGE) * _HUGE
        last = (x.data_ptr() + size) // _HUGE * _HUGE  # pages that lie inside it
        advise(first, last - first, mmap.MADV_HUGEPAGE)
    return x


def would_be_fresh(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Would a result of that shape have to wait for most of its pages? To be asked right before it is made.

    What the C library lends now, it lends again to the next who asks for as much, such as an operator of PyTorch.
    """
    resident = _from_c("mincore", ctypes.c_char_p)
    if resident is None or math.prod(shape) * dtype.itemsize < _OFTEN_FRESH:
        return False
    lent = torch.empty(shape, dtype=dtype)
    step, first, answer = lent.nbytes // _PROBES, lent.data_ptr() // mmap.PAGESIZE, ctypes.create_string_buffer(1)
    there = 0
    for probe in range(_PROBES):
        page = (first + (probe * step + step // 2) // mmap.PAGESIZE) * mmap.PAGESIZE
        there += resident(page, mmap.PAGESIZE, answer) == 0 and answer.raw != b"\0"
    return there < _PROBES // 2


@functools.cache
def _from_c(name: str, third: type) -> Callable[..., int] | None:
    """A function of an address, a length and ``third``."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return None
    call = getattr(ctypes.CDLL(None), name)
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, third)
    return call
