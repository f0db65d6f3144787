"""The host time of a call: small calls on a GPU, timed until they are queued, beside PyTorch's own.

Every op is called in three ways: without gradients, recorded by autograd, and backward. Small models are limited by
this time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, OwnLeaves, our_yardstick
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import Requirement, Within
from headwise.benchmark.suites import training
from headwise.benchmark.suites.attention import QKV, SDPA, Shape, Visibility, attention_case, packed_case, sdpa
from headwise.benchmark.suites.training import TORCH, Setting
from headwise.testing import Arguments

GROUP = "host"
ATTENTION = "our attention"
_SHAPE = Shape(1, 16, 16, 128, 64)
_ROWS, _WIDTH = 64, 1024
_WAYS = ("no gradients", "recorded", "backward")


def host_cases(dtype: torch.dtype) -> list[BenchCase]:
    setting = Setting(dtype, GROUP, (Within(1.5, TORCH),))
    cross_entropy = training.cross_entropy_case(_ROWS, _WIDTH, setting)
    small: dict[str, tuple[BenchCase, tuple[Requirement, ...]]] = {
        "attention": (_attention(dtype), (Within(1.2, SDPA),)),
        "attention_varlen": (_varlen(dtype), (Within(1.3, ATTENTION),)),
        "rms_norm": (training.rms_norm_case(_ROWS, _WIDTH, "forward", setting), setting.requirements),
        "softmax": (training.softmax_case(_ROWS, _WIDTH, "forward", setting), setting.requirements),
        "embedding": (training.embedding_case(_ROWS, _WIDTH, 512, "forward", setting), setting.requirements),
        "cross_entropy": (
            replace(cross_entropy, check=WholeCheck(oracle("cross_entropy"), ("logits",))),
            setting.requirements,
        ),
    }
    return [
        replace(
            case,
            name=f"{name}, {way}",
            direction="backward" if way == "backward" else "forward",
            recorded=way == "recorded",
            requirements=() if way == "no gradients" else required,
            timed="host",
        )
        for name, (case, required) in small.items()
        for way in _WAYS
    ]


def _attention(dtype: torch.dtype) -> BenchCase:
    peers = (Contender(SDPA, sdpa),)
    return attention_case("attention", GROUP, _SHAPE, "forward", Visibility(), peers=peers, dtype=dtype)


def _varlen(dtype: torch.dtype) -> BenchCase:
    """Two documents, together as many tokens as the dense call."""

    def dense(arguments: Arguments) -> OwnLeaves:
        leaves = tuple(_dense(arguments[name]) for name in QKV)
        q, k, v = leaves
        return OwnLeaves(lambda: hw.attention(q, k, v), leaves)

    _, heads, _, length, head_dim = _SHAPE
    lengths = [length // 4, length - length // 4]
    peers = (our_yardstick(ATTENTION, dense),)
    return packed_case("varlen", GROUP, lengths, heads, head_dim, "forward", False, peers=peers, dtype=dtype)


def _dense(x: Tensor) -> Tensor:
    """Packed ``(T, H, D)`` as one dense sequence."""
    return x.detach().transpose(0, 1)[None].contiguous().requires_grad_(x.requires_grad)
