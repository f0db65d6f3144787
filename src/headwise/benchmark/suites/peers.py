"""Peers on a GPU: each kernel of PyTorch's attention, compiled FlexAttention, and FlashAttention-4.

A peer that cannot run a case raises `Absent` when it is prepared, and the report says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.benchmark.case import ANY_ORDER, Absent, Contender, Prepare
from headwise.benchmark.suites.attention import QKV, sdpa
from headwise.testing import Arguments

FA2, CUDNN, EFFICIENT, MATH, FLEX = "FA2", "cuDNN", "SDPA efficient", "SDPA math", "FlexAttention"
FA4, FLASH_MLA = "FA4", "FlashMLA"
_MLA_PAGE = 64
_KERNELS = {
    FA2: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}


def sdpa_peers(*names: str) -> tuple[Contender, ...]:
    """PyTorch's attention, restricted to one of its kernels for each peer."""
    return sdpa_peers_of(sdpa, *names)


def sdpa_peers_of(prepare: Callable[[Arguments], Callable[[], Tensor]], *names: str) -> tuple[Contender, ...]:
    """The same for a call of their own."""
    return tuple(_sdpa_peer(name, prepare) for name in names)


def sdpa_decode_peers(*names: str) -> tuple[Contender, ...]:
    return sdpa_peers_of(_sdpa_decode, *names)


def sdpa_yardsticks(prepare: Callable[[Arguments], Callable[[], Tensor]], *names: str) -> tuple[Contender, ...]:
    """The same, of a call whose results are not compared."""
    return tuple(replace(_sdpa_peer(name, prepare), yardstick=True) for name in names)


def flex_peer() -> Contender:
    return Contender(FLEX, _flex)


def fa4_peer(packed: bool = False) -> Contender:
    """FlashAttention-4 (the package flash-attn-4), where it is installed."""
    return Contender(FA4, _fa4_packed if packed else _fa4, deterministic=False)


def any_order_contender(call: Callable[..., Any]) -> Contender:
    """Our own call with sums in any order, beside peers that sum so."""
    return Contender(
        ANY_ORDER, lambda arguments: lambda: call(**arguments, deterministic=False), deterministic=False, variant=True
    )


def flash_mla_peer() -> Contender:
    """FlashMLA (the package flash_mla), where it is installed: absorbed latent decoding over pages of 64."""
    return Contender(FLASH_MLA, _flash_mla)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the warnings of FlashAttention-4's compiler, which come with every kernel."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\b")
        yield


def _fa4(arguments: Arguments) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    q, k, v = (arguments[name].transpose(1, 2) for name in QKV)
    options = {"causal": arguments["causal"], **_fa4_window(arguments)}
    with _quiet():
        return tried(lambda: _only_output(flash_attn_func(q, k, v, **options)).transpose(1, 2), arguments)


def _fa4_packed(arguments: Arguments) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    q, k, v = (arguments[name] for name in QKV)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal")
    options = {name: arguments[name] for name in names}
    with _quiet():
        return tried(lambda: _only_output(flash_attn_varlen_func(q, k, v, **options)), arguments)


def _fa4_window(arguments: Arguments) -> dict[str, Any]:
    return {} if arguments["window"] is None else {"window_size": tuple(arguments["window"])}


def _only_output(result: Any) -> Tensor:
    """Some releases return the lse as well."""
    return cast(Tensor, result[0] if isinstance(result, tuple) else result)


def _sdpa_peer(name: str, prepare: Callable[[Arguments], Callable[[], Tensor]]) -> Contender:
    def prepare_and_try(arguments: Arguments) -> Callable[[], Tensor]:
        return tried(prepare(arguments), arguments)

    # Entered once for a whole sample: entering takes as long as a small call.
    # PyTorch warns that these three add up in any order unless deterministic algorithms are asked for.
    deterministic = False if name in (FA2, CUDNN, EFFICIENT) else None
    return Contender(
        name, cast(Prepare, prepare_and_try), scope=lambda: sdpa_kernel(_KERNELS[name]), deterministic=deterministic
    )


def tried(call: Callable[[], Tensor], arguments: Arguments) -> Callable[[], Tensor]:
    """Runs the call once, with its backward where gradients are wanted, so that kernels are compiled; returns it."""
    try:
        out = call()
        wanted = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
        if wanted:
            torch.autograd.grad(out, wanted, torch.ones_like(out), retain_graph=True)  # as when it is timed
    except Exception as error:  # no such kernel for this call, out of memory, a compiler that gives up
        lines = str(error).strip().splitlines() or [""]
        raise Absent(f"{type(error).__name__}: {lines[0]}") from error
    return call


def _sdpa_decode(arguments: Arguments) -> Callable[[], Tensor]:
    """One new token over full caches, by PyTorch's attention."""
    q, k, v = arguments["q"][:, :, None], arguments["k_cache"], arguments["v_cache"]
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]


def _flash_mla(arguments: Arguments) -> Callable[[], Tensor]:
    from flash_mla import (  # type: ignore[import-not-found,unused-ignore]
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    q, cache, lengths = (arguments[name] for name in ("q", "k_cache", "lengths"))
    table = arguments.get("block_table")
    if table is None:  # the same memory in pages, in order
        batch, _, length, head_dim = cache.shape
        if length % _MLA_PAGE:
            raise Absent(f"its pages have {_MLA_PAGE} keys, and the cache has {length}")
        cache = cache.reshape(-1, 1, _MLA_PAGE, head_dim)
        table = torch.arange(cache.shape[0], dtype=torch.int32, device=q.device).reshape(batch, -1)
    elif cache.shape[2] != _MLA_PAGE:
        raise Absent(f"its pages have {_MLA_PAGE} keys, not {cache.shape[2]}")
    schedule, splits = get_mla_metadata(lengths, q.shape[1], 1)
    values = arguments["v_cache"].shape[-1]
    pages = cache.transpose(1, 2)
    return tried(
        lambda: flash_mla_with_kvcache(q[:, None], pages, table, lengths, values, schedule, splits)[0][:, 0], arguments
    )


def _flex(arguments: Arguments) -> Callable[[], Tensor]:
    # Imported here: it loads the compiler.
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (arguments[name] for name in QKV)
    if arguments["window"] is not None:
        raise Absent("no mask was written for a window")
    torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    if arguments["causal"]:
        # Its causal mask starts at the top left: the same as ours if there are as many queries as keys.
        assert q.shape[2] == k.shape[2]
        options["block_mask"] = create_block_mask(_no_key_after, None, None, q.shape[2], k.shape[2], device=q.device)
    # The timed backward runs many times on the tensors that one forward saved.
    functorch_config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    return tried(lambda: compiled(q, k, v, **options), arguments)


def _no_key_after(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
