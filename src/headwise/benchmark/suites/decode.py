"""Decode cases: one new token per sequence over a cache, contiguous or paged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, our_yardstick
from headwise.benchmark.correctness import first_output, oracle
from headwise.benchmark.requirements import Requirement
from headwise.benchmark.timing import Timed
from headwise.testing import Arguments, Maker, Outputs

CONTIGUOUS = "our contiguous"


class Cache(NamedTuple):
    batch: int
    length: int
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class EntriesCheck:
    """Checks the last entries of the batch; entries are independent.

    heads: only the last query heads of them, where all share one key head.
    """

    entries: int
    heads: int | None = None

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        assert grad_out is None, "decoding is timed forward"
        paged = "block_table" in arguments
        of_entries = ("q", "lengths", "block_table") if paged else ("q", "lengths", "k_cache", "v_cache")
        part = {name: self._last(x) if name in of_entries else x for name, x in arguments.items()}
        part["q"] = self._of_heads(part["q"])
        return {"out": first_output(oracle("attention_decode")(part))}

    def pick(self, results: Outputs) -> Outputs:
        return {name: self._of_heads(self._last(x)) for name, x in results.items()}

    def _of_heads(self, x: Tensor) -> Tensor:
        return x if self.heads is None else x[:, -self.heads :]

    def _last(self, x: Tensor) -> Tensor:
        return x[-self.entries :]


def decode_case(
    group: str,
    cache: Cache,
    timed: Timed,
    dtype: torch.dtype,
    *,
    page_size: int | None = None,
    peers: tuple[Contender, ...] = (),
    requirements: tuple[Requirement, ...] = (),
    in_keys: int | None = None,
) -> BenchCase:
    """`headwise.attention_decode` over full caches; with ``page_size``, over pages in random order.

    in_keys: how many of the first numbers of a key are its value; None: values have a cache of their own.
    """
    batch, length, heads, key_heads, head_dim = cache

    def make(maker: Maker) -> Arguments:
        q = maker.normal(batch, heads, head_dim)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=maker.device)
        per_sequence = -(-length // page_size) if page_size else 1
        pages = batch * per_sequence
        shape = (pages, key_heads, page_size or length, head_dim)
        k = maker.normal(*shape)
        v = maker.normal(*shape) if in_keys is None else k[..., :in_keys]
        if page_size is None:
            return {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths}
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(maker.seed))
        table = shuffled.reshape(batch, per_sequence).to(maker.device, torch.int32)
        return {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, "block_table": table}

    return BenchCase(
        name=f"B {batch} length {length}",
        group=group,
        direction="forward",
        make=make,
        ours=_ours,
        check=EntriesCheck(min(batch, 2)),
        peers=peers,
        flops=2.0 * batch * heads * length * (head_dim + (in_keys or head_dim)),
        bytes=(2.0 if in_keys is None else 1.0) * dtype.itemsize * batch * key_heads * length * head_dim,
        requirements=requirements,
        dtype=dtype,
        timed=timed,
        counted="bytes",
    )


LATENT, LATENT_VALUES = 576, 512
_CHECKED_HEADS = 8  # the truth of 128 heads in float64 would not fit beside the cache


def latent_case(
    group: str, cache: Cache, timed: Timed, dtype: torch.dtype, *, page_size: int | None = None,
    peers: tuple[Contender, ...] = (), requirements: tuple[Requirement, ...] = (),
) -> BenchCase:  # fmt: skip
    """Absorbed latent attention: one key head of 576 numbers, whose first 512 are the values and are read once."""
    base = decode_case(
        group, cache, timed, dtype, page_size=page_size, peers=peers, requirements=requirements, in_keys=LATENT_VALUES
    )
    pages = f" pages of {page_size}" if page_size else ""
    check = EntriesCheck(1, heads=min(cache.heads, _CHECKED_HEADS))
    return replace(base, name=f"{cache.heads} heads {base.name}{pages}", check=check)


def contiguous_yardstick() -> Contender:
    """Our own decoding over the same cache, contiguous."""
    return our_yardstick(CONTIGUOUS, _contiguous)


def _ours(arguments: Arguments) -> Callable[[], Tensor]:
    return lambda: hw.attention_decode(**arguments)


def _contiguous(arguments: Arguments) -> Callable[[], Tensor]:
    table = arguments["block_table"].long()
    length = int(arguments["lengths"].max())
    laid_out = {}
    for name in ("k_cache", "v_cache"):
        gathered = arguments[name][table].transpose(1, 2)  # (B, Hk, pages of a sequence, page size, D)
        laid_out[name] = gathered.flatten(2, 3)[:, :, :length]
    return _ours({"q": arguments["q"], "lengths": arguments["lengths"], **laid_out})
