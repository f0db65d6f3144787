"""Embedding: rows of a table by id, and the gradient of the table.

    y[..., :]     = weight[ids[...], :]
    dweight[v, :] = sum of grad[..., :] over the places where ids[...] == v, in a fixed order

An id outside the table gives a row of NaN and has no part in the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headwise.ops import _checks, _device_values
from headwise.ops._op import Described, Op, Saved

_NO_PADDING = -1


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, backend: str | None = None) -> Tensor:
    """Rows of ``weight`` (V, D) picked by ``ids`` (any shape, int32 or int64): ``(*ids.shape, D)``, contiguous.

    padding_idx: the row that gets no gradient; a negative one counts from the end. Its value is read like any other.
    An id outside [0, V) gives a row of NaN. Differentiable in ``weight``: the gradient is summed in a fixed order,
    in float32 at least.

    >>> hw.embedding(torch.tensor([2, 0]), torch.arange(6.0).reshape(3, 2))
    tensor([[4., 5.],
            [0., 1.]])
    """
    y: Tensor = _forward((ids, weight), (padding_idx,), backend)
    return y


def embedding_backward(
    grad: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int | None = None, *, backend: str | None = None
) -> Tensor:
    """Gradient of the table, (num_embeddings, D), given the output's gradient ``grad`` ``(*ids.shape, D)``.

    Rows whose id never occurs, and the row of ``padding_idx``, are zeros.

    >>> hw.embedding_backward(torch.ones(3, 2), torch.tensor([1, 1, 0]), num_embeddings=3)
    tensor([[1., 1.],
            [2., 2.],
            [0., 0.]])
    """
    dweight: Tensor = _backward((grad, ids), (num_embeddings, padding_idx), backend)
    return dweight


class Embedding(NamedTuple):
    ids: Tensor
    weight: Tensor
    padding: int  # the row that gets no gradient; -1: none
    num_embeddings: int  # rows of the table, which backward does not keep


class EmbeddingBackward(NamedTuple):
    grad: Tensor
    ids: Tensor
    num_embeddings: int
    padding: int


def _check(op: str, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Embedding:
    _checks.integer(op, "ids", ids)
    _checks.floating(op, "weight", weight)
    _checks.dims(op, "weight", weight, 2, "(V, D)")
    _checks.same_device(op, "ids", ids, "weight", weight)
    return Embedding(ids, weight, _padding(op, padding_idx, weight.shape[0]), weight.shape[0])


def _check_backward(
    op: str, grad: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int | None
) -> EmbeddingBackward:
    _checks.floating(op, "grad", grad)
    _checks.integer(op, "ids", ids)
    _checks.at_least_dims(op, "grad", grad, 1)
    _checks.shape(op, "grad", grad, (*ids.shape, grad.shape[-1]), "(*ids.shape, D)")
    _checks.same_device(op, "ids", ids, "grad", grad)
    _checks.whole(op, "num_embeddings", num_embeddings, 0)
    return EmbeddingBackward(grad, ids, num_embeddings, _padding(op, padding_idx, num_embeddings))


def _padding(op: str, padding_idx: int | None, rows: int) -> int:
    if padding_idx is None:
        return _NO_PADDING
    _checks.whole(op, "padding_idx", padding_idx, -rows)
    if padding_idx >= rows:
        raise ValueError(f"{op}: padding_idx is {padding_idx}; it needs to be in [{-rows}, {rows})")
    return padding_idx + rows if padding_idx < 0 else padding_idx


def _describe(args: Embedding) -> Described:
    rows, width = args.weight.shape
    return Described(args.weight, {"N": args.ids.numel(), "V": rows, "D": width})


def _describe_backward(args: EmbeddingBackward) -> Described:
    return Described(args.grad, {"N": args.ids.numel(), "V": args.num_embeddings, "D": args.grad.shape[-1]})


def _validate(args: Embedding) -> None:
    _device_values.in_range("embedding", "ids", args.ids, args.weight.shape[0])


def _validate_backward(args: EmbeddingBackward) -> None:
    _device_values.in_range("embedding_backward", "ids", args.ids, args.num_embeddings)


def _fake(args: Embedding) -> Tensor:
    return args.weight.new_empty((*args.ids.shape, args.weight.shape[1]))


def _fake_backward(args: EmbeddingBackward) -> Tensor:
    return args.grad.new_empty((args.num_embeddings, args.grad.shape[-1]))


def _differentiate(saved: Saved, grad: Tensor) -> tuple[None, Tensor]:
    ids, _, padding, rows = saved.args
    return None, saved.run(_backward, EmbeddingBackward(grad, ids, rows, padding))


_forward = Op(
    "embedding_forward", Embedding, public="embedding", check=_check, describe=_describe, validate=_validate,
    fake=_fake, backward=_differentiate, backward_launchers=("embedding_backward",), saves=("ids",),
)  # fmt: skip
_backward = Op(
    "embedding_backward", EmbeddingBackward, check=_check_backward, describe=_describe_backward,
    validate=_validate_backward, fake=_fake_backward,
)  # fmt: skip
