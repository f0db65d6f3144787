"""Memory of large results, in huge pages where the system lends them.

The C library asks the system anew for every block of 32 MiB and more, and often for smaller ones. Each page of 4 KiB is then
a page fault, which the system clears and maps: writing a fresh tensor takes many times as long as writing it again. Where
Linux leaves it to programs ("madvise", the default of most distributions), asking for pages of 2 MiB makes that one fault of
512. NumPy does the same for its arrays of 4 MiB and more.

This is advice about addresses inside the tensor's own memory. Where it is not taken, nothing changes but the time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

_HUGE = 2 << 20  # bytes; of a huge page on x86 and most ARM systems
_LARGE = 2 * _HUGE
ALWAYS_FRESH = 32 << 20  # bytes: the C library keeps no freed block of this size


def huge_pages(x: Tensor) -> Tensor:
    """``x`` itself, which nothing has been written to yet."""
    advise, size = _madvise(), x.untyped_storage().nbytes()
    if advise is not None and size >= _LARGE:
        first = -(-x.data_ptr() // _HUGE) * _HUGE
        last = (x.data_ptr() + size) // _HUGE * _HUGE  # pages that lie inside it
        advise(first, last - first, mmap.MADV_HUGEPAGE)
    return x


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
