"""Attention cases: builders for any device, the SDPA peer, the work counted, and the check of single heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, Direction
from headwise.benchmark.correctness import WholeCheck, first_output, oracle
from headwise.benchmark.requirements import Requirement
from headwise.testing import Arguments, Maker, Outputs

SDPA = "SDPA"
PLAIN = "our plain"
QKV = ("q", "k", "v")


class Shape(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int


class Visibility(NamedTuple):
    """Which keys a query sees: the flags that decide the work."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    def bounds(self, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """First key and one past the last key of every query; both grow with the query."""
        position = torch.arange(queries) + (keys - queries)
        left, right = self.window or (None, None)
        low = torch.zeros_like(position) if left in (None, -1) else position - (left or 0)
        high = torch.full_like(position, keys) if right in (None, -1) else position + (right or 0) + 1
        if self.causal:
            high = torch.minimum(high, position + 1)
        low = low.clamp(0, keys)
        return low, torch.maximum(high.clamp(0, keys), low)

    def pairs(self, queries: int, keys: int) -> int:
        low, high = self.bounds(queries, keys)
        return int((high - low).sum())

    def mask(self, queries: int, keys: int) -> Tensor:
        """The dense boolean mask that means the same."""
        low, high = self.bounds(queries, keys)
        key = torch.arange(keys)
        return (key >= low[:, None]) & (key < high[:, None])

    def flags(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window}


BOTH: tuple[Direction, Direction] = ("forward", "backward")
PATTERNS = {"full": Visibility(), "causal": Visibility(causal=True)}


@dataclass(frozen=True)
class HeadCheck:
    """Checks all rows of as many key heads, with their query heads, as take a few seconds.

    Heads are independent, so a head's output and gradients are exact without the others. The oracle computes a block of
    query rows at a time, with the keys they see and their mask, so that no S × S tensor is ever held. The last heads
    are checked, since a wrong offset often leaves head 0 right.
    """

    visibility: Visibility
    differentiable: tuple[str, ...]
    query_heads: slice
    key_heads: slice
    # The axis of the heads in each argument.
    head_axis: dict[str, int] = field(default_factory=lambda: {"q": 1, "k": 1, "v": 1, "sink": 0})

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        part = {name: self._of_heads(name, arguments[name]) for name in self.head_axis if name in arguments}
        q, k = part["q"], part["k"]
        results = {"out": torch.zeros_like(q[..., :1]).expand(*q.shape[:3], part["v"].shape[-1]).clone()}
        if grad_out is not None:
            grad_out = grad_out[:, self.query_heads].to(q.dtype)
            results.update({f"grad of {name}": torch.zeros_like(part[name]) for name in self.differentiable})
        lengths = arguments.get("kv_lengths")
        for b in range(q.shape[0]):
            keys = k.shape[2] if lengths is None else int(lengths[b])
            for rows, seen, mask in self._blocks(q.shape[2], keys, q.shape[1], q.device):
                block = {"q": q[b : b + 1, :, rows], "k": k[b : b + 1, :, seen], "v": part["v"][b : b + 1, :, seen]}
                block.update({name: part[name] for name in ("sink",) if name in part})
                if grad_out is not None:
                    block = {name: x.detach().requires_grad_(name in self.differentiable) for name, x in block.items()}
                extra: Arguments = {name: arguments[name] for name in ("scale", "softcap") if name in arguments}
                out = first_output(oracle("attention")({**block, **extra, "mask": mask}))
                results["out"][b, :, rows] = out[0].detach()
                if grad_out is None:
                    continue
                wanted = [block[name] for name in self.differentiable]
                grads = torch.autograd.grad(out, wanted, grad_out[b : b + 1, :, rows])
                for name, grad in zip(self.differentiable, grads, strict=True):
                    total = results[f"grad of {name}"]
                    where = {"q": (b, slice(None), rows), "k": (b, slice(None), seen), "v": (b, slice(None), seen)}
                    if name in where:
                        total[where[name]] += grad[0]
                    else:
                        total += grad
        return results

    def pick(self, results: Outputs) -> Outputs:
        return {
            name: self._of_heads("q" if name == "out" else name.removeprefix("grad of "), x)
            for name, x in results.items()
        }

    def _of_heads(self, name: str, x: Tensor) -> Tensor:
        heads = self.key_heads if name in ("k", "v") else self.query_heads
        return x[(slice(None),) * self.head_axis[name] + (heads,)]

    def _blocks(
        self, queries: int, keys: int, heads: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        low, high = self.visibility.bounds(queries, keys)
        width = max(1, int((high - low).max()))
        held = _PAIRS_HELD if device.type == "cpu" else _PAIRS_HELD_ON_GPU
        # A block taller than the window is wide would be mostly masked.
        height = max(16, min(width, held // (width * heads)))
        on_device = low.to(device), high.to(device)
        for start in range(0, queries, height):
            rows = slice(start, min(start + height, queries))
            seen = slice(int(low[rows][0]), max(int(low[rows][0]), int(high[rows][-1])))
            if seen.start == seen.stop:
                continue  # rows that see no key: their results are zero already
            key = torch.arange(seen.start, seen.stop, device=device)
            first, past = (x[rows, None] for x in on_device)
            yield rows, seen, (key >= first) & (key < past)


_PAIRS_HELD = 1 << 22  # query-key pairs the oracle holds at once: 32 MiB per float64 array
_PAIRS_HELD_ON_GPU = 1 << 27
_PAIRS_CHECKED = 1 << 26  # query-key pairs it computes in all: a few seconds in float64


def attention_case(
    name: str,
    group: str,
    shape: Shape,
    direction: Direction,
    visibility: Visibility,
    *,
    features: Callable[[Maker], Arguments] = lambda maker: {},
    differentiable: tuple[str, ...] = QKV,
    peers: tuple[Contender, ...] = (),
    requirements: tuple[Requirement, ...] = (),
    dtype: torch.dtype = torch.float32,
    heads_inside: bool = False,
    value_dim: int | None = None,
) -> BenchCase:
    """`headwise.attention` at a shape; ``features(maker)`` adds arguments (softcap, sink, kv_lengths).

    heads_inside: q, k and v are views of ``(B, S, H, D)``, as the projections of a model give them.
    value_dim: the head dim of v, where it is another than that of q and k.

    Counted is the work of the shape and its visibility, not a feature's own arithmetic.
    """
    batch, heads, key_heads, length, head_dim = shape
    pairs = visibility.pairs(length, length)

    def normal(maker: Maker, of: int, dim: int = head_dim) -> Tensor:
        if heads_inside:
            return maker.normal(batch, length, of, dim).transpose(1, 2)
        return maker.normal(batch, of, length, dim)

    def make(maker: Maker) -> Arguments:
        q = normal(maker, heads)
        k, v = normal(maker, key_heads), normal(maker, key_heads, value_dim or head_dim)
        return {"q": q, "k": k, "v": v, **visibility.flags(), **features(maker)}

    group_size = heads // key_heads
    checked = max(1, min(key_heads, _PAIRS_CHECKED // max(1, batch * group_size * pairs)))
    return BenchCase(
        name=name,
        group=group,
        direction=direction,
        make=make,
        ours=ours,
        check=HeadCheck(
            visibility,
            differentiable,
            query_heads=slice(heads - checked * group_size, heads),
            key_heads=slice(key_heads - checked, key_heads),
        ),
        differentiable=differentiable,
        peers=peers,
        flops=attention_flops(batch * heads * pairs, head_dim, direction, value_dim),
        bytes=attention_bytes(shape, direction, dtype, value_dim),
        requirements=requirements,
        dtype=dtype,
    )


def packed_case(
    name: str,
    group: str,
    lengths: list[int],
    heads: int,
    head_dim: int,
    direction: Direction,
    causal: bool,
    *,
    peers: tuple[Contender, ...] = (),
    requirements: tuple[Requirement, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> BenchCase:
    """`headwise.attention_varlen` over documents of these lengths. The oracle computes one document at a time."""
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)

    def make(maker: Maker) -> Arguments:
        q, k, v = (maker.normal(tokens, heads, head_dim) for _ in range(3))
        cu_seqlens = starts.to(maker.device, torch.int32)
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": max(lengths),
            "max_seqlen_k": max(lengths),
            "causal": causal,
        }

    pairs = sum(Visibility(causal).pairs(n, n) for n in lengths)
    return BenchCase(
        name=name,
        group=group,
        direction=direction,
        make=make,
        ours=lambda arguments: lambda: hw.attention_varlen(**arguments),
        check=WholeCheck(oracle("attention_varlen"), QKV),
        differentiable=QKV,
        peers=peers,
        flops=attention_flops(heads * pairs, head_dim, direction),
        bytes=attention_bytes(Shape(1, heads, heads, tokens, head_dim), direction, dtype),
        requirements=requirements,
        dtype=dtype,
    )


def ours(arguments: Arguments) -> Callable[[], Tensor]:
    return lambda: hw.attention(**arguments)


def sdpa(arguments: Arguments) -> Callable[[], Tensor]:
    """PyTorch's attention as a user would call it: `is_causal` where that is enough, else a dense boolean mask."""
    q, k, v = (arguments[name] for name in QKV)
    visibility = Visibility(arguments["causal"], arguments["window"])
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if visibility.window is not None:
        options["attn_mask"] = visibility.mask(q.shape[2], k.shape[2]).to(q.device)
    else:
        options["is_causal"] = visibility.causal
    return lambda: F.scaled_dot_product_attention(q, k, v, **options)


def sdpa_packed(arguments: Arguments) -> Callable[[], Tensor]:
    """PyTorch's attention over the packed tokens with a block-diagonal mask."""
    q, k, v = (arguments[name].transpose(0, 1)[None] for name in QKV)  # (1, H, T, D)
    tokens = q.shape[2]
    token = torch.arange(tokens, device=q.device)
    document = torch.searchsorted(arguments["cu_seqlens_q"].to(torch.int64), token, right=True)
    mask = document[:, None] == document[None, :]
    if arguments["causal"]:
        mask &= token[:, None] >= token[None, :]
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def plain(arguments: Arguments) -> Callable[[], Tensor]:
    """Our own attention at the same shape without the features, to show what they cost."""
    kept = {name: arguments[name] for name in (*QKV, "causal", "window")}
    return lambda: hw.attention(**kept)


def attention_flops(pairs: int, head_dim: int, direction: Direction, value_dim: int | None = None) -> float:
    """Two products of 2·D operations per visible pair forward, five backward (three over D, two over Dv)."""
    value_dim = value_dim or head_dim
    forward, backward = 2.0 * pairs * (head_dim + value_dim), 2.0 * pairs * (3 * head_dim + 2 * value_dim)
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]


def attention_bytes(shape: Shape, direction: Direction, dtype: torch.dtype, value_dim: int | None = None) -> float:
    """q, k, v and out once forward; backward reads those and the output's gradient and writes three gradients."""
    dims = shape.head_dim + (value_dim or shape.head_dim)
    rows = shape.batch * (shape.heads + shape.key_heads) * shape.length
    forward = float(dtype.itemsize * rows * dims)
    backward = 2 * forward
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]
