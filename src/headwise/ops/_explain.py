"""Why a call runs where it runs: every backend's verdict on it, without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from headwise.backends import registry
from headwise.ops import _checks, attention, cross_entropy, embedding, rms_norm, softmax, transpose

# op -> the function that checks its arguments and describes the call to the backends
CALLS: dict[str, Callable[..., registry.Call]] = {
    "attention": attention.attention_call,
    "attention_backward": attention.attention_backward_call,
    "attention_varlen": attention.attention_varlen_call,
    "attention_varlen_backward": attention.attention_varlen_backward_call,
    "attention_decode": attention.attention_decode_call,
    "attention_probs": attention.attention_probs_call,
    "attention_probs_backward": attention.attention_probs_backward_call,
    "merge_attention": attention.merge_attention_call,
    "merge_attention_backward": attention.merge_attention_backward_call,
    "rms_norm": rms_norm.rms_norm_call,
    "rms_norm_backward": rms_norm.rms_norm_backward_call,
    "softmax": softmax.softmax_call,
    "softmax_backward": softmax.softmax_backward_call,
    "embedding": embedding.embedding_call,
    "embedding_backward": embedding.embedding_backward_call,
    "cross_entropy": cross_entropy.cross_entropy_call,
    "cross_entropy_forward_backward": cross_entropy.cross_entropy_forward_backward_call,
    "transpose": transpose.transpose_call,
}

# Arguments of the public ops that no backend needs to know to judge a call.
_BESIDE_THE_CALL = ("backend", "return_lse")


class Verdict(NamedTuple):
    """What one backend says of a call: None, it runs it, or the reason why not."""

    backend: str
    reason: str | None

    @property
    def runs(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Explanation:
    """Every backend's verdict on a call, and which one is chosen. ``print`` it for a small table."""

    call: registry.Call
    verdicts: tuple[Verdict, ...]
    chosen: str | None  # None: the call would raise, with `error`
    error: str | None = None
    note: str | None = None  # how the chosen backend runs it, where it has several kernels for it

    def headline(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.call.sizes.items())
        parts = (
            self.call.op,
            _checks.short(self.call.dtype),
            f"on {self.call.device}",
            sizes,
            " ".join(self.call.features),
        )
        return "  ".join(part for part in parts if part)

    def __str__(self) -> str:
        width = max(len(v.backend) for v in self.verdicts)
        lines = [self.headline()]
        for v in self.verdicts:
            mark = "→" if v.backend == self.chosen else " "
            lines.append(f"{mark} {v.backend:<{width}}  {'runs' if v.runs else f'no: {v.reason}'}")
            if v.backend == self.chosen and self.note is not None:
                lines.append(f"  {'':<{width}}  {self.note}")
        if self.error is not None:
            lines.append(f"raises ValueError: {self.error}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.call.op,
            "dtype": _checks.short(self.call.dtype),
            "device": self.call.device,
            "sizes": {letter: int(size) for letter, size in self.call.sizes.items()},
            "features": list(self.call.features),
            "kernels": list(self.call.launchers),
            "verdicts": [{"backend": v.backend, "runs": v.runs, "reason": v.reason} for v in self.verdicts],
            "chosen": self.chosen,
            "note": self.note,
            "error": self.error,
        }


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Every backend's verdict on the call ``headwise.<op>(*args, **kwargs)``, and which backend would run it.

    Nothing is computed. ``use_backend``, ``HEADWISE_BACKEND`` and a ``backend=`` among the arguments count as they
    do in the call itself. Arguments that the op itself would refuse raise the op's own error.

    >>> print(hw.explain("attention", q, k, v, causal=True))
    attention  bfloat16  on cpu  B=1 Hq=8 Hk=8 Sq=1024 Sk=1024 D=64 Dv=64  causal
      triton  no: PyTorch sees no CUDA or ROCm GPU
      webgpu  no: the package wgpu is not installed: pip install 'headwise[webgpu]'
    → cpu     runs
    """
    return judge(describe(op, *args, **kwargs), kwargs.get("backend"), named(op, *args, **kwargs))


def describe(op: str, *args: Any, **kwargs: Any) -> registry.Call:
    """The call object that the op makes of these arguments; raises what the op raises."""
    if op not in CALLS:
        raise ValueError(f"explain: op is {op!r}; it needs to be one of {', '.join(CALLS)}")
    named(op, *args, **kwargs)  # a misspelt argument raises as it does in the call
    known = {name: value for name, value in kwargs.items() if name not in _BESIDE_THE_CALL}
    return CALLS[op](*args, **known)


def named(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by the names that the op has for them."""
    public = getattr(sys.modules[CALLS[op].__module__], op)
    return inspect.signature(public).bind(*args, **kwargs).arguments


def judge(
    call: registry.Call, backend: str | None = None, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Explanation:
    """Ask every backend about a call; ``arguments`` are those it was made of, as far as they are known."""
    verdicts = tuple(Verdict(row.name, registry.verdict(row, call)) for row in registry.BACKENDS)
    try:
        chosen = registry.choose(call, backend)
    except ValueError as error:
        return Explanation(call, verdicts, None, str(error))
    return Explanation(call, verdicts, chosen, note=registry.note(chosen, call, arguments))
