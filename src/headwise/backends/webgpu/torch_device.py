"""WebGPU as a device of PyTorch: ``torch.device("webgpu")``.

PyTorch keeps one device type free for others (`PrivateUse1`) and lets Python register it. What makes a tensor from nothing
(`torch.empty(…, device="webgpu")`) is registered here; whatever is done with arrays goes through their `__torch_dispatch__`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from headwise.config import settings

NAME = "webgpu"

_AUTOCAST_KEY = "AutocastPrivateUse1"
# The lists of torch/csrc/autocast: products in the lower dtype, what loses digits in float32.
_LOWER = (
    "mm", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "matmul", "linear", "einsum", "scaled_dot_product_attention",
    "conv1d", "conv2d",
)  # fmt: skip
_FLOAT32 = (
    "exp", "log", "log10", "log2", "log1p", "expm1", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "sum",
    "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod", "softmax.int", "log_softmax.int", "layer_norm",
    "nll_loss", "cross_entropy_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "norm.Scalar",
    "norm.ScalarOpt_dim",
)  # fmt: skip


class _Module:
    """``torch.webgpu``: what PyTorch asks of a device's module."""

    __name__ = f"torch.{NAME}"  # of a module, which Transformers asks for

    _initialized = True  # torch.utils.checkpoint asks this: else a recomputed dropout would draw other numbers

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        from headwise.backends.webgpu import unavailable

        return unavailable() is None

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> Any:
        """A block on this device; there is one."""
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        from headwise.backends.webgpu import runtime

        return runtime.process.device is not None and runtime.process.device.capture is not None

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, device: Any = None) -> None:
        from headwise.backends.webgpu import runtime

        runtime.device().synchronize()

    def empty_cache(self) -> None:
        from headwise.backends.webgpu import runtime

        device = runtime.device()
        with device.lock:
            device.pool.trim()

    def manual_seed(self, seed: int) -> None:
        from headwise.backends.webgpu.aten import random

        random.stream.seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        from headwise.backends.webgpu.aten import random

        return random.stream.state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        from headwise.backends.webgpu.aten import random

        random.stream.restore(state)

    @property
    def Scheduling(self) -> Any:
        """Inductor's name, and so are the next three."""
        from headwise.backends.webgpu import no_inductor

        return no_inductor.announced(NAME)

    PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = Scheduling

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _wanted() -> bool:
    """Is the device to be registered?

    A registered device becomes the accelerator of the process, and backward passes on CUDA then fail (seen with PyTorch
    2.11). So nothing is registered where PyTorch has a GPU of its own, unless HEADWISE_WEBGPU_DEVICE asks for it: arrays
    are tensors of no device of PyTorch's there, made by `headwise.webgpu.array`.
    """
    if settings.webgpu_device is not None:
        return settings.webgpu_device
    return not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available())


def _register() -> torch.device:
    if not _wanted():
        return torch.device("meta")
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    taken = torch._C._get_privateuse1_backend_name()
    if taken == NAME and hasattr(torch, NAME):
        return torch.device(NAME, 0)
    if taken != "privateuseone":
        raise ImportError(
            f"headwise: PyTorch has room for one device type from outside, and {taken!r} has it; "
            "WebGPU needs a process of its own"
        )
    _setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


DEVICE = _register()
REGISTERED = DEVICE.type == NAME
# Kept: what is registered goes when these go.
_factories = torch.library.Library("aten", "IMPL")
_casts = torch.library.Library("aten", "IMPL")
_others = torch.library.Library("_", "IMPL")


def checked(device: Any) -> None:
    """An error for a device of this kind that is not there."""
    if device is not None and device.index:
        raise RuntimeError(f"there is one device of this kind, {DEVICE}; {device} is not there")


def backward_in_this_thread() -> None:
    """Let autograd run the backward passes of this thread in it.

    PyTorch would use a thread of its own for this device; here nothing waits for another thread, and what belongs to this
    one (a forced backend, a profiler) holds for the backward pass as well.
    """
    if REGISTERED:
        torch._C._set_multithreading_enabled(False)


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> Any:  # fmt: skip
    from headwise.backends.webgpu.aten import making

    checked(device)
    return making.empty(tuple(size), dtype or torch.get_default_dtype(), memory_format)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Any:  # fmt: skip
    from headwise.backends.webgpu.aten import making

    checked(device)
    return making.empty_strided(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    # Not through PyTorch: `torch.tensor` copies where no `__torch_dispatch__` is seen.
    from headwise.backends.webgpu.aten import making

    return making.copy_in_place(target, source)


def _pin_memory(x: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Not pinned: WebGPU copies from memory of its own. `DataLoader(pin_memory=True)` asks for it."""
    return x.clone()


def _late(name: str) -> Any:
    """A factory of `making`, which is imported when the first tensor is made."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from headwise.backends.webgpu.aten import making

        checked(kwargs.get("device"))
        return making.FACTORIES[name](*args, **kwargs)

    return run


# Not made from `empty` and an operator with out=, which would have to change the size of a tensor.
_WHOLE = (
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "logspace",
    "eye",
    "eye.m",
    "randperm",
    "tril_indices",
    "triu_indices",
)


def _autocast(name: str, lower: bool) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST_KEY))

    def cast(x: Any, dtype: torch.dtype) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(cast(y, dtype) for y in x)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype not in (dtype, torch.float64):
            return x.to(dtype)
        return x

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*cast(args, dtype), **{name: cast(x, dtype) for name, x in kwargs.items()})

    _casts.impl(name, run, _AUTOCAST_KEY)


def _register_operators() -> None:
    _factories.impl("empty.memory_format", _empty, "PrivateUse1")
    _factories.impl("empty_strided", _empty_strided, "PrivateUse1")
    _factories.impl("_copy_from", _copy_from, "PrivateUse1")
    _factories.impl("_pin_memory", _pin_memory, "CPU")
    for name in _WHOLE:
        _factories.impl(name, _late(name), "PrivateUse1")
    _others.fallback(torch.library.fallthrough_kernel, _AUTOCAST_KEY)
    for name in _LOWER:
        _autocast(name, lower=True)
    for name in _FLOAT32:
        _autocast(name, lower=False)


if REGISTERED:
    _register_operators()
