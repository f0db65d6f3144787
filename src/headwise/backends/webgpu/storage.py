"""Memory of the GPU: a pool of buffers, and views of them with shape, strides and dtype."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import wgpu

USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST

_SMALLEST = 256


class OutOfMemory(RuntimeError):
    """The GPU has no room for a buffer, or none may be that large. The message names the size and the limit."""


class Storage:
    """A buffer on loan from the pool: it goes back when nobody refers to it any more."""

    __slots__ = ("buffer", "last_use", "pool", "size")

    def __init__(self, pool: Pool, buffer: Any, size: int) -> None:
        self.pool, self.buffer, self.size = pool, buffer, size
        self.last_use = -1  # the recording that used it last

    def __del__(self) -> None:
        # Called by whatever thread lets go of the last reference: appending is all that is safe to do here.
        self.pool.returned.append((self.size, self.buffer, self.last_use))


class Pool:
    """Buffers by size class. A buffer keeps its place in line: what reuses it runs after what used it before."""

    def __init__(self, device: Any, most_bytes: int, what_most: str, submit: Callable[[], None]) -> None:
        self._device, self._submit = device, submit
        self._most, self._what_most = most_bytes, what_most
        self._free: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        self.returned: deque[tuple[int, Any, int]] = deque()
        # All buffers, lent or free. A storage may die in a cycle of references; the collector would end its buffer
        # with it, and what comes back to the pool would be a buffer without memory.
        self._buffers: dict[int, Any] = {}
        self.allocated = 0  # bytes, in use and free

    def take(self, nbytes: int) -> Storage:
        return self.take_again(self._size_of(nbytes))

    def _size_of(self, nbytes: int) -> int:
        size = _size_class(nbytes)
        if size > self._most:
            size = (nbytes + 255) // 256 * 256
        if size > self._most:
            raise OutOfMemory(
                f"a tensor of {nbytes} bytes is larger than one buffer may be on {self._what_most}: "
                f"{self._most} bytes. Split the batch, or use backend='cpu'"
            )
        return size

    def take_again(self, size: int) -> Storage:
        """A buffer of a size that an earlier one has."""
        if self.returned:
            self._collect()
        free = self._free[size]
        if free:
            buffer, last_use = free.pop()
            storage = Storage(self, buffer, size)
            storage.last_use = last_use
            return storage
        return Storage(self, self._allocate(size), size)

    def _allocate(self, size: int) -> Any:
        try:
            buffer = self._device.create_buffer(size=size, usage=USAGE)
        except Exception:
            self.trim()  # buffers of other sizes that nobody holds
            try:
                buffer = self._device.create_buffer(size=size, usage=USAGE)
            except Exception as error:
                raise OutOfMemory(
                    f"{self._what_most} has no room for {size} more bytes ({self.allocated} are in use by Headwise): {error}"
                ) from error
        self.allocated += size
        self._buffers[id(buffer)] = buffer
        return buffer

    def trim(self) -> None:
        """Give the memory of free buffers back to the driver."""
        self._submit()  # what is recorded may still read them
        self._collect()
        for size, buffers in self._free.items():
            for buffer, _ in buffers:
                buffer.destroy()
                del self._buffers[id(buffer)]
                self.allocated -= size
        self._free.clear()

    def _collect(self) -> None:
        while self.returned:
            size, buffer, last_use = self.returned.popleft()
            self._free[size].append((buffer, last_use))


def _size_class(nbytes: int) -> int:
    """Powers of two and three steps between them: at most a quarter of a large buffer is unused."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    power = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(power // 4, _SMALLEST)
    return -(-nbytes // step) * step


_numbers: dict[tuple[Any, ...], int] = {}
_next_number = itertools.count()
_MOST_NUMBERS = 16384


def numbered(facts: tuple[Any, ...]) -> int:
    """The number of a layout, or of a call. What was forgotten gets another number, and no number is given twice."""
    number = _numbers.get(facts)
    if number is None:
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        number = _numbers[facts] = next(_next_number)
    return number


class Region:
    """A strided view of a storage: what a kernel's argument is. Offset and strides count elements."""

    __slots__ = ("_key", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> None:
        self.storage, self.dtype, self.offset = storage, dtype, offset
        self.shape, self.strides = tuple(shape), tuple(strides)
        self._key: int | None = None

    @property
    def key(self) -> int:
        """A number for all that a launcher may know of it: those of two regions are equal only where these are."""
        if self._key is None:
            size = 0 if self.storage is None else self.storage.size
            self._key = numbered((self.dtype, self.shape, self.strides, self.offset, size))
        return self._key

    def on(self, storage: Storage | None) -> Region:
        """The same view of other memory of the same size."""
        made = Region.__new__(Region)
        made.storage, made.dtype, made.offset = storage, self.dtype, self.offset  # type: ignore[assignment]
        made.shape, made.strides, made._key = self.shape, self.strides, self.key
        return made

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
        return self.strides == contiguous_strides(self.shape) or self.numel <= 1 or self._dense_but_for_ones()

    def _dense_but_for_ones(self) -> bool:
        """Dense, whatever the strides of dims of size 1."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def span(self) -> tuple[int, int]:
        """First element and one past the last that the view touches, counted from the start of the storage."""
        if self.numel == 0:
            return self.offset, self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + last + 1

    def narrow(self, dim: int, start: int, length: int) -> Region:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Region(self.storage, self.dtype, shape, self.strides, self.offset + start * self.strides[dim])

    def with_shape(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Region:
        """Other sizes over the same elements; strides of a contiguous tensor where none are given."""
        return Region(
            self.storage, self.dtype, shape, contiguous_strides(shape) if strides is None else strides, self.offset
        )

    def as_dtype(self, dtype: torch.dtype) -> Region:
        """The same bits read as another dtype of the same size."""
        return Region(self.storage, dtype, self.shape, self.strides, self.offset)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
