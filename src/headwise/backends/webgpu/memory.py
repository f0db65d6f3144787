"""What holds the memory of the GPU."""

from __future__ import annotations

import gc
from collections import Counter

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.array import Array

_SHOWN = 10


def memory_summary() -> str:
    """Text: how much is in use, how much is kept for later, and which tensors are the largest."""
    device = runtime.device()
    seen: set[int] = set()
    held: Counter[str] = Counter()
    many: Counter[str] = Counter()
    # The type is asked, not the object: some objects run code of their own when they are asked what they are.
    for x in gc.get_objects():
        if type(x) is Array and x._device is device and id(x._storage) not in seen:
            seen.add(id(x._storage))
            name = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            held[name] += x._storage.size
            many[name] += 1
    with device.lock:
        pool = device.pool.whole
        allocated = pool.allocated
        free = sum(size * len(buffers) for size, buffers in pool.free.items())
    lines = [
        f"{device.capabilities.name}: {_size(allocated - free)} in use, {_size(free)} kept for later tensors",
        *(f"{_size(size):>12}  {many[name]:>5} × {name}" for name, size in held.most_common(_SHOWN)),
    ]
    if len(held) > _SHOWN:
        rest = sum(size for _, size in held.most_common()[_SHOWN:])
        lines.append(f"{_size(rest):>12}  in tensors of {len(held) - _SHOWN} other shapes")
    return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
