"""Headwise on arrays of other libraries, by DLPack: NumPy and whatever else speaks it.

>>> from headwise.integrations import arrays
>>> out = arrays.attention(q, k, v, causal=True)          # NumPy arrays in, NumPy arrays out
>>> out = arrays.rms_norm(x, w, backend="webgpu")         # the same, computed on the GPU that WebGPU finds

Every public function of `headwise` that takes tensors is here under its name. An array is read in place where its library
allows it (no copy), and results are handed over in place. They go to the library that the first array came from: to its
``__array_namespace__().from_dlpack`` (the Python array API standard), and so stay on the device they were computed on.
Tensors of PyTorch may stand beside arrays. There are no gradients: call the ``*_backward`` functions.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.dlpack import from_dlpack

import headwise

# Public names that take no tensors.
_NO_TENSORS = ("Unsupported", "explain", "use_backend")

__all__ = [name for name in headwise.__all__ if name not in _NO_TENSORS]


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _on_arrays(getattr(headwise, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []

        def read(x: Any) -> Any:
            if _is_numpys(x, "generic"):  # a number: scale=np.float32(0.3)
                return x.item()
            if isinstance(x, Tensor) or not hasattr(x, "__dlpack__"):
                return x
            found.append(x)
            return tensor_of(x)

        args, kwargs = tree_map(read, args), tree_map(read, kwargs)
        with torch.no_grad():
            results = function(*args, **kwargs)
        if not found:
            return results
        return tree_map(lambda y: array_like(y, found[0]) if isinstance(y, Tensor) else y, results)

    return run


def tensor_of(x: Any) -> Tensor:
    """The array as a tensor that shares its memory.

    Copied is what may only be read (tensors may be written to), what lies backwards in memory (tensors never do), and what
    is not contiguous in its last dim (the ops ask for that).
    """
    if _is_numpys(x, "ma.MaskedArray"):
        raise TypeError(
            f"headwise: {_kind(x)} is not supported, as its mask would be lost: give x.data or x.filled(…), and mask= to "
            "attention"
        )
    flags, strides = getattr(x, "flags", None), getattr(x, "strides", None)
    backwards = isinstance(strides, tuple) and any(stride < 0 for stride in strides)
    if backwards or getattr(flags, "writeable", True) is False:
        x = x.copy()
    try:
        tensor = from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"headwise: an array of {_kind(x)} cannot be read through DLPack: {error}") from error
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _is_numpys(x: Any, name: str) -> bool:
    """isinstance, without the import: of a class of NumPy where somebody has imported that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, operator.attrgetter(name)(numpy))


def array_like(y: Tensor, like: Any) -> Any:
    """The tensor in the library of ``like``, in place."""
    if hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
    else:
        raise TypeError(
            f"headwise: results cannot become an array of {_kind(like)}: it has no __array_namespace__; give "
            "torch.from_dlpack(x), and get tensors"
        )
    try:
        return namespace.from_dlpack(y.detach())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"headwise: a result of dtype {y.dtype} cannot become an array of {_kind(like)}: {error}"
        ) from error


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"
