"""One `Op`: what a public function calls, and everything that follows from what the op states.

An op states an arguments object, a check, a fake kernel and, if it is differentiable, a backward. From those this file
derives the operator that PyTorch sees (schema, fake kernel, autograd, vmap), the eager fast path, and what `explain` asks.

The eager fast path. Checking a call, choosing its backend and working out its launches costs more than launching. None
of it looks at data. So the first call makes an entry in the op's cache (`_cache`), and later calls replay the entry's record
with their own tensors. The records of the backward hang on the forward's entry. Whoever has to see PyTorch's operator
(tracing, modes, transforms, profilers, tensor subclasses) gets the plain path through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise import arguments
from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _autocast
from headwise.ops._cache import AUTOGRAD, Cache

Run = Callable[..., Any]

_library = torch.library.Library("headwise", "DEF")
# Looked up once: eager calls ask them.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _is_autocast = torch._C._are_functorch_transforms_active, torch._C._is_any_autocast_enabled
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

_NO_FORWARD_MODE = "headwise: forward-mode gradients are not supported (through {})"

OPS: dict[str, Op] = {}  # by the name of the public function


class Described(NamedTuple):
    """What backends judge a call by, beside its device and whether it wants gradients."""

    of: Tensor  # the tensor whose dtype and device are the call's
    sizes: dict[str, int]
    features: tuple[str, ...] = ()
    dtype: torch.dtype | None = None  # where it is not that of the tensor


class Saved(NamedTuple):
    """What a backward starts from."""

    args: Any  # of the forward; tensors that it did not save are None
    results: tuple[Any, ...]  # of the forward; likewise
    needs: tuple[bool, ...]  # which tensors of ``args`` want a gradient
    entry: Entry
    ran: list[tuple[Any, ...]]  # (record, its tensors, its results) of every op that the backward ran

    def run(self, op: Op, args: Any) -> Any:
        """Run a backward op where the forward ran."""
        tensors, backend = arguments.tensors_of(args), self.entry.backend
        of_gradient = _is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        run = None if of_gradient or _is_compiling() else op.find(args, tensors, backend)
        if run is None:
            return op.through_operator(args, backend)
        results = run(*tensors)
        self.ran.append((run, tensors, results))
        return results

    def need(self, name: str) -> bool:
        return self.needs[self.entry.names.index(name)]


class Entry(NamedTuple):
    """A forward call with gradients: how to run it, what it saves, and how to run its backward."""

    op: Op
    options: Any  # the arguments object without its tensors
    backend: str
    run: Run
    names: Sequence[str]  # of the tensors
    saved: Sequence[int]  # which of the tensors, then of the results, backward reads
    shown: int  # how many results the caller gets; 0: all
    backwards: Cache


class Backward(NamedTuple):
    """A backward that ran one op on what was saved and on gradients as they came: it needs no Python of the op."""

    run: Run
    inputs: tuple[int, ...]  # of the saved tensors, then the gradients
    results: tuple[int | None, ...]  # which result is the gradient of each tensor; None: no gradient
    one_result: bool

    @staticmethod
    def of(ran: list[tuple[Any, ...]], given: tuple[Any, ...], grads: Sequence[Any]) -> Backward | None:
        """None where the op's own Python is needed."""
        if len(ran) != 1:
            return None
        run, tensors, results = ran[0]
        one = isinstance(results, torch.Tensor)
        inputs = _places(tensors, given)
        outputs = _places(grads, (results,) if one else results)
        return None if inputs is None or outputs is None else Backward(run, inputs, outputs, one)  # type: ignore[arg-type]


def _places(wanted: Sequence[Any], given: Sequence[Any]) -> tuple[int | None, ...] | None:
    """Where each of the wanted is among the given; None for what is None; no answer where one is not there."""
    places: list[int | None] = []
    for x in wanted:
        found = next((i for i, y in enumerate(given) if y is x), -1) if x is not None else None
        if found == -1:
            return None
        places.append(found)
    return tuple(places)


class Op:
    """Calls ``headwise::<operator>``."""

    def __init__(
        self,
        operator: str,
        args: type,
        *,
        fake: Run,
        describe: Callable[[Any], Described],
        check: Run | None = None,
        public: str | None = None,
        launcher: str | None = None,
        returns: str = "Tensor",
        validate: Callable[[Any], None] | None = None,
        backward: Callable[..., Sequence[Tensor | None]] | None = None,
        backward_launchers: tuple[str, ...] = (),
        saves: tuple[str, ...] = (),
        saves_results: tuple[int, ...] = (),
        statistics: tuple[int, ...] = (),
        keep: str | None = None,
        shows: int = 1,
        autocast: _autocast.Rule | None = None,
    ) -> None:
        """
        operator            name of the PyTorch operator
        args                type of its arguments object
        fake                ``fake(args)``: results without data, for tracing and for meta tensors
        describe            ``describe(args)``: what backends judge the call by
        check               ``check(op, …)``: the arguments object from what the public function was given, or an error
        public              name of the public function
        launcher            name of the backends' launcher, where it is not that of the operator
        returns             the results in the schema
        validate            ``validate(args)``: looks at values on the device (HEADWISE_VALIDATE=1)
        backward            ``backward(saved, *grads)``: a gradient or None for each tensor of the arguments
        backward_launchers  the launchers that it needs
        saves               tensors of the arguments that backward reads
        saves_results       results that it reads
        statistics          results that have no gradient of their own
        keep                the field that says whether a result that a backward or return_lse needs is wanted
        shows               how many results the caller gets where it did not ask for the others
        autocast            what becomes of the tensors under autocast; None: nothing
        """
        arguments.learn(args)
        self.operator, self.args_type, self.public = operator, args, public or operator
        self.launcher = launcher or operator
        self.fake, self.describe, self.check, self.validate = fake, describe, check, validate
        self.backward, self.backward_launchers = backward, backward_launchers
        self.saves, self.saves_results, self.statistics, self.keep = saves, saves_results, statistics, keep
        self.autocast = autocast
        self.shows, self.results, self.one_result = shows, returns.count("Tensor"), returns == "Tensor"
        self._entries = Cache()
        self._operator = _register(self, returns)
        self._node: Any = type(f"Headwise_{operator}", (_Node,), {})
        # Function.apply in Python first looks for functorch's tensors; the fast path has none.
        self._apply = super(torch.autograd.Function, self._node).apply  # type: ignore[misc]
        if check is not None:
            OPS[self.public] = self

    def __call__(
        self, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None = None, keep: bool = False
    ) -> Any:
        """A public call; ``check`` is given the tensors, then the options.

        keep: more results than the first are wanted. Without it, others may be None or not there.
        """
        known = key = None
        if not _is_compiling():
            types = [*map(type, options)]  # because True == 1 == 1.0
            if tuple in types:
                types += [type(side) for option in options if type(option) is tuple for side in option]
            known, key = self._entries.find((*types, keep, backend, options), tensors)
        if known is None and self.autocast is not None and _is_autocast():
            known, tensors = self._under_autocast(key, tensors, options, backend, keep)
        if known is None:
            args, chosen, gradient = self._checked(tensors, options, backend)
            if key is None:
                return self.through_operator(args, chosen)
            gradient = gradient and not _excluded(AUTOGRAD)
            if self.keep is not None and not (keep or gradient):
                args = args._replace(**{self.keep: False})
            shown = 0 if keep or not (self.keep or self.statistics) else self.shows
            known = self._entries[key] = self.entry(args, chosen, gradient, shown=shown)
        return self._apply(known, *tensors) if type(known) is Entry else known(*tensors)

    def _under_autocast(
        self, key: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None, keep: bool
    ) -> tuple[Run | None, tuple[Any, ...]]:
        """A cache entry that casts and calls again with autocast off. A call without a key gets cast tensors instead."""
        rule, device = self.autocast, _autocast.device_of(tensors)
        assert rule is not None
        if device is None:
            return None, tensors
        if key is None:
            return None, _autocast.cast(rule, tensors, device)

        def cast_and_call(*tensors: Any) -> Any:
            cast = _autocast.cast(rule, tensors, device)
            with _autocast.disabled():
                return self(cast, options, backend, keep)

        self._entries[key] = cast_and_call
        return cast_and_call, tensors

    def _checked(
        self, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None
    ) -> tuple[Any, str, bool]:
        """The arguments object, the backend that takes the call, and whether a gradient may be asked for."""
        assert self.check is not None
        args = self.check(self.public, *tensors, *options)
        of, sizes, features, dtype = self.describe(args)
        launchers: tuple[str, ...] = (self.launcher,)
        gradient = _is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if gradient and self.backward is not None:
            launchers, features = launchers + self.backward_launchers, (*features, "gradient")
        device = getattr(of, "headwise_device", None) or of.device.type
        call = registry.Call(self.public, launchers, device, dtype or of.dtype, sizes, features)
        if registry.forced.describing:
            raise registry.Described(call, args, backend)
        return args, registry.choose(call, backend), gradient

    def entry(self, args: Any, backend: str, gradient: bool = False, run: Run | None = None, shown: int = 0) -> Any:
        """What the cache keeps: ``run(*tensors)`` for calls that differ from this one in data and addresses alone.

        gradient: as part of an `Entry`. run: in place of the backend's record.
        """
        if run is None:
            if backend == registry.META:
                if registry.forced.planned is not None:
                    registry.forced.planned.launchers.append((self.launcher, args))
                run = _with_tensors(self.fake, args)
            else:
                run = registry.recorder(backend, self.launcher)(args)
            if settings.validate and self.validate is not None:
                run = _validated(_with_tensors(self.validate, args), run)
            if _is_autocast():
                run = _without_autocast(run)
        if not gradient:
            return run
        tensors, names, options = arguments.split(args)
        saved = [i for i, name in enumerate(names) if name in self.saves and tensors[i] is not None]
        saved += [len(names) + i for i in self.saves_results]
        return Entry(self, options, backend, run, names, saved, shown, Cache())

    def run(self, args: Any, backend: str) -> Any:
        """Run the op on arguments that are known to be good; PyTorch's operator has been seen."""
        tensors = arguments.tensors_of(args)
        run: Any = self.find(args, tensors, backend, seen=True) or self.entry(args, backend)
        return run(*tensors)

    def find(self, args: Any, tensors: Sequence[Any], backend: str, seen: bool = False) -> Run | None:
        """What runs the op on arguments that are known to be good; None where the call has no cache key."""
        options = [tuple(v) if type(v) is list else v for v in arguments.split(args)[2]]  # lists make no key
        run, key = self._entries.find((backend, *options), tensors, seen)
        if run is None and key is not None:
            run = self._entries[key] = self.entry(args, backend)
        return run

    def through_operator(self, args: Any, backend: str) -> Any:
        """The plain path: PyTorch's dispatcher sees the operator."""
        if _transforms():
            tensors, _, options = arguments.split(args)
            return _Transformed.apply(self, options, backend, *tensors)
        results = self._operator(*arguments.flat(self.args_type, args), backend)
        return tuple(results) if type(results) is list else results  # autograd looks into no list


def _with_tensors(function: Callable[[Any], Any], args: Any) -> Run:
    """``function(args)`` with other tensors in ``args``."""
    options = arguments.split(args)[2]
    return lambda *tensors: function(arguments.with_tensors(options, tensors))


def _validated(validate: Run, run: Run) -> Run:
    def validate_and_run(*tensors: Any) -> Any:
        validate(*tensors)
        return run(*tensors)

    return validate_and_run


def _without_autocast(run: Run) -> Run:
    """The casts are done: inside, autocast would turn float32 sums into bfloat16 ones."""

    def guarded(*tensors: Any) -> Any:
        with _autocast.disabled():
            return run(*tensors)

    return guarded


# ------------------------------------------------------------------------------------------------------------- autograd


class _Node(torch.autograd.Function):
    """Every op's place in the graph. Its first argument is the entry, the others are the tensors."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Any) -> Any:
        results = entry.run(*tensors)
        everything = (*tensors, *results) if type(results) is tuple else (*tensors, results)
        ctx.save_for_backward(*[everything[i] for i in entry.saved])
        ctx.set_materialize_grads(False)  # a gradient that nobody asked for arrives as None
        ctx.entry = entry
        if entry.shown:
            return results[: entry.shown]
        if entry.op.statistics:
            ctx.mark_non_differentiable(*[results[i] for i in entry.op.statistics if results[i] is not None])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given, entry = (*ctx.saved_tensors, *grads), ctx.entry
        known, key = (None, None) if _is_compiling() else entry.backwards.find(ctx.needs_input_grad, given)
        if known is None:
            return None, *_gradients(ctx, given, grads, key)
        run, inputs, places, one = known
        results = run(*[None if i is None else given[i] for i in inputs])
        return None, *[None if i is None else results if one else results[i] for i in places]


class _Transformed(torch.autograd.Function):
    """The same for `torch.func`: given the op, its arguments without tensors, the backend, and the tensors."""

    @staticmethod
    def forward(op: Op, options: Any, backend: str, *tensors: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.through_operator(arguments.with_tensors(options, tensors), backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        op, options, backend, *tensors = inputs
        args = arguments.with_tensors(options, tensors)
        _Node.forward(ctx, op.entry(args, backend, True, lambda *_: output), *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *_gradients(ctx, (*ctx.saved_tensors, *grads), grads, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_MODE.format(ctx.entry.op.operator))

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Op, options: Any, backend: str, *tensors: Any) -> Any:
        """One call for each entry of the mapped dim: kernels take batches, and every op has its own place for them."""
        dims = in_dims[3:]
        results = []
        for i in range(info.batch_size):
            picked = [x if d is None else x.select(d, i) for x, d in zip(tensors, dims, strict=True)]
            results.append(op.through_operator(arguments.with_tensors(options, picked), backend))
        if op.one_result:
            return torch.stack(results), 0
        return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0,) * len(results[0])


def _gradients(ctx: Any, given: tuple[Any, ...], grads: tuple[Any, ...], key: Any) -> Sequence[Any]:
    """The gradients of all tensors, by the op's own backward. given: what was saved, then the gradients that arrived."""
    entry: Entry = ctx.entry
    if entry.op.backward is None:
        raise NotImplementedError(
            f"headwise: second-order gradients are not supported (differentiating through {entry.op.operator}); call "
            "backward without create_graph=True, or differentiate the functions of headwise.reference (small sizes: they "
            "are plain PyTorch)"
        )
    count = len(entry.names)
    if all(g is None for g in grads):
        return (None,) * count
    if entry.shown:
        grads += (None,) * (entry.op.results - entry.shown)
    everything: list[Any] = [None] * (count + len(grads))
    for place, x in zip(entry.saved, given, strict=False):
        everything[place] = x
    args = arguments.with_tensors(entry.options, everything[:count])
    saved = Saved(args, tuple(everything[count:]), ctx.needs_input_grad[-count:], entry, [])
    found = entry.op.backward(saved, *grads)
    known = None if key is None else Backward.of(saved.ran, given, found)
    if known is not None:
        entry.backwards[key] = known
    return found


# --------------------------------------------------------------------------------------------------- PyTorch's operator


def _register(op: Op, returns: str) -> Any:
    """Define ``headwise::<operator>``: schema, implementation, fake kernel, autograd."""

    def nested(values: Sequence[Any]) -> Any:
        return arguments.nested(op.args_type, iter(values))

    def tensors_only(results: Any) -> Any:
        """An operator returns tensors only: in place of a result that was not asked for, one of no elements."""
        if op.one_result:
            return results
        first: Any = next((x for x in results if x is not None), None)
        return tuple([first.new_empty(0) if x is None else x for x in results])

    def implementation(*values: Any) -> Any:
        return tensors_only(op.run(nested(values[:-1]), values[-1]))

    def fake(*values: Any) -> Any:
        return tensors_only(op.fake(nested(values[:-1])))

    def below_autograd(*values: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            results = op._operator(*values)
        return tuple(results) if type(results) is list else results

    def with_autograd(*values: Any) -> Any:
        args, backend = nested(values[:-1]), values[-1]
        tensors = arguments.tensors_of(args)
        if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
            raise NotImplementedError(_NO_FORWARD_MODE.format(op.operator))
        if not _is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
            return below_autograd(*values)

        def run(*tensors: Any) -> Any:
            return below_autograd(*arguments.flat(op.args_type, arguments.with_tensors(args, tensors)), backend)

        return op._node.apply(op.entry(args, backend, True, run), *tensors)

    _library.define(f"{op.operator}({arguments.schema(op.args_type)}, str backend) -> {returns}")
    _library.impl(op.operator, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headwise::{op.operator}", fake, lib=_library)
    _library.impl(op.operator, with_autograd, "Autograd")
    made: Any = getattr(torch.ops.headwise, op.operator).default
    made.headwise_run = implementation  # for tensors on a GPU that PyTorch does not know: their __torch_dispatch__
    return made


def _has_tangent(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
