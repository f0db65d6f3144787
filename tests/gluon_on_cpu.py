"""The Gluon kernels for Hopper on the CPU: their own source, run by Python, with a stand-in for the GPU around it.

Every partition of every program is a thread, and one of them runs at a time. Where a partition waits, and where it could be
overtaken, a random one that can go on is chosen. What the GPU does by itself is late by chance:

- a copy into shared memory arrives some time after it was asked for, and only then counts for its barrier,
- a copy out of shared memory reads it some time before `wait_for_stores` returns,
- a product reads shared memory at some time before the wait that names it; using it earlier is an error,
- new shared memory, and what a box leaves there, is NaN until something is written.

So a kernel that reads too early, overwrites too early or waits for what never comes gives wrong numbers or `Deadlock` here,
for some seed. What this does not know: registers and their layouts, fences between the two ways to shared memory, and memory
orders between programs.
"""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from gluon_values import Pointer, Value, load, pair, plain, store, where
from triton.experimental.gluon import language as real_gl
from triton.runtime.jit import JITFunction

from headwise.backends.triton.gpu import KNOWN, Gpu, Interpreter
from headwise.backends.triton.hopper.gluon_names import Members

_PACKAGE = "headwise.backends.triton.hopper."


class Deadlock(AssertionError):
    pass


class _Stop(BaseException):
    """Ends the threads of a run that failed."""


class Machine:
    """One launch: its threads, what is under way, and who is next."""

    def __init__(self, seed: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.programs = programs
        self.coming: list[Callable[[], None]] = []  # copies into shared memory that have not arrived
        self.threads: list[Partition] = []
        self.back = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                left = [t for t in self.threads if not t.done]
                if not left:
                    break
                ready = [t for t in left if t.ready()]
                if self.coming and (not ready or self.random.random() < 0.3):
                    self.coming.pop(self.random.randrange(len(self.coming)))()
                    continue
                if not ready:
                    raise Deadlock("nobody can go on: " + "; ".join(f"{t.name} waits for {t.waits_for}" for t in left))
                self.random.choice(ready).resume()
                self.back.acquire()
                if self.failure is not None:
                    raise self.failure
            while self.coming:
                self.coming.pop()()
        finally:
            self.failure = self.failure or _Stop()
            for t in self.threads:
                if not t.done:
                    t.resume()
                    t.thread.join()


class Partition:
    """Some warps of a program that run the same function."""

    def __init__(self, machine: Machine, program: Any, name: str, threads: int, run: Callable[[], None]) -> None:
        self.machine, self.program, self.name, self.count, self.main = machine, program, name, threads, run
        self.done, self.ready, self.waits_for = False, lambda: True, "its start"
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        self.turn.acquire()
        _here.partition = self
        try:
            if self.machine.failure is None:
                self.main()
                assert not self.stores, "a program ends with copies out of its shared memory under way"
        except _Stop:
            pass
        except BaseException as error:
            self.machine.failure = self.machine.failure or error
        self.done = True
        self.machine.back.release()

    def resume(self) -> None:
        self.turn.release()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others go first, and go on when ``ready()``."""
        self.some_work()
        self.ready, self.waits_for = ready, what
        self.machine.back.release()
        self.turn.acquire()
        if self.machine.failure is not None:
            raise _Stop

    def some_work(self) -> None:
        """Some of what was started gets done, in order."""
        for under_way in (self.products, self.stores):
            for _ in range(self.machine.random.randint(0, len(under_way))):
                under_way.pop(0)()


_here = threading.local()


def _partition() -> Partition:
    return _here.partition


class Buffer:
    """Shared memory, or a part of it. ``whole``: the allocation, where it can be read in another shape."""

    def __init__(self, x: Any, whole: Any = None) -> None:
        self.x, self.whole = x, whole

    dtype = property(lambda self: self.x.dtype)
    shape = property(lambda self: tuple(self.x.shape))

    def index(self, at: Any) -> Buffer:
        at = int(plain(at))
        assert 0 <= at < self.x.shape[0], "a place that is not there"
        return Buffer(self.x[at])

    def reshape(self, shape: list[int]) -> Buffer:
        return Buffer(self.x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.x.permute(order))

    def slice(self, start: Any, length: Any, dim: int = 0) -> Buffer:
        return Buffer(self.x.narrow(dim, int(start), int(length)))

    def load(self, layout: Any) -> Value:
        return Value(self.x.clone())

    def store(self, value: Value) -> None:
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        self.x.copy_(value.x)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Slabs:
        return Slabs(self.x, shape[1], shape[2])

    reinterpret = _reinterpret


class Slabs:
    """Tiles ``(places, …, columns)`` as they lie in memory: in slabs of up to 64 columns, in pieces of some rows."""

    def __init__(self, x: Any, rows: int, columns: int) -> None:
        self.x, self.rows, self.columns = x.flatten(1, -2), rows, columns
        assert columns == min(64, x.shape[-1])

    def index(self, at: Any) -> Buffer:
        _, rows, columns = self.x.shape
        pieces, slabs = rows // self.rows, columns // self.columns
        place, at = divmod(int(at), pieces * slabs)
        slab, piece = divmod(at, pieces)
        tile = self.x[place].narrow(0, piece * self.rows, self.rows)
        return Buffer(tile.narrow(1, slab * self.columns, self.columns))


class Barrier:
    def __init__(self) -> None:
        self.arrivals = self.left = self.bytes = self.phase = 0

    def step(self, arrivals: int, expected: int) -> None:
        self.left -= arrivals
        self.bytes += expected
        assert self.left >= 0, "more arrivals than the barrier is for"
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.arrivals


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(plain(at))]


class Product:
    """A product that was started: the accumulators are those of the last one that added to them."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.parts, self.value = (a, b, acc if use_acc else None), None
        assert a.dtype == b.dtype

    def __call__(self) -> None:
        a, b, acc = self.parts
        product = a.x.float() @ b.x.float()
        if isinstance(acc, Product):
            acc = acc.done()
        self.value = Value(product if acc is None else acc.x + product)

    def done(self) -> Value:
        assert self.value is not None, "a product is used before it is done"
        return self.value


class Element:
    """What kernels ask of the dtype of a descriptor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


class Descriptor:
    def __init__(self, tensor: Any, box: Any) -> None:
        self.x, described = tensor, box.descriptor(tensor)
        self.block_shape, self.layout = list(described.block_shape), described.layout
        self.dtype = Element(tensor.dtype)
        self.packed = len(self.block_shape) == 5

    def at(self, coordinates: list[Any]) -> tuple[Any, tuple[slice, ...]]:
        """What of the tensor is in a box there, and where in the box that lies."""
        starts = [int(plain(c)) for c in coordinates]
        x, shape = self.x, self.block_shape
        if self.packed:
            far, end, past, head, column = starts
            assert far == 2**30
            first = past - far  # -length + row: rows are there as long as they are negative
            x = self.x[0]
            assert end + first >= 0
            starts, shape = [head, end + first, column], [1, shape[2], shape[4]]
            ends = [x.shape[0], end, x.shape[2]]
            assert end <= x.shape[1] or first >= 0, "a sequence that ends outside of the tensor"
        else:
            ends = list(x.shape)
        there = [max(0, min(end - start, n)) for start, n, end in zip(starts, shape, ends, strict=True)]
        part = x[tuple(slice(s, s + n) for s, n in zip(starts, there, strict=True))]
        return part, shape, tuple(slice(0, n) for n in there)


def _load_tile(desc: Descriptor, coordinates: list[Any], barrier: Barrier, buffer: Buffer) -> None:
    part, shape, where = desc.at(coordinates)

    def arrive() -> None:
        box = torch.zeros(shape, dtype=desc.x.dtype)
        box[where] = part
        assert box.numel() == buffer.x.numel()
        buffer.x.copy_(box.reshape(buffer.x.shape))
        barrier.step(0, -box.numel() * box.element_size())

    buffer.x.fill_(float("nan"))  # from now on nobody may read it
    _partition().machine.coming.append(arrive)


def _store_tile(desc: Descriptor, coordinates: list[Any], buffer: Buffer) -> None:
    part, shape, where = desc.at(coordinates)
    _partition().stores.append(lambda: part.copy_(buffer.x.reshape(shape)[where]))


def _wait_for_stores(left: int) -> None:
    stores = _partition().stores
    while len(stores) > left:
        stores.pop(0)()


def _mma(a: Any, b: Buffer, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    assert a.shape[1] == b.shape[0]
    if isinstance(a, Value):
        a = Value(a.x.clone())
    product = Product(a, b, acc, use_acc)
    _partition().products.append(product)
    _partition().some_work()
    return product


def _mma_wait(left: int, values: list[Any]) -> Any:
    products = _partition().products
    while len(products) > left:
        products.pop(0)()
    found = tuple(
        v.value if isinstance(v, Product) and v.value is not None and v not in products else v for v in values
    )
    return found[0] if len(found) == 1 else found


def _init(barrier: Barrier, count: int) -> None:
    barrier.arrivals = barrier.left = int(count)


def _expect(barrier: Barrier, size: int) -> None:
    barrier.step(1, int(size))


def _arrive(barrier: Barrier, pred: Any = True) -> None:
    if pred:
        barrier.step(1, 0)
        _partition().until(lambda: True, "nothing")


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    phase = int(plain(phase))
    if pred:
        _partition().until(
            lambda: barrier.phase != phase, f"phase {phase}, {barrier.left} arrivals, {barrier.bytes} bytes"
        )


def _named_barrier(number: int, threads: int, waits: bool) -> None:
    """Of a program: a count of threads, and how often it was complete."""
    me = _partition()
    state = me.program.named.setdefault(number, [0, 0])
    round_of_mine = state[1]
    state[0] += me.count
    assert state[0] <= threads
    if state[0] == threads:
        state[:] = [0, round_of_mine + 1]
    if waits:
        me.until(lambda: state[1] > round_of_mine, f"the named barrier {number}")


def _atomic_add(pointer: Pointer, value: Any, sem: str = "") -> Value:
    old = Value(pointer.memory[int(pointer.at)].clone())
    pointer.memory[int(pointer.at)] += int(plain(value))
    _partition().until(lambda: True, "nothing")
    return old


def _assembly(
    text: str, constraints: str, args: list[Any], dtype: Any = None, is_pure: bool = True, pack: int = 1
) -> Any:
    """What the kernels write in PTX."""
    if (named := re.search(r"bar\.(sync|arrive) (\d+), (\d+)", text)) is not None:
        _named_barrier(int(named[2]), int(named[3]), named[1] == "sync")
        return Value(0)
    if "red.relaxed.gpu.global.add.v4.f32" in text:
        base, offset, values = args
        at = offset.x.long() // 4 + torch.arange(offset.x.numel()) % 4 + torch.as_tensor(base.at).long()
        base.memory[at] += values.x
        return None
    if "ld.acquire" in text:
        counter, turn = args
        at, turn = int(counter.at), int(plain(turn))
        _partition().until(lambda: int(counter.memory[at]) == turn, f"turn {turn}")
        return Value(turn)
    if "st.relaxed" in text:
        counter, turn = args
        counter.memory[int(counter.at)] = int(plain(turn))
        return Value(0)
    if "atom.relaxed.gpu.global.add.u32" in text:
        return _atomic_add(args[0], 1)
    if "shfl.sync.idx" in text:
        return args[0]
    assert text.strip() == "mov.b32 $0, $1;", text
    return args[0]


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape[0])
    dtype = dtype.dtype if isinstance(dtype, Element) else dtype
    poison = float("nan") if dtype.is_floating_point else -(2**30)
    return Buffer(torch.full([int(n) for n in shape], poison, dtype=dtype))


def _specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    me = _partition()
    for (function, args), count in zip(parts, [4, *warps], strict=True):
        name = f"{me.name}, {function.fn.__name__}{args[0] if isinstance(args[0], int) else ''}"
        me.machine.threads.append(
            Partition(me.machine, me.program, name, 32 * count, lambda f=function, a=args: f.fn(*a))
        )


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _log2(x: Any) -> Any:
    """As `gluon_names.log2`, which takes what is less than a normal number for zero."""
    return torch.log2(torch.where(x.abs() < 2.0**-126, 0.0, x))


_GL = {
    "constexpr": lambda x: x, "float32": torch.float32, "int32": torch.int32, "int64": torch.int64,
    "static_assert": _nothing, "static_range": range, "warp_specialize": _specialize,
    "program_id": lambda axis: Value(torch.tensor(_partition().program.number, dtype=torch.int32)),
    "num_programs": lambda axis: Value(torch.tensor(_partition().machine.programs, dtype=torch.int32)),
    "num_warps": lambda: 4, "to_tensor": lambda x: x if isinstance(x, Value) else Value(x),
    "zeros": lambda shape, dtype, layout: Value(torch.zeros([int(n) for n in shape], dtype=dtype)),
    "full": lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype)),
    "arange": lambda start, end, layout: Value(torch.arange(int(start), int(end), dtype=torch.int32)),
    "load": load, "store": store, "atomic_add": _atomic_add, "allocate_shared_memory": _allocate,
    "where": where, "maximum": pair(torch.maximum), "minimum": pair(torch.minimum),
    "cdiv": lambda a, b: (a + (b - 1)) // b if isinstance(a, Value) or isinstance(b, Value) else -(-a // b),
    "max": lambda x, axis: Value(x.x.amax(axis)), "sum": lambda x, axis: Value(x.x.sum(axis, dtype=x.dtype)),
    "exp2": lambda x: Value(torch.exp2(x.x)), "log2": lambda x: Value(torch.log2(x.x)),
    "split": lambda x: tuple(Value(half) for half in x.x.unbind(-1)),
    "join": lambda a, b: Value(torch.stack((a.x, b.x), -1)),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "associative_scan": lambda x, axis, combine: Value(x.x.cumsum(axis, dtype=x.dtype)),
    "inline_asm_elementwise": _assembly,
    **dict.fromkeys(
        ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
         "BlockedLayout"), _nothing,
    ),
}  # fmt: skip
_NAMES = {
    "gl": SimpleNamespace(**_GL),
    "mbarrier": SimpleNamespace(
        init=_init, expect=_expect, arrive=_arrive, wait=_wait, MBarrierLayout=lambda: "barriers"
    ),
    "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait, "load_tile": _load_tile, "store_tile": _store_tile,
    "reciprocal": lambda x: Value(1.0 / x.x), "log2": lambda x: Value(_log2(x.x)),
    "wait_for_stores": _wait_for_stores, "fence_async_shared": _nothing, "thread_barrier": _nothing,
}  # fmt: skip


def _constants(variant: Any) -> Any:
    x = dict(Members(variant))
    if "deterministic" in x:
        x["upwards"] = x["deterministic"] and x["has_right"] and not x["has_left"] and not x["packed"]
    return SimpleNamespace(**x)


@contextmanager
def as_python() -> Iterator[None]:
    """The kernels' modules see the stand-ins, and their functions can be called."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGE) or name.endswith("gluon_names"):
            continue
        for key, value in list(vars(module).items()):
            new = _NAMES.get(key, value)
            if key == "constants":
                new = _constants
            elif isinstance(value, real_gl.constexpr):
                new = value.value
            if new is not value:
                changed.append((vars(module), key, value))
                vars(module)[key] = new
    call = JITFunction.__call__
    JITFunction.__call__ = lambda self, *args, **kwargs: self.fn(*args, **kwargs)  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.__call__ = call  # type: ignore[method-assign]
        for names, key, value in changed:
            names[key] = value


def run(kernel: Any, programs: int, arguments: list[Any], seed: int) -> None:
    with as_python():
        machine = Machine(seed, programs)
        for number in range(programs):
            program = SimpleNamespace(number=number, named={})
            machine.threads.append(Partition(machine, program, f"program {number}", 128, lambda: kernel.fn(*arguments)))
        machine.run()


class OnCpu(Interpreter):
    """A Hopper GPU whose kernels run here: those of Gluon as above, the others in Triton's interpreter."""

    def __init__(self, seed: int, programs: int = 3) -> None:
        Gpu.__init__(self, KNOWN["sm_90"]._replace(multiprocessors=programs), False)
        self.seed, self.counter, self.launched = seed, torch.zeros(1, dtype=torch.int32), []

    def empty(self, *args: Any, **kwargs: Any) -> Any:
        x = super().empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(torch.iinfo(x.dtype).max // 2)

    def counters(self, count: int) -> Any:
        return self.counter

    def launch(
        self, kernel: Any, grid: Any, tensors: Any, numbers: Any = (), constants: Any = (), *, descriptors: Any = (),
        **options: Any,
    ) -> None:  # fmt: skip
        if not descriptors:
            super().launch(kernel, grid, tensors, numbers, constants, **options)
            return
        described = [None if d is None else Descriptor(*d) for d in descriptors]
        pointers = [None if t is None else Pointer(_memory(t)) for t in tensors]
        scalars = [Value(torch.tensor(n, dtype=torch.int32 if isinstance(n, int) else torch.float32)) for n in numbers]
        self.launched.append(constants[0])
        run(kernel, grid[0], [*described, *pointers, *scalars, *constants], self.seed)
        assert not self.counter.any(), "the next launch does not find a zero"


def _memory(x: Any) -> Any:
    assert x.is_contiguous()
    return x.view(-1)
