"""Embedding: rows of a table by id, and the gradient of the table.

    y[..., :]     = weight[ids[...], :]
    dweight[v, :] = sum of grad[..., :] over the places where ids[...] == v, in the order of the places

An id outside the table gives a row of NaN and has no part in the gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _checks, _device_values, _library

_NO_PADDING = -1


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, backend: str | None = None) -> Tensor:
    """Rows of ``weight`` (V, D) picked by ``ids`` (any shape, int32 or int64): ``(*ids.shape, D)``, contiguous.

    padding_idx: the row that gets no gradient; a negative one counts from the end. Its value is read like any other.
    An id outside [0, V) gives a row of NaN. Differentiable in ``weight``: the gradient is summed in a fixed order,
    in float32 at least.
    """
    call = embedding_call(ids, weight, padding_idx)
    padding = _place_of_padding("embedding", padding_idx, weight.shape[0])
    return _forward(ids, weight, padding, registry.choose(call, backend))


def embedding_backward(
    grad: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int | None = None, *, backend: str | None = None
) -> Tensor:
    """Gradient of the table, (num_embeddings, D), given the output's gradient ``grad`` ``(*ids.shape, D)``.

    Rows whose id never occurs, and the row of ``padding_idx``, are zeros.
    """
    call = embedding_backward_call(grad, ids, num_embeddings, padding_idx)
    padding = _place_of_padding("embedding_backward", padding_idx, num_embeddings)
    return _backward(grad, ids, num_embeddings, padding, registry.choose(call, backend))


def embedding_call(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> registry.Call:
    """Check the arguments of `embedding` and describe the call to the backends."""
    op = "embedding"
    _checks.integer(op, "ids", ids)
    _checks.floating(op, "weight", weight)
    _checks.dims(op, "weight", weight, 2, "(V, D)")
    _checks.same_device(op, "ids", ids, "weight", weight)
    _place_of_padding(op, padding_idx, weight.shape[0])
    backward = ("embedding_backward",) if _checks.wants_gradient(weight) else ()
    sizes = {"N": ids.numel(), "V": weight.shape[0], "D": weight.shape[1]}
    return registry.Call(op, ("embedding_forward", *backward), _checks.device_type(weight), weight.dtype, sizes)


def embedding_backward_call(
    grad: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> registry.Call:
    """Check the arguments of `embedding_backward` and describe the call to the backends."""
    op = "embedding_backward"
    _checks.floating(op, "grad", grad)
    _checks.integer(op, "ids", ids)
    _checks.at_least_dims(op, "grad", grad, 1)
    _checks.shape(op, "grad", grad, (*ids.shape, grad.shape[-1]), "(*ids.shape, D)")
    _checks.same_device(op, "ids", ids, "grad", grad)
    _checks.whole(op, "num_embeddings", num_embeddings, 0)
    _place_of_padding(op, padding_idx, num_embeddings)
    sizes = {"N": ids.numel(), "V": num_embeddings, "D": grad.shape[-1]}
    return registry.Call(op, (op,), _checks.device_type(grad), grad.dtype, sizes)


def _place_of_padding(op: str, padding_idx: int | None, rows: int) -> int:
    if padding_idx is None:
        return _NO_PADDING
    _checks.whole(op, "padding_idx", padding_idx, -rows)
    if padding_idx >= rows:
        raise ValueError(f"{op}: padding_idx is {padding_idx}; it needs to be in [{-rows}, {rows})")
    return padding_idx + rows if padding_idx < 0 else padding_idx


def _run_forward(ids: Tensor, weight: Tensor, padding: int, backend: str) -> Tensor:
    if settings.validate:
        _device_values.in_range("embedding", "ids", ids, weight.shape[0])
    return registry.launcher(backend, "embedding_forward")(ids, weight)


def _run_backward(grad: Tensor, ids: Tensor, num_embeddings: int, padding: int, backend: str) -> Tensor:
    if settings.validate:
        _device_values.in_range("embedding_backward", "ids", ids, num_embeddings)
    # padding: the row that gets no gradient, or -1.
    return registry.launcher(backend, "embedding_backward")(grad, ids, num_embeddings, padding)


def _fake_forward(ids: Tensor, weight: Tensor, padding: int, backend: str) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _fake_backward(grad: Tensor, ids: Tensor, num_embeddings: int, padding: int, backend: str) -> Tensor:
    return grad.new_empty((num_embeddings, grad.shape[-1]))


def _save(ctx: Any, args: tuple[Any, ...], y: Tensor) -> None:
    ids, weight, ctx.padding, ctx.backend = args
    ctx.save_for_backward(ids)
    ctx.num_embeddings = weight.shape[0]


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None, None]:
    if grad is None:
        return None, None, None, None
    (ids,) = ctx.saved_tensors
    return None, _backward(grad, ids, ctx.num_embeddings, ctx.padding, ctx.backend), None, None


_forward = _library.define(
    "embedding_forward",
    "(Tensor ids, Tensor weight, SymInt padding, str backend) -> Tensor",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "embedding_backward",
    "(Tensor grad, Tensor ids, SymInt num_embeddings, SymInt padding, str backend) -> Tensor",
    run=_run_backward,
    fake=_fake_backward,
)
