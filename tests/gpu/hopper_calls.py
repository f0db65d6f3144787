"""Small calls, forward and backward, in the Hopper kernels: each kernel, each tile and each of their flags at least once.

No pytest here. `sanitized_calls` runs them under compute-sanitizer, `test_hopper_repeats` many times over; without a GPU,
tests/test_hopper_gpu_calls.py asks `explain` whether the Hopper kernels take them, and which variants they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headwise as hw
from headwise.backends.triton.hopper import coverage
from headwise.backends.triton.hopper.tiles import ForwardTile
from headwise.config import settings

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS = 2, 32, 16, 200, 264  # just enough for the Hopper forward, with tails
LENGTHS = (
    (1, 4),
    (200, 130),
    (0, 9),
    (64, 64),
    (129, 300),
    (63, 0),
    (300, 264),
)  # queries and keys of packed sequences
PADDED = {
    "right": {"q_lengths": (200, 77), "kv_lengths": (264, 100)},
    "left": {"kv_starts": (0, 130)},
    "keys": {"kv_lengths": (264, 131)},
}
CAUSAL, WINDOW = {"causal": True}, {"window": (60, 20)}
CAPPED: dict[str, Any] = {"softcap": 15.0, "sink": True}


class Call(NamedTuple):
    op: str
    arguments: dict[str, Any]
    leaves: tuple[str, ...]  # arguments that get gradients
    tile: ForwardTile | None = None  # of the forward, where a larger call would be in another one


# Forward tiles that calls of this size are not in by themselves: long sequences, and many short ones.
OF_LARGER_CALLS = {
    "64, three warpgroups": (64, coverage._64_THREE),
    "64, four warpgroups": (64, coverage._64_FOUR),
    "128, blocks of 128": (128, coverage._128),
}
CALLS: dict[str, dict[str, Any]] = {
    "64, causal, cap and sink": {"d": 64, **CAUSAL, **CAPPED},
    "64, any order": {
        "d": 64,
        "queries": 600,
        "keys": 2056,
        "heads": 16,
        "key_heads": 2,
        "deterministic": False,
    },
    "80": {"d": 80},
    "80, causal": {"d": 80, **CAUSAL},
    "96, window": {"d": 96, **WINDOW},
    "128": {"d": 128},
    "128, causal, any order": {"d": 128, **CAUSAL, "keys": 520, "deterministic": False},
    "128, window, cap and sink": {"d": 128, **WINDOW, **CAPPED},
    "160": {"d": 160},
    "192, causal, cap": {"d": 192, **CAUSAL, "softcap": 15.0},
    "192/128": {"d": 192, "dv": 128},
    "192/128, causal, cap and sink": {"d": 192, "dv": 128, **CAUSAL, **CAPPED},
    "256, causal": {"d": 256, **CAUSAL},
    "256, cap": {"d": 256, "softcap": 15.0},
    "64, packed, causal": {"d": 64, "packed": True, **CAUSAL},
    "80, packed, window": {"d": 80, "packed": True, **WINDOW},
    "192/128, packed, causal": {"d": 192, "dv": 128, "packed": True, **CAUSAL},
    "256, packed": {"d": 256, "packed": True},
    "128, padded on the right": {"d": 128, "padded": "right", **CAUSAL},
    "64, padded on the left": {"d": 64, "padded": "left"},
    "96, padded keys": {"d": 96, "padded": "keys", **WINDOW},
    "64, mask": {"d": 64, "mask": "queries and keys"},
    "80, mask per head, causal": {"d": 80, "mask": "heads", **CAUSAL},
    "128, mask of keys, window": {"d": 128, "mask": "keys", **WINDOW},
    "128, mask, cap and sink": {"d": 128, "mask": "queries and keys", **CAPPED},
    "160, mask of queries": {"d": 160, "mask": "queries"},
    "256, mask, causal": {"d": 256, "mask": "queries and keys", **CAUSAL},
    "96, mask of entries beside lengths, causal": {"d": 96, "mask": "entries", "padded": "right", **CAUSAL},
    "64, bias": {"d": 64, "bias": "heads"},
    "64, float32 bias of keys, causal": {"d": 64, "bias": "keys", "bias_dtype": torch.float32, **CAUSAL},
    "96, float32 bias": {"d": 96, "bias": "heads", "bias_dtype": torch.float32},
    "80, bias of keys": {"d": 80, "bias": "keys"},
    "128, bias, window": {"d": 128, "bias": "heads", **WINDOW},
    "128, float32 bias, causal": {"d": 128, "bias": "queries and keys", "bias_dtype": torch.float32, **CAUSAL},
    "128, bias and mask": {"d": 128, "bias": "queries and keys", "mask": "heads"},
    **{name: {"d": dim, **CAUSAL, "tile": tile} for name, (dim, tile) in OF_LARGER_CALLS.items()},
}
SHAPES = {  # which of batch, heads, queries and keys a mask or a bias has
    "queries and keys": (0, 0, 1, 1),
    "heads": (0, 1, 1, 1),
    "entries": (1, 0, 1, 1),
    "queries": (1, 0, 1, 0),
    "keys": (1, 0, 0, 1),
}


def make(
    name: str, device: str, *, d: int = 0, dv: int | None = None, queries: int = QUERIES, keys: int = KEYS,
    heads: int = HEADS, key_heads: int = KEY_HEADS, packed: bool = False, padded: str = "", mask: str = "", bias: str = "",
    bias_dtype: torch.dtype = torch.bfloat16, sink: bool = False, tile: ForwardTile | None = None, **flags: Any,
) -> Call:  # fmt: skip
    """A call of `CALLS`; without parameters, those of its name."""
    if not d:
        return make(name, device, **CALLS[name])
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def inside(count: int, length: int, dim: int) -> Tensor:
        return normal(BATCH, length, count, dim).transpose(1, 2)

    x: dict[str, Any] = {}
    if packed:
        x["q"] = normal(sum(q for q, _ in LENGTHS) + 7, heads, d)
        for name_of, dim in (("k", d), ("v", dv or d)):
            x[name_of] = normal(sum(k for _, k in LENGTHS) + 9, key_heads, dim)
        for side, lengths in zip("qk", zip(*LENGTHS, strict=True), strict=True):
            ends = torch.tensor([0, *lengths]).cumsum(0)
            x[f"cu_seqlens_{side}"], x[f"max_seqlen_{side}"] = ends.to(device, torch.int32), max(lengths)
    else:
        x |= {"q": inside(heads, queries, d), "k": inside(key_heads, keys, d), "v": inside(key_heads, keys, dv or d)}
    leaves = ["q", "k", "v"]
    if sink:
        x["sink"] = normal(heads, dtype=torch.float32)
        leaves.append("sink")
    full = BATCH, heads, queries, keys
    if mask:
        shape = [n if has else 1 for n, has in zip(full, SHAPES[mask], strict=True)]
        seen = torch.rand(shape, generator=generator) < 0.6
        if SHAPES[mask][2]:  # blocks and rows that see nothing
            seen[:, :, 64:128, : keys // 2] = False
            seen[:, :, 7] = False
        x["mask"] = seen.to(device)
    if bias:
        x["bias"] = normal(*(n if has else 1 for n, has in zip(full, SHAPES[bias], strict=True)), dtype=bias_dtype)
        leaves.append("bias")
    if padded:
        x |= {of: torch.tensor(values).to(device, torch.int32) for of, values in PADDED[padded].items()}
    for leaf in leaves:
        x[leaf].requires_grad_()
    return Call("attention_varlen" if packed else "attention", x | flags, tuple(leaves), tile)


def run(call: Call) -> tuple[Tensor, ...]:
    """out, lse and all gradients."""
    out, lse = getattr(hw, call.op)(**call.arguments, return_lse=True)
    leaves = [call.arguments[name] for name in call.leaves]
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))


@contextlib.contextmanager
def few_programs(programs: int, tile: ForwardTile | None = None) -> Iterator[None]:
    """Hopper kernels run as so few programs, each with many tiles, so that rings, tickets and turns come round."""
    from headwise.backends.triton.hopper import attention_backward, attention_forward

    forward, backward = attention_forward.forward, attention_backward.backward

    def with_few(run: Callable[..., Any], forced: Any = None) -> Callable[..., Any]:
        def launch(gpu: Any, args: Any, tile: Any = None) -> Any:
            gpu.multiprocessors = programs
            return run(gpu, args, forced or tile)

        return launch

    attention_forward.forward = with_few(forward, tile)
    attention_backward.backward = with_few(backward)
    settings.changed()  # calls are recorded anew
    try:
        yield
    finally:
        attention_forward.forward, attention_backward.backward = forward, backward
        settings.changed()


def calls(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and functions that run a call."""
    for name in CALLS:
        yield name, lambda name=name: _run_with_few(name, device)  # type: ignore[misc]


def _run_with_few(name: str, device: str) -> None:
    call = make(name, device)
    note = hw.explain(call.op, **call.arguments).note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel", note
    with few_programs(7, call.tile):
        results = run(call)
    assert all(bool(x.isfinite().all()) for x in (results[0], *results[2:])), "a result is not finite"
