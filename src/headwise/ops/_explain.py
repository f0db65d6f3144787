"""Why a call runs where it runs: every backend's verdict on it, without running it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headwise.backends import registry
from headwise.ops import _checks
from headwise.ops._op import OPS

# From so many heads on, of no more tokens than this, a tensor is likely to be (B, S, H, D).
_MANY_HEADS, _FEW_TOKENS = 64, 64


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
    hint: str | None = None  # what looks like a mistake, though the op takes it

    def headline(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.call.sizes.items())
        where = f"on {self.call.device}" + (f" ({self.call.arch})" if self.call.arch else "")
        words = (self.call.op, _checks.short(self.call.dtype), where, sizes, " ".join(self.call.features))
        return "  ".join(word for word in words if word)

    def __str__(self) -> str:
        width = max(len(v.backend) for v in self.verdicts)
        lines = [self.headline()]
        for v in self.verdicts:
            mark = "→" if v.backend == self.chosen else " "
            lines.append(f"{mark} {v.backend:<{width}}  {'runs' if v.runs else f'no: {v.reason}'}")
            if v.backend == self.chosen and self.note is not None:
                lines.append(f"  {'':<{width}}  {self.note}")
        if self.hint is not None:
            lines.append(f"note: {self.hint}")
        if self.error is not None:
            lines.append(f"raises ValueError: {self.error}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.call.op,
            "dtype": _checks.short(self.call.dtype),
            "device": self.call.device,
            "arch": self.call.arch,
            "sizes": {letter: int(size) for letter, size in self.call.sizes.items()},
            "features": list(self.call.features),
            "kernels": list(self.call.launchers),
            "verdicts": [{"backend": v.backend, "runs": v.runs, "reason": v.reason} for v in self.verdicts],
            "chosen": self.chosen,
            "note": self.note,
            "hint": self.hint,
            "error": self.error,
        }


def explain(op: str, *args: Any, arch: str | None = None, **kwargs: Any) -> Explanation:
    """Every backend's verdict on the call ``headwise.<op>(*args, **kwargs)``, and which backend would run it.

    Nothing is computed. ``use_backend``, ``HEADWISE_BACKEND`` and a ``backend=`` among the arguments count as they
    do in the call itself. Arguments that the op itself would refuse raise the op's own error.

    arch: answer as if the tensors were on a GPU of this architecture ("sm_90", "gfx942", …), which need not be here.

    >>> q = torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16)
    >>> print(hw.explain("attention", q, q, q, causal=True))
    attention  bfloat16  on cpu  B=1 Hq=8 Hk=8 Sq=1024 Sk=1024 D=64 Dv=64  causal
      triton  no: ...
      webgpu  ...
    → cpu     runs
    >>> hw.explain("attention", q, q, q, arch="sm_90").chosen
    'triton'
    """
    return judge(describe(op, *args, **kwargs), arch=arch)


def describe(op: str, *args: Any, **kwargs: Any) -> registry.Described:
    """The call that the op makes of these arguments; raises what the op raises."""
    if op not in OPS:
        raise ValueError(f"explain: op is {op!r}; it needs to be one of {', '.join(sorted(OPS))}")
    with registry.describing():
        try:
            getattr(importlib.import_module("headwise"), op)(*args, **kwargs)
        except registry.Described as described:
            return described
    raise AssertionError(f"{op} was not described")


def judge(described: registry.Described, device: str | None = None, arch: str | None = None) -> Explanation:
    """Ask every backend about a call. device: in place of that of its tensors."""
    call, args, backend = described.call, described.arguments, described.backend
    if arch is not None:
        if arch not in registry.ARCHITECTURES:
            raise ValueError(f"explain: arch is {arch!r}; it needs to be one of {', '.join(registry.ARCHITECTURES)}")
        call = call._replace(device="cuda", arch=arch)
    elif device is not None:
        call = call._replace(device=device)
    verdicts = tuple(Verdict(row.name, registry.verdict(row, call)) for row in registry.BACKENDS)
    hint = _hint(getattr(args, "forward", args))
    try:
        chosen = registry.choose(call, backend)
    except registry.Unsupported as error:
        return Explanation(call, verdicts, None, str(error), hint=hint)
    return Explanation(call, verdicts, chosen, note=registry.note(chosen, call, args), hint=hint)


def _hint(args: Any) -> str | None:
    """Calls like any other, and likely not what was meant: (B, S, H, D) tensors, a padded batch with kv_lengths alone."""
    q, k = getattr(args, "q", None), getattr(args, "k", None)
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.dim() != 4:
        return None
    padded = args.kv_lengths is not None and args.q_lengths is None and q.shape[2] == k.shape[2] > 1
    if padded and args.flags.right == 0:
        return "kv_lengths alone puts the last query at the last key; a right-padded batch needs q_lengths as well"
    if not all(x.shape[1] >= _MANY_HEADS and x.shape[2] <= _FEW_TOKENS and x.shape[1] > x.shape[2] for x in (q, k)):
        return None
    return f"q has {q.shape[1]} heads of {q.shape[2]} tokens; a (B, S, H, D) tensor needs .transpose(1, 2)"
