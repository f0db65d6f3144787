"""Memory of the GPU: a pool of buffers, and strided views of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
import wgpu

USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST

_SMALLEST = 256


class OutOfMemory(RuntimeError):
    """The GPU has no room for a buffer, or none may be that large. The message names the size and the limit."""


# A buffer that can be lent: its number in the pool, the command buffer until which earlier owners may use it, the buffer.
Free = tuple[int, int, Any]


class Storage:
    """A buffer on loan from a pool. It goes back when nobody refers to it any more."""

    __slots__ = ("buffer", "busy_until", "number", "pool", "size")

    buffer: Any
    size: int
    pool: Pool
    number: int  # of the buffer in its pool
    busy_until: int  # number of the last command buffer in which earlier owners may use the buffer

    def __del__(self, give_back: Callable[[list[Any], Free], None] = heappush) -> None:
        # Runs in the thread that drops the last reference, whichever that is: nothing but this one call, which compares
        # numbers and runs no Python, is safe here. A default, as globals are gone when the interpreter ends.
        give_back(self.pool.free[self.size], (self.number, self.pool.submission, self.buffer))


class Pool:
    """Buffers by size class. The GPU runs commands in order, so a buffer can be lent again at once.

    The free buffer with the lowest number is lent first, in whatever order they came back: a step that repeats gets the same
    buffers again for the same tensors, and bind groups that were made for them fit.
    """

    def __init__(self, most_bytes: int, name: str, submission: int = 0) -> None:
        """most_bytes: of one buffer. name: of the device, for messages."""
        self._most, self._name = most_bytes, name
        self.free: dict[int, list[Free]] = defaultdict(list)  # heaps
        self.submission = submission  # number of the command buffer that is being recorded
        self._numbers = 0  # of buffers so far

    def take(self, nbytes: int) -> Storage:
        size = self._size_of(nbytes)
        free = self.free[size]
        return self._lend(size, heappop(free) if free else self.fresh(size))

    def fresh(self, size: int) -> Free:
        """A new buffer."""
        buffer = self.allocate(size)
        self._numbers += 1
        return self._numbers, -1, buffer

    def _lend(self, size: int, free: Free) -> Storage:
        storage = Storage()
        storage.size, storage.pool = size, self
        storage.number, storage.busy_until, storage.buffer = free
        return storage

    def allocate(self, size: int) -> Any:
        raise NotImplementedError

    def _size_of(self, nbytes: int) -> int:
        size = _size_class(nbytes)
        if size > self._most:
            size = (nbytes + 255) // 256 * 256
        if size > self._most:
            raise OutOfMemory(
                f"a tensor of {nbytes} bytes is larger than one buffer may be on {self._name}: "
                f"{self._most} bytes. Split the batch, or use backend='cpu'"
            )
        return size


class StandIns(Pool):
    """Numbers in place of buffers, for a launcher that is recorded.

    A buffer that the launcher drops is lent again, so a record needs no more memory than the launcher does.
    """

    def __init__(self, most_bytes: int, name: str) -> None:
        super().__init__(most_bytes, name)
        self.sizes: list[int] = []  # of all buffers

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def stand_in(self, size: int) -> Storage:
        """A buffer of exactly this size: an argument's."""
        return self._lend(size, self.fresh(size))


class GpuMemory(Pool):
    """The buffers of a device."""

    def __init__(self, gpu: Any, most_bytes: int, name: str, submit: Callable[[], None], submission: int = 0) -> None:
        super().__init__(most_bytes, name, submission)
        self._gpu, self._submit = gpu, submit
        # All buffers, lent or free. They must outlive their storages: if a storage dies in a reference cycle, the garbage
        # collector would destroy its buffer with it, and the pool would get a buffer without memory.
        self._buffers: dict[int, Any] = {}
        self.allocated = 0  # bytes, lent or free

    def allocate(self, size: int) -> Any:
        try:
            buffer = self._gpu.create_buffer(size=size, usage=USAGE)
        except Exception:
            self.trim()  # free buffers of other sizes
            try:
                buffer = self._gpu.create_buffer(size=size, usage=USAGE)
            except Exception as error:
                raise OutOfMemory(
                    f"{self._name} has no room for {size} more bytes ({self.allocated} are in use by Headwise; "
                    f"headwise.webgpu.memory_summary() says by which tensors): {error}"
                ) from error
        self.allocated += size
        self._buffers[id(buffer)] = buffer
        return buffer

    @property
    def whole(self) -> GpuMemory:
        """The memory of the device, where this is a part of it."""
        return self

    def trim(self) -> None:
        """Give the memory of free buffers back to the driver."""
        self._submit()  # recorded commands may still read them
        for size, free in list(self.free.items()):
            while free:
                buffer = free.pop()[2]
                buffer.destroy()
                del self._buffers[id(buffer)]
                self.allocated -= size


def _size_class(nbytes: int) -> int:
    """Powers of two, and three steps between each two: at most a fifth of a large buffer is unused."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    power = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(power // 4, _SMALLEST)
    return -(-nbytes // step) * step


class Region:
    """A strided view of a storage: a kernel's argument. Offset and strides count elements."""

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> None:
        self.storage, self.dtype, self.offset = storage, dtype, offset
        self.shape, self.strides = tuple(shape), tuple(strides)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Contiguous; strides of dims of size 1 do not matter."""
        if self.numel <= 1:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def broadcast_strides(self) -> tuple[int, ...]:
        """The strides, 0 for dims of size 1."""
        return tuple(0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))

    def span(self) -> tuple[int, int]:
        """First element and one past the last that the view touches, counted from the start of the storage."""
        if self.numel == 0:
            return self.offset, self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + last + 1

    def span_bytes(self) -> int:
        low, high = self.span()
        return (high - low) * self.itemsize

    def narrow(self, dim: int, start: int, length: int) -> Region:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Region(self.storage, self.dtype, shape, self.strides, self.offset + start * self.strides[dim])

    def narrow_broadcast(self, dim: int, start: int, length: int) -> Region:
        """As `narrow`; a dim of size 1 stays: all entries share it."""
        return self.narrow(dim, start, length) if self.shape[dim] > 1 else self

    def with_shape(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Region:
        """Other sizes over the same elements; strides of a contiguous tensor where none are given."""
        strides = contiguous_strides(shape) if strides is None else strides
        return Region(self.storage, self.dtype, shape, strides, self.offset)

    def with_leading(self, dims: int) -> Region:
        """The same with dims of size 1 in front, ``dims`` in all."""
        missing = dims - len(self.shape)
        return self if missing <= 0 else self.with_shape((1,) * missing + self.shape, (0,) * missing + self.strides)

    def permuted(self, order: Sequence[int]) -> Region:
        return self.with_shape([self.shape[d] for d in order], [self.strides[d] for d in order])

    def expanded(self, shape: Sequence[int]) -> Region:
        """Broadcast to a shape: dims of size 1 and dims in front step by 0."""
        missing = len(shape) - len(self.shape)
        if missing == 0 and self.shape == shape:
            return self
        steps = [0] * missing + [s if n > 1 else 0 for n, s in zip(self.shape, self.strides, strict=True)]
        return self.with_shape(shape, steps)

    def as_words(self) -> Region:
        """The same memory in words of 32 bits. Rows are dense, begin at a word and are whole words long."""
        *outer, width = (size * self.itemsize // 4 for size in (*self.strides[:-1], self.shape[-1]))
        offset = self.offset * self.itemsize // 4
        return Region(self.storage, torch.int32, (*self.shape[:-1], width), (*outer, 1), offset)

    def flat(self) -> Region:
        """The elements of a contiguous view in one dim."""
        return self.with_shape((self.numel,))


class Layout:
    """Everything about an array but its memory. Unique per device: equal layouts are the same object."""

    __slots__ = ("__weakref__", "dtype", "offset", "overlaps", "shape", "size", "strides", "wrapper")

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size: int
    ) -> None:
        self.dtype, self.shape, self.strides, self.offset = dtype, shape, strides, offset
        self.size = size  # bytes of the storage: it decides how kernels bind it
        # Expanded: elements share memory, and nothing may write there. Other overlaps are not looked for, as in PyTorch.
        self.overlaps = any(step == 0 and n > 1 for n, step in zip(shape, strides, strict=True)) and 0 not in shape
        # Only here, where an array is about to be made: the import registers the device with PyTorch.
        from headwise.backends.webgpu.torch_device import DEVICE

        # Arguments of PyTorch's `_make_wrapper_subclass`: twice as fast without strides, and faster without keywords.
        layout = (None, None) if offset == 0 and strides == contiguous_strides(shape) else (strides, offset)
        self.wrapper = (shape, *layout, None, dtype, torch.strided, DEVICE)

    def on(self, storage: Storage) -> Region:
        return Region(storage, self.dtype, self.shape, self.strides, self.offset)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
