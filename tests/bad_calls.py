"""The table of bad calls: the op, a name, what is changed in a good call, the exception, what its message must say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from bad_norm_calls import bad_norm_calls, good_norm_calls
from torch import Tensor

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
I32, I64 = torch.int32, torch.int64


class Inputs(NamedTuple):
    """Makes small tensors on the device of the backend under test."""

    device: str

    def f(self, *shape: int, dtype: torch.dtype = F32, device: str | None = None) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device or self.device)

    def i(self, *values: int, dtype: torch.dtype = I32, device: str | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device or self.device)

    def b(self, *shape: int, device: str | None = None) -> Tensor:
        return torch.ones(shape, dtype=torch.bool, device=device or self.device)

    def strided(self, *shape: int) -> Tensor:
        """The same shape with every second element of the last dimension."""
        return self.f(*shape[:-1], 2 * shape[-1])[..., ::2]


def good_calls(m: Inputs) -> dict[str, dict[str, Any]]:
    """One good call per op: B 2, Hq 4, Hk 2, Sq 5, Sk 7, D 8, Dv 6."""
    dense = {"q": m.f(2, 4, 5, 8), "k": m.f(2, 2, 7, 8), "v": m.f(2, 2, 7, 6)}
    packed = {"q": m.f(10, 4, 8), "k": m.f(12, 2, 8), "v": m.f(12, 2, 6)}
    bounds = {"cu_seqlens_q": m.i(0, 4, 10), "cu_seqlens_k": m.i(0, 5, 12), "max_seqlen_q": 6, "max_seqlen_k": 7}
    linear = {"hidden": m.f(3, 8), "weight": m.f(5, 8), "targets": m.i(0, 4, -100, dtype=I64)}
    return {
        "attention": dense,
        "attention_varlen": {**packed, **bounds},
        "attention_decode": {
            "q": m.f(2, 4, 8),
            "k_cache": m.f(2, 2, 7, 8),
            "v_cache": m.f(2, 2, 7, 6),
            "lengths": m.i(7, 3),
        },
        "attention_probs": {"q": dense["q"], "k": dense["k"]},
        "attention_probs_backward": {
            "grad": m.f(2, 4, 5, 7), "probs": m.f(2, 4, 5, 7), "q": dense["q"], "k": dense["k"],
        },
        "merge_attention": {"outs": [m.f(2, 4, 5, 6)] * 2, "lses": [m.f(2, 4, 5)] * 2},
        "merge_attention_backward": {
            "grad_out": m.f(2, 4, 5, 6), "grad_lse": m.f(2, 4, 5), "outs": [m.f(2, 4, 5, 6)] * 2,
            "lses": [m.f(2, 4, 5)] * 2, "out": m.f(2, 4, 5, 6), "lse": m.f(2, 4, 5),
        },
        "attention_backward": {"grad_out": m.f(2, 4, 5, 6), **dense, "out": m.f(2, 4, 5, 6), "lse": m.f(2, 4, 5)},
        "attention_varlen_backward": {
            "grad_out": m.f(10, 4, 6),
            **packed,
            "out": m.f(10, 4, 6),
            "lse": m.f(4, 10),
            **bounds,
        },
        "softmax": {"x": m.f(3, 5)},
        "softmax_backward": {"probs": m.f(3, 5), "grad": m.f(3, 5)},
        "rms_norm": {"x": m.f(3, 5), "weight": m.f(5)},
        "rms_norm_backward": {"grad": m.f(3, 5), "x": m.f(3, 5), "weight": m.f(5)},
        "rope": {"x": m.f(2, 4, 5, 8), "cos": m.f(9, 3), "sin": m.f(9, 3), "positions": m.i(0, 8, 2, 1, 3)},
        "rope_backward": {"grad": m.f(5, 4, 8), "cos": m.f(9, 3), "sin": m.f(9, 3), "positions": m.i(0, 8, 2, 1, 3)},
        "glu": {"gate": m.f(3, 6), "up": m.f(3, 6)},
        "glu_backward": {"grad": m.f(3, 6), "gate": m.f(3, 6), "up": m.f(3, 6)},
        "embedding": {"ids": m.i(0, 4, 2), "weight": m.f(5, 6)},
        "embedding_backward": {"grad": m.f(3, 6), "ids": m.i(0, 4, 2), "num_embeddings": 5},
        "cross_entropy": {"logits": m.f(3, 5), "targets": m.i(0, 4, -100, dtype=I64)},
        "cross_entropy_forward_backward": {"logits": m.f(3, 5), "targets": m.i(0, 4, -100, dtype=I64)},
        "linear_cross_entropy": linear,
        "linear_cross_entropy_forward_backward": {**linear, "bias": m.f(5)},
        "transpose": {"x": m.f(3, 5)},
        **good_norm_calls(m),
    }  # fmt: skip


def nested(m: Inputs) -> Tensor:
    """Two sequences, as `torch.nested` holds them."""
    return torch.nested.as_nested_tensor([m.f(2, 7, 8), m.f(2, 5, 8)], layout=torch.jagged)


def paged(m: Inputs, **changes: Any) -> dict[str, Any]:
    """What turns the good decode call into a good paged one."""
    good = {
        "k_cache": m.f(9, 2, 4, 8),
        "v_cache": m.f(9, 2, 4, 6),
        "block_table": torch.zeros(2, 2, dtype=I32, device=m.device),
    }
    return {**good, **changes}


class Bad(NamedTuple):
    op: str
    name: str
    change: Callable[[Inputs], dict[str, Any]]
    error: type[Exception]
    says: tuple[str, ...]  # regular expressions, each of which is in the message


def word(text: str) -> str:
    return rf"(?<!\w){re.escape(text)}(?!\w)"


def shape(*sizes: int) -> str:
    return r"[(\[]" + ", ".join(map(str, sizes)) + r",?[)\]]"


def rows(op: str, *rest: tuple[Any, ...]) -> list[Bad]:
    return [Bad(op, *row) for row in rest]


V, T = ValueError, TypeError
ATTENTION = [
    *rows(
        "attention",
        ("q is a list", lambda m: {"q": [1.0]}, T, ("q", "list", "Tensor", r"torch\.tensor\(q\)")),
        ("v is numpy's", lambda m: {"v": np.ones((2, 2, 7, 6))}, T, ("v", "ndarray", r"torch\.tensor\(v\)")),
        ("q is a number", lambda m: {"q": 3}, T, ("q is an int;", "Tensor")),
        ("k is nested", lambda m: {"k": nested(m)}, T, ("k", "nested", "attention_varlen", "to_padded_tensor")),
        ("k is None", lambda m: {"k": None}, T, ("k", "NoneType", "Tensor")),
        ("causal is a number", lambda m: {"causal": 1}, T, ("causal", "1", "True")),
        ("deterministic is text", lambda m: {"deterministic": "yes"}, T, ("deterministic", "yes", "True")),
        ("backend is a number", lambda m: {"backend": 3}, V, ("backend", "3")),
        # Shapes
        ("q of 3 dims", lambda m: {"q": m.f(4, 5, 8)}, V, ("q", shape(4, 5, 8), "4 dimensions")),
        ("k of 5 dims", lambda m: {"k": m.f(1, 2, 2, 7, 8)}, V, ("k", shape(1, 2, 2, 7, 8), "4")),
        ("v of 2 dims", lambda m: {"v": m.f(7, 6)}, V, ("v", shape(7, 6), "4")),
        ("k of another batch", lambda m: {"k": m.f(3, 2, 7, 8)}, V, ("k", word("3"), word("2"))),
        ("k and v of another batch", lambda m: {"k": m.f(1, 2, 7, 8), "v": m.f(1, 2, 7, 6)}, V, ("k",)),
        ("v of another batch", lambda m: {"v": m.f(3, 2, 7, 6)}, V, ("v", word("3"), word("2"))),
        ("k of another D", lambda m: {"k": m.f(2, 2, 7, 16)}, V, ("k", word("16"), word("8"))),
        ("v of another length", lambda m: {"v": m.f(2, 2, 9, 6)}, V, ("v", word("9"), word("7"))),
        ("v of other heads", lambda m: {"v": m.f(2, 4, 7, 6)}, V, ("v", word("4"), word("2"))),
        ("Hq % Hk", lambda m: {"q": m.f(2, 3, 5, 8)}, V, ("q", word("3"), word("2"), "multiple|divi")),
        ("fewer query heads", lambda m: {"q": m.f(2, 1, 5, 8)}, V, ("q", word("1"), word("2"))),
        ("no key heads", lambda m: {"k": m.f(2, 0, 7, 8), "v": m.f(2, 0, 7, 6)}, V, ("k", word("0"))),
        ("D of 0", lambda m: {"q": m.f(2, 4, 5, 0), "k": m.f(2, 2, 7, 0)}, V, (word("q") + "|D", word("0"))),
        ("Dv of 0", lambda m: {"v": m.f(2, 2, 7, 0)}, V, (word("v") + "|Dv", word("0"))),
        # Strides
        ("q strided", lambda m: {"q": m.strided(2, 4, 5, 8)}, V, ("q", "contiguous")),
        ("k strided", lambda m: {"k": m.strided(2, 2, 7, 8)}, V, ("k", r"\.contiguous\(\)")),
        ("v strided", lambda m: {"v": m.f(2, 2, 6, 7).mT}, V, ("v", r"\.contiguous\(\)")),
        # Dtypes and devices
        ("q of ints", lambda m: {"q": m.f(2, 4, 5, 8, dtype=I32)}, T, ("q", "int32", "float32")),
        (
            "all of ints",
            lambda m: {n: x.int() for n, x in good_calls(m)["attention"].items()},
            T,
            ("q", "int32", "float32"),
        ),
        ("k of another dtype", lambda m: {"k": m.f(2, 2, 7, 8, dtype=F16)}, T, ("k", "float16", "float32")),
        ("v of another dtype", lambda m: {"v": m.f(2, 2, 7, 6, dtype=F64)}, T, ("v", "float64", "float32")),
        (
            "q left in float32 by a norm",
            lambda m: {"k": m.f(2, 2, 7, 8), "v": m.f(2, 2, 7, 6, dtype=BF16)},
            T,
            ("v", "bfloat16", "float32", r"q\.to\(v\.dtype\)", "autocast"),
        ),
        ("complex", lambda m: {"q": m.f(2, 4, 5, 8, dtype=torch.complex64)}, T, ("q", "complex64", "float32")),
        ("k on another device", lambda m: {"k": m.f(2, 2, 7, 8, device="meta")}, V, ("k", "meta", "device")),
        ("v on another device", lambda m: {"v": m.f(2, 2, 7, 6, device="meta")}, V, ("v", "meta", "device")),
        ("q on another device", lambda m: {"q": m.f(2, 4, 5, 8, device="meta")}, V, ("q", "meta", "device")),
        # Window
        ("window left below -1", lambda m: {"window": (-2, 0)}, V, ("window", "-2", "-1")),
        ("window right below -1", lambda m: {"window": (3, -7)}, V, ("window", "-7", "-1")),
        ("window of one number", lambda m: {"window": 128}, (T, V), ("window", "128", "left")),
        ("window of one side", lambda m: {"window": (4,)}, (T, V), ("window", r"4", "left")),
        ("window of three", lambda m: {"window": (1, 2, 3)}, (T, V), ("window", r"1, 2, 3", "left")),
        ("window of floats", lambda m: {"window": (1.5, 0)}, T, ("window", r"1\.5")),
        ("window of text", lambda m: {"window": "ab"}, (T, V), ("window", "ab")),
        # Mask and bias
        ("mask of floats", lambda m: {"mask": m.f(5, 7)}, T, ("mask", "float32", "bool")),
        ("mask of ints", lambda m: {"mask": m.f(5, 7, dtype=torch.uint8)}, T, ("mask", "uint8", "bool")),
        ("mask is a list", lambda m: {"mask": [True]}, T, ("mask", "list", "Tensor")),
        ("mask does not broadcast", lambda m: {"mask": m.b(5, 6)}, V, ("mask", shape(5, 6), shape(2, 4, 5, 7))),
        ("mask of Hk heads", lambda m: {"mask": m.b(2, 2, 5, 7)}, V, ("mask", shape(2, 2, 5, 7), r"4, 5, 7")),
        ("mask of 5 dims", lambda m: {"mask": m.b(1, 2, 4, 5, 7)}, V, ("mask", shape(1, 2, 4, 5, 7))),
        (
            "mask (B, Sk)",
            lambda m: {"mask": m.b(2, 7)},
            V,
            ("mask", shape(2, 7), shape(2, 4, 5, 7), r"mask\[:, None, None, :\]"),
        ),
        ("mask (B, Sq, Sk)", lambda m: {"mask": m.b(2, 5, 7)}, V, ("mask", shape(2, 5, 7), r"mask\[:, None\]")),
        ("bias (B, Sk)", lambda m: {"bias": m.f(2, 7)}, V, ("bias", shape(2, 7), r"bias\[:, None, None, :\]")),
        ("mask elsewhere", lambda m: {"mask": m.b(5, 7, device="meta")}, V, ("mask", "meta", "device")),
        ("bias of bools", lambda m: {"bias": m.b(5, 7)}, T, ("bias", "bool", "float32")),
        ("bias of ints", lambda m: {"bias": m.f(5, 7, dtype=I64)}, T, ("bias", "int64", "float32")),
        ("bias does not broadcast", lambda m: {"bias": m.f(3, 1, 5, 7)}, V, ("bias", shape(3, 1, 5, 7))),
        ("bias elsewhere", lambda m: {"bias": m.f(5, 7, device="meta")}, V, ("bias", "meta", "device")),
        # Lengths
        ("kv_lengths of floats", lambda m: {"kv_lengths": m.f(2)}, T, ("kv_lengths", "float32", "int32")),
        ("kv_lengths of bools", lambda m: {"kv_lengths": m.b(2)}, T, ("kv_lengths", "bool", "int32")),
        ("kv_lengths of 3", lambda m: {"kv_lengths": m.i(1, 2, 3)}, V, ("kv_lengths", shape(3), shape(2))),
        ("kv_lengths (B, 1)", lambda m: {"kv_lengths": m.i(1, 2)[:, None]}, V, ("kv_lengths", shape(2, 1))),
        ("kv_lengths is a list", lambda m: {"kv_lengths": [7, 7]}, T, ("kv_lengths", "list", "Tensor")),
        ("kv_lengths elsewhere", lambda m: {"kv_lengths": m.i(1, 2, device="meta")}, V, ("kv_lengths", "meta")),
        ("q_lengths of floats", lambda m: {"q_lengths": m.f(2)}, T, ("q_lengths", "float32", "int32")),
        ("q_lengths of 3", lambda m: {"q_lengths": m.i(1, 2, 3)}, V, ("q_lengths", r"\(3,\)", r"\(2,\)")),
        ("kv_starts is a list", lambda m: {"kv_starts": [0, 0]}, T, ("kv_starts", r"torch\.tensor\(kv_starts\)")),
        ("kv_starts of 0 dims", lambda m: {"kv_starts": m.i(1)[0]}, V, ("kv_starts", r"\(\)", r"\(2,\)")),
        ("kv_starts elsewhere", lambda m: {"kv_starts": m.i(1, 2, device="meta")}, V, ("kv_starts", "meta")),
        # Numbers
        ("scale NaN", lambda m: {"scale": math.nan}, V, ("scale", "nan", "finite")),
        ("scale infinite", lambda m: {"scale": math.inf}, V, ("scale", "inf", "finite")),
        ("scale 0", lambda m: {"scale": 0.0}, V, ("scale", "0", "positive")),
        ("scale negative", lambda m: {"scale": -0.5}, V, ("scale", r"-0\.5", "positive")),
        ("scale is text", lambda m: {"scale": "1"}, T, ("scale", "1", "number")),
        ("scale is a tensor", lambda m: {"scale": m.f(1)}, T, ("scale", "number")),
        ("softcap 0", lambda m: {"softcap": 0.0}, V, ("softcap", "0", "positive")),
        ("softcap negative", lambda m: {"softcap": -30.0}, V, ("softcap", "-30", "positive")),
        ("softcap NaN", lambda m: {"softcap": math.nan}, V, ("softcap", "nan", "finite")),
        ("softcap infinite", lambda m: {"softcap": math.inf}, V, ("softcap", "inf", "finite")),
        ("softcap is True", lambda m: {"softcap": True}, T, ("softcap", "True", "number")),
        # Sink
        ("sink of Hk", lambda m: {"sink": m.f(2)}, V, ("sink", shape(2), shape(4))),
        ("sink (Hq, 1)", lambda m: {"sink": m.f(4, 1)}, V, ("sink", shape(4, 1))),
        ("sink of ints", lambda m: {"sink": m.f(4, dtype=I32)}, T, ("sink", "int32", "float32")),
        ("sink elsewhere", lambda m: {"sink": m.f(4, device="meta")}, V, ("sink", "meta", "device")),
    ),
]

PACKED = [
    *rows(
        "attention_varlen",
        ("q of 4 dims", lambda m: {"q": m.f(1, 10, 4, 8)}, V, ("q", shape(1, 10, 4, 8), "3")),
        ("k of 2 dims", lambda m: {"k": m.f(12, 8)}, V, ("k", shape(12, 8), "3")),
        ("v of other T", lambda m: {"v": m.f(11, 2, 6)}, V, ("v", word("11"), word("12"))),
        ("k of another D", lambda m: {"k": m.f(12, 2, 9)}, V, ("k", word("9"), word("8"))),
        ("v of other heads", lambda m: {"v": m.f(12, 4, 6)}, V, ("v", word("4"), word("2"))),
        ("Hq % Hk", lambda m: {"q": m.f(10, 5, 8)}, V, ("q", word("5"), word("2"))),
        ("k of another dtype", lambda m: {"k": m.f(12, 2, 8, dtype=F16)}, T, ("k", "float16")),
        ("q strided", lambda m: {"q": m.strided(10, 4, 8)}, V, ("q", "contiguous")),
        ("cu_seqlens_q of int64", lambda m: {"cu_seqlens_q": m.f(3).short()}, T, ("cu_seqlens_q", "int16", "int32")),
        ("cu_seqlens_q of floats", lambda m: {"cu_seqlens_q": m.f(3)}, T, ("cu_seqlens_q", "float32", "int32")),
        ("cu_seqlens_k of floats", lambda m: {"cu_seqlens_k": m.f(3)}, T, ("cu_seqlens_k", "float32", "int32")),
        ("cu_seqlens_k is a list", lambda m: {"cu_seqlens_k": [0, 5, 12]}, T, ("cu_seqlens_k", "list", "Tensor")),
        ("other count of sequences", lambda m: {"cu_seqlens_k": m.i(0, 12)}, V, ("cu_seqlens_k", "2", "3")),
        ("cu_seqlens_q of 2 dims", lambda m: {"cu_seqlens_q": m.i(0, 4, 10)[None]}, V, ("cu_seqlens_q", shape(1, 3))),
        (
            "cu_seqlens of nothing",
            lambda m: {"cu_seqlens_q": m.i(), "cu_seqlens_k": m.i()},
            V,
            ("cu_seqlens_q", word("0"), "plus 1|at least 1"),
        ),
        ("cu_seqlens elsewhere", lambda m: {"cu_seqlens_q": m.i(0, 4, 10, device="meta")}, V, ("cu_seqlens_q", "meta")),
        ("max_seqlen_q negative", lambda m: {"max_seqlen_q": -1}, V, ("max_seqlen_q", "-1", "at least")),
        ("max_seqlen_k is a float", lambda m: {"max_seqlen_k": 7.0}, T, ("max_seqlen_k", r"7\.0", "whole")),
        ("max_seqlen_k is a tensor", lambda m: {"max_seqlen_k": m.i(7)}, T, ("max_seqlen_k", "whole")),
        ("window below -1", lambda m: {"window": (-3, 0)}, V, ("window", "-3", "-1")),
        ("scale infinite", lambda m: {"scale": -math.inf}, V, ("scale", "inf", "finite")),
        ("softcap 0", lambda m: {"softcap": 0}, V, ("softcap", "0", "positive")),
        ("sink of Hk", lambda m: {"sink": m.f(2)}, V, ("sink", shape(2), shape(4))),
    ),
]

DECODE = [
    *rows(
        "attention_decode",
        ("q of 2 dims", lambda m: {"q": m.f(4, 8)}, V, ("q", shape(4, 8), "B, Hq, D")),
        ("q of another D", lambda m: {"q": m.f(2, 4, 9)}, V, ("q|k_cache", word("9"), word("8"))),
        ("q of another batch", lambda m: {"q": m.f(3, 4, 8)}, V, ("q|k_cache", word("3"), word("2"))),
        ("k_cache of 3 dims", lambda m: {"k_cache": m.f(2, 7, 8)}, V, ("k_cache", shape(2, 7, 8), "4")),
        ("v_cache of another C", lambda m: {"v_cache": m.f(2, 2, 9, 6)}, V, ("v_cache", word("9"), word("7"))),
        ("v_cache of other heads", lambda m: {"v_cache": m.f(2, 1, 7, 6)}, V, ("v_cache", word("1"), word("2"))),
        ("Hq % Hk", lambda m: {"q": m.f(2, 3, 8)}, V, ("q", word("3"), word("2"))),
        ("v_cache of another dtype", lambda m: {"v_cache": m.f(2, 2, 7, 6, dtype=F16)}, T, ("v_cache", "float16")),
        ("k_cache elsewhere", lambda m: {"k_cache": m.f(2, 2, 7, 8, device="meta")}, V, ("k_cache", "meta")),
        ("k_cache strided", lambda m: {"k_cache": m.strided(2, 2, 7, 8)}, V, ("k_cache", "contiguous")),
        ("lengths of 3", lambda m: {"lengths": m.i(1, 2, 3)}, V, ("lengths", shape(3), shape(2))),
        ("lengths (B, 1)", lambda m: {"lengths": m.i(1, 2)[:, None]}, V, ("lengths", shape(2, 1))),
        ("lengths of floats", lambda m: {"lengths": m.f(2)}, T, ("lengths", "float32", "int32")),
        ("lengths is a list", lambda m: {"lengths": [7, 3]}, T, ("lengths", "list", "Tensor")),
        ("lengths is None", lambda m: {"lengths": None}, T, ("lengths", "NoneType", "Tensor")),
        ("lengths elsewhere", lambda m: {"lengths": m.i(7, 3, device="meta")}, V, ("lengths", "meta")),
        ("kv_starts of floats", lambda m: {"kv_starts": m.f(2)}, T, ("kv_starts", "float32", "int32")),
        ("kv_starts of 1", lambda m: {"kv_starts": m.i(0)}, V, ("kv_starts", shape(1), shape(2))),
        (
            "block_table of int64",
            lambda m: paged(m, block_table=m.i(0, 1, dtype=I64)[:, None]),
            T,
            ("block_table", "int64", "int32"),
        ),
        ("block_table of floats", lambda m: paged(m, block_table=m.f(2, 2)), T, ("block_table", "float32", "int32")),
        ("block_table of 1 dim", lambda m: paged(m, block_table=m.i(0, 1)), V, ("block_table", shape(2), "2")),
        (
            "block_table of another batch",
            lambda m: paged(m, block_table=m.i(0, 1, 2)[:, None]),
            V,
            ("block_table", shape(3, 1)),
        ),
        ("block_table is a list", lambda m: paged(m, block_table=[[0], [1]]), T, ("block_table", "list", "Tensor")),
        (
            "block_table elsewhere",
            lambda m: paged(m, block_table=m.i(0, 1, device="meta")[:, None]),
            V,
            ("block_table", "meta"),
        ),
        ("v pages of another size", lambda m: paged(m, v_cache=m.f(9, 2, 8, 6)), V, ("v_cache", word("8"), word("4"))),
        ("v of other pages", lambda m: paged(m, v_cache=m.f(8, 2, 4, 6)), V, ("v_cache", word("8"), word("9"))),
        ("num_splits 0", lambda m: {"num_splits": 0}, V, ("num_splits", "0", "at least 1")),
        ("num_splits is a float", lambda m: {"num_splits": 2.0}, T, ("num_splits", r"2\.0", "whole")),
        ("window below -1", lambda m: {"window": (0, -2)}, V, ("window", "-2", "-1")),
        ("scale 0", lambda m: {"scale": 0}, V, ("scale", "0", "positive")),
        ("sink of Hk", lambda m: {"sink": m.f(2)}, V, ("sink", shape(2), shape(4))),
    ),
]

PROBS_AND_MERGE = [
    *rows(
        "attention_probs",
        ("k of another D", lambda m: {"k": m.f(2, 2, 7, 9)}, V, ("k", word("9"), word("8"))),
        ("Hq % Hk", lambda m: {"q": m.f(2, 5, 5, 8)}, V, ("q", word("5"), word("2"))),
        ("row past the end", lambda m: {"rows": [0, 5]}, V, ("rows", word("5"), "-5")),
        ("row before the start", lambda m: {"rows": [-6]}, V, ("rows", "-6", "-5")),
        ("rows of floats", lambda m: {"rows": [0.5]}, T, ("rows", r"0\.5")),
        ("rows of a float tensor", lambda m: {"rows": m.f(2)}, T, ("rows", "float32", "int64")),
        ("rows of 2 dims", lambda m: {"rows": m.i(0, 1)[None]}, V, ("rows", shape(1, 2), "1")),
        ("rows is a number", lambda m: {"rows": 3}, T, ("rows", "3|int")),
        ("mask of floats", lambda m: {"mask": m.f(5, 7)}, T, ("mask", "float32", "bool")),
        ("q_lengths of 1", lambda m: {"q_lengths": m.i(5)}, V, ("q_lengths", shape(1), shape(2))),
        ("softcap negative", lambda m: {"softcap": -1.0}, V, ("softcap", "-1", "positive")),
    ),
    *rows(
        "merge_attention",
        ("no parts", lambda m: {"outs": [], "lses": []}, V, ("outs", "0|empty|no ", "at least")),
        ("fewer lses", lambda m: {"lses": [m.f(2, 4, 5)]}, V, ("lses", word("1"), word("2"))),
        ("outs is a tensor", lambda m: {"outs": m.f(2, 2, 4, 5, 6)}, T, ("outs", "Tensor", "list|sequence")),
        ("lses is a tensor", lambda m: {"lses": m.f(2, 2, 4, 5)}, T, ("lses", "Tensor", "list|sequence")),
        ("a part is None", lambda m: {"outs": [m.f(2, 4, 5, 6), None]}, T, (r"outs\[1\]", "NoneType")),
        (
            "parts of other shapes",
            lambda m: {"outs": [m.f(2, 4, 5, 6), m.f(2, 4, 5, 8)]},
            V,
            (r"outs\[1\]", shape(2, 4, 5, 8)),
        ),
        ("lse of another shape", lambda m: {"lses": [m.f(2, 4, 5), m.f(2, 4, 6)]}, V, (r"lses\[1\]", shape(2, 4, 6))),
        ("lse with a last dim", lambda m: {"lses": [m.f(2, 4, 5, 1)] * 2}, V, (r"lses\[0\]", shape(2, 4, 5, 1))),
        (
            "parts of other dtypes",
            lambda m: {"outs": [m.f(2, 4, 5, 6), m.f(2, 4, 5, 6, dtype=F16)]},
            T,
            (r"outs\[1\]", "float16"),
        ),
        ("lse of float16", lambda m: {"lses": [m.f(2, 4, 5, dtype=F16)] * 2}, T, (r"lses\[0\]", "float16", "float32")),
        ("lse of ints", lambda m: {"lses": [m.f(2, 4, 5, dtype=I32)] * 2}, T, (r"lses\[0\]", "int32", "float32")),
        ("outs of 2 dims", lambda m: {"outs": [m.f(5, 6)] * 2, "lses": [m.f(5)] * 2}, V, (r"outs\[0\]", shape(5, 6))),
        (
            "a part elsewhere",
            lambda m: {"outs": [m.f(2, 4, 5, 6), m.f(2, 4, 5, 6, device="meta")]},
            V,
            (r"outs\[1\]", "meta"),
        ),
        (
            "packed lse of neither form",
            lambda m: {"outs": [m.f(10, 4, 6)], "lses": [m.f(10, 5)]},
            V,
            (r"lses\[0\]", shape(10, 5), shape(10, 4)),
        ),
        (
            "packed lse of the decode form",
            lambda m: {"outs": [m.f(10, 4, 6)], "lses": [m.f(10, 4)], "packed": True},
            V,
            (r"lses\[0\]", shape(10, 4), shape(4, 10)),
        ),
        (
            "packed or decoded, who knows",
            lambda m: {"outs": [m.f(4, 4, 6)], "lses": [m.f(4, 4)]},
            V,
            ("outs", shape(4, 4, 6), "packed=True"),
        ),
    ),
]

BACKWARD = [
    *rows(
        "attention_probs_backward",
        ("grad of another shape", lambda m: {"grad": m.f(2, 4, 7, 5)}, V, ("grad", shape(2, 4, 7, 5))),
        ("probs of float16", lambda m: {"probs": m.f(2, 4, 5, 7, dtype=F16)}, T, ("probs", "float16", "float32")),
        ("bias gradient of no bias", lambda m: {"need_bias_grad": True}, V, ("need_bias_grad", "bias")),
    ),
    *rows(
        "merge_attention_backward",
        ("grad_out of another shape", lambda m: {"grad_out": m.f(2, 4, 5, 7)}, V, ("grad_out", shape(2, 4, 5, 7))),
        ("grad_lse of float16", lambda m: {"grad_lse": m.f(2, 4, 5, dtype=F16)}, T, ("grad_lse", "float16")),
        ("lse of another shape", lambda m: {"lse": m.f(2, 4, 6)}, V, ("lse", shape(2, 4, 6), shape(2, 4, 5))),
        ("fewer lses", lambda m: {"lses": [m.f(2, 4, 5)]}, V, ("lses", word("1"), word("2"))),
    ),
    *rows(
        "attention_backward",
        (
            "grad_out of another shape",
            lambda m: {"grad_out": m.f(2, 4, 5, 8)},
            V,
            ("grad_out", shape(2, 4, 5, 8), shape(2, 4, 5, 6)),
        ),
        (
            "grad_out of another dtype",
            lambda m: {"grad_out": m.f(2, 4, 5, 6, dtype=F16)},
            T,
            ("grad_out", "float16", "float32"),
        ),
        ("grad_out elsewhere", lambda m: {"grad_out": m.f(2, 4, 5, 6, device="meta")}, V, ("grad_out", "meta")),
        ("out of another shape", lambda m: {"out": m.f(2, 5, 4, 6)}, V, ("out", shape(2, 5, 4, 6), shape(2, 4, 5, 6))),
        ("out of another dtype", lambda m: {"out": m.f(2, 4, 5, 6, dtype=F16)}, T, ("out", "float16", "float32")),
        ("lse of another shape", lambda m: {"lse": m.f(2, 5, 4)}, V, ("lse", shape(2, 5, 4), shape(2, 4, 5))),
        ("lse of float16", lambda m: {"lse": m.f(2, 4, 5, dtype=F16)}, T, ("lse", "float16", "float32")),
        ("lse is None", lambda m: {"lse": None}, T, ("lse", "NoneType", "Tensor")),
        (
            "grad_lse of another shape",
            lambda m: {"grad_lse": m.f(2, 4, 6)},
            V,
            ("grad_lse", shape(2, 4, 6), shape(2, 4, 5)),
        ),
        ("grad_lse of ints", lambda m: {"grad_lse": m.f(2, 4, 5, dtype=I32)}, T, ("grad_lse", "int32", "float32")),
        ("bias gradient of no bias", lambda m: {"need_bias_grad": True}, V, ("need_bias_grad", "bias")),
        ("sink gradient of no sink", lambda m: {"need_sink_grad": True}, V, ("need_sink_grad", "sink")),
        ("Hq % Hk", lambda m: {"q": m.f(2, 3, 5, 8)}, V, ("q|grad_out|out", word("3"))),
        ("window below -1", lambda m: {"window": (-9, 0)}, V, ("window", "-9", "-1")),
    ),
    *rows(
        "attention_varlen_backward",
        (
            "grad_out of another shape",
            lambda m: {"grad_out": m.f(10, 4, 7)},
            V,
            ("grad_out", shape(10, 4, 7), shape(10, 4, 6)),
        ),
        ("lse of the padded form", lambda m: {"lse": m.f(10, 4)}, V, ("lse", shape(10, 4), shape(4, 10))),
        ("out of another shape", lambda m: {"out": m.f(9, 4, 6)}, V, ("out", shape(9, 4, 6), shape(10, 4, 6))),
        ("cu_seqlens_q of floats", lambda m: {"cu_seqlens_q": m.f(3)}, T, ("cu_seqlens_q", "float32", "int32")),
    ),
]

TRAINING = [
    *rows(
        "softmax",
        ("x of ints", lambda m: {"x": m.f(3, 5, dtype=I32)}, T, ("x", "int32", "float32")),
        ("x of no dims", lambda m: {"x": m.f()}, V, ("x", r"\(\)", "1")),
    ),
    *rows(
        "softmax_backward",
        ("grad of another shape", lambda m: {"grad": m.f(3, 6)}, V, ("grad", shape(3, 6), shape(3, 5))),
        ("grad of another dtype", lambda m: {"grad": m.f(3, 5, dtype=F16)}, T, ("grad", "float16", "float32")),
        ("grad elsewhere", lambda m: {"grad": m.f(3, 5, device="meta")}, V, ("grad", "meta")),
    ),
    *rows(
        "rms_norm",
        ("x of ints", lambda m: {"x": m.f(3, 5, dtype=I64)}, T, ("x", "int64", "float32")),
        ("x of no dims", lambda m: {"x": m.f(), "weight": None}, V, ("x", r"\(\)", "1")),
        ("weight of another length", lambda m: {"weight": m.f(6)}, V, ("weight", r"\(6,\)", r"\(5,\)")),
        ("weight of 2 dims", lambda m: {"weight": m.f(1, 5)}, V, ("weight", shape(1, 5), shape(5))),
        ("weight of another dtype", lambda m: {"weight": m.f(5, dtype=F16)}, T, ("weight", "float16", "float32")),
        ("weight elsewhere", lambda m: {"weight": m.f(5, device="meta")}, V, ("weight", "meta")),
        ("eps negative", lambda m: {"eps": -1e-6}, V, ("eps", "-1e-06", "positive")),
        ("eps NaN", lambda m: {"eps": math.nan}, V, ("eps", "nan", "finite")),
        ("weight_offset infinite", lambda m: {"weight_offset": math.inf}, V, ("weight_offset", "inf", "finite")),
    ),
    *rows(
        "embedding",
        ("ids of floats", lambda m: {"ids": m.f(3)}, T, ("ids", "float32", "int32")),
        ("ids is a list", lambda m: {"ids": [0, 1]}, T, ("ids", "list", "Tensor")),
        ("weight of 1 dim", lambda m: {"weight": m.f(6)}, V, ("weight", shape(6), "2")),
        ("weight of ints", lambda m: {"weight": m.f(5, 6, dtype=I32)}, T, ("weight", "int32", "float32")),
        ("ids elsewhere", lambda m: {"ids": m.i(0, 1, device="meta")}, V, ("ids|weight", "meta")),
        ("padding_idx past the end", lambda m: {"padding_idx": 5}, V, ("padding_idx", "5")),
        ("padding_idx is a float", lambda m: {"padding_idx": 1.0}, T, ("padding_idx", r"1\.0", "whole")),
    ),
    *rows(
        "embedding_backward",
        ("grad of another shape", lambda m: {"grad": m.f(4, 6)}, V, ("grad", shape(4, 6), word("3"))),
        ("num_embeddings negative", lambda m: {"num_embeddings": -1}, V, ("num_embeddings", "-1", "at least")),
        ("num_embeddings is a float", lambda m: {"num_embeddings": 5.0}, T, ("num_embeddings", r"5\.0", "whole")),
    ),
    *rows(
        "cross_entropy",
        ("logits of ints", lambda m: {"logits": m.f(3, 5, dtype=I32)}, T, ("logits", "int32", "float32")),
        ("logits of 0 dims", lambda m: {"logits": m.f()}, V, ("logits", r"\(\)")),
        ("targets of another shape", lambda m: {"targets": m.i(0, 1, dtype=I64)}, V, ("targets", shape(2), shape(3))),
        ("targets of floats", lambda m: {"targets": m.f(3)}, T, ("targets", "float32", "int64")),
        ("targets of one-hot rows", lambda m: {"targets": m.f(3, 5).long()}, V, ("targets", shape(3, 5), shape(3))),
        ("targets elsewhere", lambda m: {"targets": m.i(0, 1, 2, dtype=I64, device="meta")}, V, ("targets", "meta")),
        ("unknown reduction", lambda m: {"reduction": "average"}, V, ("reduction", "average", "mean")),
        ("label_smoothing above 1", lambda m: {"label_smoothing": 1.5}, V, ("label_smoothing", r"1\.5", "1")),
        ("label_smoothing negative", lambda m: {"label_smoothing": -0.1}, V, ("label_smoothing", r"-0\.1")),
        ("z_loss negative", lambda m: {"z_loss": -1.0}, V, ("z_loss", r"-1\.0")),
        ("z_loss NaN", lambda m: {"z_loss": math.nan}, V, ("z_loss", "nan", "finite")),
        ("softcap 0", lambda m: {"softcap": 0.0}, V, ("softcap", "0", "positive")),
        ("ignore_index is a float", lambda m: {"ignore_index": -1.0}, T, ("ignore_index", r"-1\.0", "whole")),
    ),
    *rows(
        "cross_entropy_forward_backward",
        ("targets of another shape", lambda m: {"targets": m.i(0, dtype=I64)}, V, ("targets", shape(1), shape(3))),
        ("unknown reduction", lambda m: {"reduction": "max"}, V, ("reduction", "max", "mean")),
    ),
    *rows(
        "rms_norm_backward",
        ("grad of another shape", lambda m: {"grad": m.f(3, 4)}, V, ("grad", shape(3, 4), shape(3, 5))),
        ("rstd of another shape", lambda m: {"rstd": m.f(3, 1)}, V, ("rstd", shape(3, 1), shape(3))),
        ("rstd of float16", lambda m: {"rstd": m.f(3, dtype=F16)}, T, ("rstd", "float16", "float32")),
    ),
    *rows(
        "transpose",
        ("x of 1 dim", lambda m: {"x": m.f(5)}, V, ("x", shape(5), "2")),
        ("x of 16 bytes", lambda m: {"x": m.f(3, 5, dtype=torch.complex128)}, T, ("x", "complex128", "8|byte")),
        ("x is a list", lambda m: {"x": [[1.0]]}, T, ("x", "list", "Tensor")),
    ),
]

TABLE = ATTENTION + PACKED + DECODE + PROBS_AND_MERGE + BACKWARD + TRAINING + bad_norm_calls(rows, shape)

# Values on the device: refused in validate mode alone.


def with_values(name: str, *values: int, dtype: torch.dtype = I32) -> Callable[[Inputs], dict[str, Any]]:
    return lambda m: {name: m.i(*values, dtype=dtype)}


def pages(*rows: tuple[int, ...]) -> Callable[[Inputs], dict[str, Any]]:
    return lambda m: paged(m, block_table=torch.tensor(rows, dtype=I32, device=m.device))


BAD_VALUES = [
    *rows(
        "attention",
        ("kv_lengths too long", with_values("kv_lengths", 7, 8), V, ("kv_lengths", r"\[1\]", "8", "0 to 7")),
        ("kv_lengths negative", with_values("kv_lengths", -1, 7), V, ("kv_lengths", r"\[0\]", "-1")),
        ("q_lengths too long", with_values("q_lengths", 5, 6), V, ("q_lengths", r"\[1\]", "6", "0 to 5")),
        ("kv_starts too late", with_values("kv_starts", 7, 8), V, ("kv_starts", r"\[1\]", "8", "0 to 7")),
        ("kv_starts negative", with_values("kv_starts", -2, 0), V, ("kv_starts", r"\[0\]", "-2")),
    ),
    *rows(
        "attention_backward",
        ("kv_lengths too long", with_values("kv_lengths", 8, 7), V, ("kv_lengths", r"\[0\]", "8", "0 to 7")),
    ),
    *rows(
        "attention_probs",
        ("kv_lengths too long", with_values("kv_lengths", 3, 99), V, ("kv_lengths", r"\[1\]", "99", "0 to 7")),
        ("q_lengths negative", with_values("q_lengths", 3, -9), V, ("q_lengths", r"\[1\]", "-9", "0 to 5")),
    ),
    *rows(
        "attention_decode",
        ("lengths too long", with_values("lengths", 0, 8), V, ("lengths", r"\[1\]", "8", "0 to 7")),
        ("lengths negative", with_values("lengths", 2, -3), V, ("lengths", r"\[1\]", "-3")),
        ("kv_starts too late", with_values("kv_starts", 0, 8), V, ("kv_starts", r"\[1\]", "8", "0 to 7")),
        ("page past the end", pages((0, 9), (1, 2)), V, ("block_table", "9")),
        ("page negative", pages((0, 1), (-1, 2)), V, ("block_table", "1", "-1")),
    ),
    *rows(
        "attention_varlen",
        ("cu_seqlens_q not from 0", with_values("cu_seqlens_q", 1, 4, 10), V, ("cu_seqlens_q", "0", "1")),
        ("cu_seqlens_q decreasing", with_values("cu_seqlens_q", 0, 4, 3), V, ("cu_seqlens_q", "2", "3")),
        ("cu_seqlens_k past the end", with_values("cu_seqlens_k", 0, 6, 13), V, ("cu_seqlens_k", "13", "12")),
        ("longer than max_seqlen_q", with_values("cu_seqlens_q", 0, 7, 10), V, ("cu_seqlens_q", "7", "max_seqlen_q|6")),
        (
            "longer than max_seqlen_k",
            with_values("cu_seqlens_k", 0, 2, 12),
            V,
            ("cu_seqlens_k", "10", "max_seqlen_k|7"),
        ),
    ),
    *rows(
        "attention_varlen_backward",
        ("cu_seqlens_k decreasing", with_values("cu_seqlens_k", 0, 6, 5), V, ("cu_seqlens_k", "2", "5")),
    ),
    *rows(
        "attention_probs",
        ("rows of a tensor", with_values("rows", 0, 5), V, ("rows", r"\[1\]", "5")),
    ),
    *rows(
        "embedding",
        ("id past the end", with_values("ids", 0, 5, 2), V, ("ids", r"\[1\]", "5")),
        ("id negative", with_values("ids", 0, 1, -1), V, ("ids", r"\[2\]", "-1")),
    ),
    *rows(
        "embedding_backward",
        ("id past the end", with_values("ids", 7, 1, 0), V, ("ids", r"\[0\]", "7")),
    ),
    *rows(
        "cross_entropy",
        ("target past the end", with_values("targets", 0, 1, 5, dtype=I64), V, ("targets", r"\[2\]", "5")),
        ("target negative", with_values("targets", 0, -7, 1, dtype=I64), V, ("targets", r"\[1\]", "-7")),
    ),
    *rows(
        "cross_entropy_forward_backward",
        ("target past the end", with_values("targets", 9, 0, 0, dtype=I64), V, ("targets", r"\[0\]", "9")),
    ),
]
