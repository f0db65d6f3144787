"""Convolutions, unfolding and average pooling: patches (``wgsl/patches.wgsl``) and matrix products.

The patches of an image are a matrix (channels × kernel, batch × places). With the weight as a matrix (out channels, channels
× kernel) of each group: the convolution is weight · patches, the gradient of the weight grad · patchesᵀ, and that of the
image the sum of the patches weightᵀ · grad. A transposed convolution is the last of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from headwise.backends.webgpu import copies, matmul
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise
from headwise.backends.webgpu.aten.elementwise import Input, compute
from headwise.backends.webgpu.aten.reductions import reduced
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST_BYTES = 1 << 28  # of patches at a time; at least those of one image


class Window(NamedTuple):
    """Where patches lie in an image; one number for each spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]

    def out(self, image: Sequence[int]) -> tuple[int, ...]:
        """How many patches there are in each dim."""
        return tuple(
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(image, *self, strict=True)
        )


def _run(device: Device, window: Window, image: Region, out: Sequence[int], x: Region, y: Region, order: str) -> None:
    sums = y is image
    numbers = zip(image.shape[2:], window.kernel, out, window.stride, window.pad, window.dilation, strict=True)
    kernel = device.kernel(
        "patches", x=DTYPES[x.dtype], y=DTYPES[y.dtype], dims=len(window.kernel), order=order, sums=sums
    )
    parameters = (y.numel, *image.shape[:2], *[n for dim in numbers for n in dim])
    device.run(kernel, -(-y.numel // 1024), parameters, x=x, y=y)


def _patches(device: Device, image: Region, window: Window, out: Sequence[int], order: str) -> Region:
    """The patches as a matrix: order "outside" (C · kernel, N · places), "inside" (N, C · kernel, places)."""
    image = copies.contiguous(device, image)
    rows, places = image.shape[1] * math.prod(window.kernel), math.prod(out)
    batch = image.shape[0]
    shape = (rows, batch * places) if order == "outside" else (batch, rows, places)
    cols = device.empty(shape, image.dtype)
    _run(device, window, image, out, image, cols, order)
    return cols


def _summed(device: Device, cols: Region, image: Region, window: Window, out: Sequence[int], order: str) -> None:
    """Into image, which is contiguous."""
    _run(device, window, image, out, copies.contiguous(device, cols), image, order)


# --------------------------------------------------------------------------------------------------------- convolutions


def _grouped(weight: Region, groups: int) -> Region:
    """(groups, rows of a group, columns)."""
    rows = weight.shape[0] // groups
    return weight.with_shape((groups, rows, math.prod(weight.shape[1:])))


def _by_channel(x: Region, groups: int) -> Region:
    """(N, C, …), contiguous, as (groups, C of a group, N, places)."""
    batch, channels = x.shape[:2]
    return x.with_shape((batch, groups, channels // groups, math.prod(x.shape[2:]))).permuted((1, 2, 0, 3))


def _matrix(device: Device, x: Region, groups: int) -> Region:
    """(N, C, …) as (groups, C of a group, N · places), contiguous."""
    split = _by_channel(copies.contiguous(device, x), groups)
    made = split if split.shape[2] == 1 else copies.contiguous(device, split)
    if split.shape[2] == 1:
        return made.with_shape((*split.shape[:2], split.shape[3]), (split.strides[0], split.strides[1], 1))
    return made.with_shape((*split.shape[:2], split.shape[2] * split.shape[3]))


def _parts(device: Device, images: Region, places: int, kernel: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First image and number of images whose patches are made at a time."""
    of_one = max(1, images.shape[1] * math.prod(kernel) * places * 4)
    most = max(1, min(_MOST_BYTES, device.capabilities.binding_bytes - 512) // of_one)
    for first in range(0, images.shape[0], most):
        yield first, min(most, images.shape[0] - first)


def _out_of(product: Region, groups: int, batch: int, places: int) -> Region:
    """(groups, C of a group, N · places) as (N, groups, C of a group, places)."""
    return product.with_shape((groups, product.shape[1], batch, places)).permuted((2, 0, 1, 3))


def _turned(x: Region) -> Region:
    return x.permuted((0, 2, 1))


def _convolved(
    device: Device,
    image: Region,
    weight: Region,
    bias: Region | None,
    window: Window,
    places: tuple[int, ...],
    groups: int,
) -> Region:
    """weight (O, C / groups, kernel); places: the result's spatial dims."""
    y = device.empty((image.shape[0], weight.shape[0], *places), image.dtype)
    count, matrix = math.prod(places), _grouped(copies.contiguous(device, weight), groups)
    for first, batch in _parts(device, image, count, window.kernel):
        cols = _patches(device, image.narrow(0, first, batch), window, places, "outside")
        by_group = cols.with_shape((groups, cols.shape[0] // groups, cols.shape[1]))
        # float32 where a bias is added: rounded once.
        product = matmul.matmul(device, matrix, by_group, torch.float32 if bias is not None else y.dtype)
        inputs = {"x": Input(_out_of(product, groups, batch, count), "f")}
        if bias is not None:
            inputs["b"] = Input(copies.contiguous(device, bias).with_shape((1, *matrix.shape[:2], 1)), "f")
        target = y.narrow(0, first, batch).with_shape((batch, *matrix.shape[:2], count))
        compute(device, "x + b" if bias is not None else "x", "f", inputs, target, part=True)
    return y


def _spread(
    device: Device,
    grad: Region,
    weight: Region,
    image: tuple[int, ...],
    window: Window,
    groups: int,
    dtype: torch.dtype,
) -> Region:
    """The gradient of the image of `_convolved`; a transposed convolution. image: its shape."""
    y = device.empty(image, dtype)
    places = grad.shape[2:]
    matrix = _turned(_grouped(copies.contiguous(device, weight), groups))
    for first, batch in _parts(device, y, math.prod(places), window.kernel):
        part = _matrix(device, grad.narrow(0, first, batch), groups)
        cols = matmul.matmul(device, matrix, part, torch.float32)
        target = y.narrow(0, first, batch)
        # A part of y may begin between two words.
        made = target if batch == y.shape[0] else device.empty(target.shape, dtype)
        _summed(device, cols, made, window, places, "outside")
        if made is not target:
            copies.copy_into(device, made, target, part=True)
    return y


def _weight_gradient(
    device: Device, image: Region, grad: Region, weight: Region, window: Window, groups: int
) -> Region:
    """That of the weight of `_convolved`, of its shape."""
    rows = weight.shape[0] // groups
    sums = device.empty((groups, rows, weight.numel // weight.shape[0]), torch.float32)
    places = grad.shape[2:]
    for first, batch in _parts(device, image, math.prod(places), window.kernel):
        cols = _patches(device, image.narrow(0, first, batch), window, places, "outside")
        by_group = cols.with_shape((groups, cols.shape[0] // groups, cols.shape[1]))
        part = _matrix(device, grad.narrow(0, first, batch), groups)
        matmul.matmul_into(device, part, _turned(by_group), sums, add=first > 0)
    if weight.dtype == torch.float32:
        return sums.with_shape(weight.shape)
    rounded = device.empty(weight.shape, weight.dtype)
    compute(device, "x", "f", {"x": Input(sums.flat(), "f")}, rounded.flat())
    return rounded


def _convolution_of(device: Device, image: Region, weight: Region, *given: Any) -> Region:
    *biases, window, groups, transposed, extra = given
    bias = biases[0] if biases else None
    if not transposed:
        return _convolved(device, image, weight, bias, window, window.out(image.shape[2:]), groups)
    shape = (image.shape[0], weight.shape[1] * groups, *_transposed_size(image.shape[2:], window, extra))
    y = _spread(device, image, weight, shape, window, groups, image.dtype if bias is None else torch.float32)
    if bias is None:
        return y
    made = device.empty(shape, image.dtype)
    row = copies.contiguous(device, bias).with_shape((1, shape[1], *[1] * len(window.kernel)))
    compute(device, "x + b", "f", {"x": Input(y, "f"), "b": Input(row, "f")}, made)
    return made


def _transposed_size(image: Sequence[int], window: Window, extra: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + more + 1
        for size, kernel, stride, pad, dilation, more in zip(image, *window, extra, strict=True)
    )


def _gradients_of(device: Device, grad: Region, image: Region, weight: Region, *given: Any) -> Any:
    window, groups, transposed, mask = given
    dx = dweight = dbias = None
    if mask[0]:
        if transposed:
            dx = _convolved(device, grad, weight, None, window, image.shape[2:], groups)
        else:
            dx = _spread(device, grad, weight, image.shape, window, groups, image.dtype)
    if mask[1]:
        pair = (grad, image) if transposed else (image, grad)
        dweight = _weight_gradient(device, *pair, weight, window, groups)
    if mask[2]:
        dbias = reduced(device, grad, [0, *range(2, len(grad.shape))], "sum", weight.dtype)
    return dx, dweight, dbias


def _checked(image: Any, weight: Any, bias: Any) -> None:
    for name, x in (("input", image), ("weight", weight), ("bias", bias)):
        if x is None:
            continue
        if not isinstance(x, Array):
            raise RuntimeError(f"convolution: {name} is on {x.device} beside a tensor on webgpu; bring them together")
        if x.dtype not in _FLOATS:
            raise NotImplementedError(f"headwise: convolution of {x.dtype} on WebGPU; floats are, or use x.cpu()")
        if x.dtype != image.dtype:
            raise RuntimeError(f"convolution: {name} is {x.dtype} and input {image.dtype}; they need to be the same")


def _full(numbers: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(numbers) if len(numbers) == dims else tuple(numbers) * dims


def _convolution(
    image: Array, weight: Array, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any,
    groups: int,
) -> Any:  # fmt: skip
    _checked(image, weight, bias)
    dims = weight.dim() - 2
    if image.dim() == dims + 1:  # one image
        return _convolution(
            cast(Array, image.unsqueeze(0)), weight, bias, stride, padding, dilation, transposed, extra, groups
        ).squeeze(0)
    like = [torch.empty(x.shape, device="meta") for x in (image, weight)]
    # PyTorch itself says what is wrong with the shapes, and what the result's is.
    shape = aten.convolution(*like, None, stride, padding, dilation, transposed, extra, groups).shape
    window = Window(tuple(weight.shape[2:]), *(_full(n, dims) for n in (stride, padding, dilation)))
    if math.prod(shape) == 0 or weight.numel() == 0 or image.numel() == 0:
        made = torch.zeros(shape, dtype=image.dtype, device=image.device)
        return made if bias is None else made + bias.view(-1, *[1] * dims)
    biases = [] if bias is None else [bias]
    return replayed(_convolution_of, [image, weight, *biases], window, groups, transposed, _full(extra, dims))


def _convolution_backward(
    grad: Array, image: Array, weight: Array, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, extra: Any, groups: int, mask: Any,
) -> Any:  # fmt: skip
    _checked(image, weight, None)
    dims = weight.dim() - 2
    if image.dim() == dims + 1:
        dx, dweight, dbias = _convolution_backward(
            cast(Array, grad.unsqueeze(0)), cast(Array, image.unsqueeze(0)), weight, bias_sizes, stride, padding,
            dilation, transposed, extra, groups, mask,
        )  # fmt: skip
        return None if dx is None else dx.squeeze(0), dweight, dbias
    window = Window(tuple(weight.shape[2:]), *(_full(n, dims) for n in (stride, padding, dilation)))
    if grad.numel() == 0 or weight.numel() == 0 or image.numel() == 0:
        zeros = [torch.zeros_like(x) if m else None for x, m in zip((image, weight), mask, strict=False)]
        return *zeros, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return replayed(_gradients_of, [grad, image, weight], window, groups, transposed, tuple(mask))


# ------------------------------------------------------------------------------------------------- patches by themselves


def _window(kernel: Any, dilation: Any, padding: Any, stride: Any) -> Window:
    return Window(*(_full(n, 2) for n in (kernel, stride, padding, dilation)))


def _unfolded(device: Device, image: Region, window: Window) -> Region:
    return _patches(device, image, window, window.out(image.shape[2:]), "inside")


def _folded(device: Device, cols: Region, image: tuple[int, ...], window: Window) -> Region:
    y = device.empty(image, cols.dtype)
    _summed(device, cols, y, window, window.out(image[2:]), "inside")
    return y


def _im2col(image: Array, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    elementwise.name_of(image.dtype)
    meta = aten.im2col(torch.empty(image.shape, device="meta"), kernel, dilation, padding, stride)
    if image.dim() == 3:
        return _im2col(cast(Array, image.unsqueeze(0)), kernel, dilation, padding, stride).squeeze(0)
    if meta.numel() == 0 or image.dtype not in _FLOATS:
        raise NotImplementedError(f"headwise: unfold of {image.dtype} {tuple(image.shape)} on WebGPU; use x.cpu()")
    return replayed(_unfolded, [image], _window(kernel, dilation, padding, stride))


def _col2im(cols: Array, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    meta = aten.col2im(torch.empty(cols.shape, device="meta"), size, kernel, dilation, padding, stride)
    if cols.dim() == 2:
        return _col2im(cast(Array, cols.unsqueeze(0)), size, kernel, dilation, padding, stride).squeeze(0)
    if meta.numel() == 0 or cols.dtype not in _FLOATS:
        raise NotImplementedError(f"headwise: fold of {cols.dtype} {tuple(cols.shape)} on WebGPU; use x.cpu()")
    return replayed(_folded, [cols], tuple(meta.shape), _window(kernel, dilation, padding, stride))


OPERATORS |= {
    aten.convolution.default: _convolution,
    aten.convolution_overrideable.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
}
