"""The cache at the top of every op: what was worked out for a call, found again for calls like it.

The key is everything a call depends on except data and addresses. Writing it down takes Python longer than launching a
small kernel. So the last few calls are compared first, by the guards of torch.compile: one call into C++ compares type,
dtype, device, sizes, strides, requires_grad and the state of the dispatcher (autocast, modes, transforms, tracing).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _autocast

LIMIT = 4096  # entries of one cache: a process that meets ever new sizes must not keep them all
_RECENT = 4  # kinds of calls that are compared before the key is written
_MISSES_BEFORE_EVICTION = 16  # more kinds of calls in turn than there is room for would evict each other every time
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

# Looked up once: every eager call asks all of them.
_Tensor, _Parameter, _float32 = torch.Tensor, torch.nn.Parameter, torch.float32
_is_grad_enabled, _is_deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_is_autocast = torch._C._is_any_autocast_enabled
_profiler, _excluded = torch._C._autograd._profiler_enabled, torch._C._dispatch_tls_is_dispatch_key_excluded
# The getter behind torch.backends.cuda.matmul.fp32_precision: the older switches are seen through it too.
_float32_products = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
_forced = registry.forced


class Cache(dict[tuple[Any, ...], Any]):
    """Values by key. Threads share it without a lock: a value is written in one step and depends on its key alone."""

    _recent: tuple[tuple[Any, ...], ...] = ()  # guards of the last few kinds of calls, and their values
    _misses = 0  # calls that they did not know

    def clear(self) -> None:
        super().clear()
        self._recent, self._misses = (), 0

    def find(
        self, head: tuple[Any, ...], tensors: Sequence[Any], seen: bool = False
    ) -> tuple[Any, tuple[Any, ...] | None]:
        """The value of a call, None if there is none yet, and the key to keep one under.

        head: what the call was given beside its tensors. seen: the call comes from the operator itself. There is no key
        where PyTorch's operator has to be seen, and where ``head`` holds what cannot be in a key, such as a list.
        """
        if not seen and (_function_modes() or _profiler() or forward_ad._current_level >= 0):
            return None, None
        gradient = _is_grad_enabled()
        facts = ((*map(type, tensors),), head, _forced.name, settings.changes, gradient, _is_deterministic())
        try:
            for known, given, alike, offsets, precision, aliases, value in self._recent:
                if (
                    known == facts
                    # First, because the guards end the process where a tensor has no sizes.
                    and [x.data_ptr() & 15 for x in given(tensors) if not x.is_nested] == offsets
                    and alike(*given(tensors))
                    and (precision is None or precision == _float32_products())
                    and (not aliases or all(tensors[i] is tensors[j] for i, j in aliases))
                ):
                    return value, facts
        except RuntimeError:  # no address: sparse, opaque or wrapped
            return None, None
        if not seen and (_modes() or _transforms() or _tracing() is not None):
            return None, None
        words: list[Any] = [*facts[1:], gradient and not _excluded(AUTOGRAD)]
        words.append(_autocast.device_of(tensors) if _is_autocast() else None)
        offsets, precision = [], None
        guarded = not seen  # arrays compare by their own facts
        try:
            for x in tensors:
                kind = type(x)
                if kind is _Tensor or kind is _Parameter:
                    address = x.data_ptr()
                    if x.is_neg() or x.is_conj() or (address == 0 and x._is_zerotensor()):
                        return None, None
                    words += (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
                    offsets.append(address & 15)
                    if x.dtype is _float32 and precision is None:
                        precision = _float32_products()
                elif hasattr(kind, "headwise_facts"):  # a tensor on a GPU that PyTorch does not know
                    words += kind.headwise_facts(x)
                    guarded = False
                elif x is None:
                    words.append(None)
                else:
                    return None, None
            # Which of the tensors are one and the same: a replayed backward finds its arguments by that.
            ids = [*map(id, tensors)]
            first = [ids.index(i) for i in ids]
            key = (*words, *offsets, precision, *first)
            value = self.get(key)
        except (RuntimeError, TypeError):  # sparse and nested tensors have no address or no strides; a list has no hash
            return None, None
        if value is None:
            if len(self) >= LIMIT:
                self.clear()
        elif guarded and (len(self._recent) < _RECENT or self._misses >= _MISSES_BEFORE_EVICTION):
            # The guards take each tensor once, and check that no two of them are the same object.
            places: list[Any] = [i for i, x in enumerate(tensors) if x is not None and first[i] == i]
            aliases = [(i, j) for i, j in enumerate(first) if i != j and tensors[i] is not None]
            if len(places) == 1:
                places = [slice(places[0], places[0] + 1)]  # so that one tensor comes as a sequence, too
            given = operator.itemgetter(*places)
            there = given(tensors)
            sizes: Any = [list(x.shape) for x in there]
            strides: Any = [list(x.stride()) for x in there]
            alike = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            offsets = [x.data_ptr() & 15 for x in there]
            guard = (facts, given, alike, offsets, precision, aliases, value)
            self._recent, self._misses = (guard, *self._recent[: _RECENT - 1]), 0
        else:
            self._misses += 1
        return value, key
