"""Every variant of the Hopper kernels, compiled for sm_90 without a GPU, and what the assembler says of it.

    python tests/hopper_variants.py [PATTERN]       compile the variants whose names match, and note their figures

tests/data/hopper_figures.json has registers, shared memory, stack and spills of each; tests compile some of them again and
allow no more.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import sass
import torch
from ahead_of_time import Recorded
from torch import Tensor

from headwise.arguments import split
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.hopper.attention_backward import backward
from headwise.backends.triton.hopper.attention_forward import forward
from headwise.backends.triton.hopper.coverage import (
    BACKWARD,
    FORWARD,
    FORWARD_UNEQUAL,
    biased_tile,
    masked_tile,
)
from headwise.backends.triton.hopper.tiles import ForwardTile
from headwise.backends.triton.recording import Call, Launch, Recording
from headwise.ops.attention._arguments import Attention, AttentionBackward, Flags, Packing

FIGURES = Path(__file__).parent / "data" / "hopper_figures.json"

FULL = Flags(left=-1, right=-1, scale=0.125, softcap=0.0, deterministic=True)
CAUSAL = FULL._replace(right=0)
WINDOW = FULL._replace(left=1023, right=0)
BANDS = {"full": FULL, "causal": CAUSAL, "left": FULL._replace(left=1023), "window": WINDOW}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    dim: int, flags: Flags = FULL, *, length: int = 4096, keys: int | None = None, batch: int = 2, heads: int = 16,
    group: int = 1, packed: int | None = None, sink: bool = False, lengths: bool = False,
    dtype: torch.dtype = torch.bfloat16, value_dim: int | None = None,
) -> Attention:  # fmt: skip
    """A call without memory; ``packed``: so many sequences in ``length`` tokens."""
    keys = length if keys is None else keys
    q, k = (batch, heads, length, dim), (batch, heads // group, keys, dim)
    v = *k[:3], dim if value_dim is None else value_dim
    packing = None
    if packed is not None:
        q, k, v = ((s, n, d) for _, n, s, d in (q, k, v))
        packing = Packing(*(meta(packed + 1, dtype=torch.int32) for _ in range(2)), length, keys)
    return Attention(
        meta(*q, dtype=dtype), meta(*k, dtype=dtype), meta(*v, dtype=dtype), None, None,
        meta(heads, dtype=torch.float32) if sink else None, meta(batch, dtype=torch.int32) if lengths else None,
        None, None, packing, flags,
    )  # fmt: skip


def gradients_of(args: Attention, grad_lse: bool = False) -> AttentionBackward:
    shape = args.q.shape[1::-1] if args.packing is not None else args.q.shape[:3]
    lse = meta(*shape, dtype=torch.float32)
    out = meta(*args.q.shape[:-1], args.v.shape[-1], dtype=args.q.dtype)
    return AttentionBackward(out, lse if grad_lse else None, out, lse, args, False, args.sink is not None)


def recorded(
    launcher: Any, args: Any, *, unaligned: str = "", multiprocessors: int = 132
) -> tuple[Any, list[Launch], list[Call]]:
    """What a launcher returns on an sm_90, what it launches, and its PyTorch functions; ``unaligned``: a tensor."""
    recording = Recording(KNOWN["sm_90"]._replace(multiprocessors=multiprocessors))
    results = recording.run(launcher, args, [2 if name == unaligned else 0 for name in split(args)[1]])
    steps = recording.steps
    return results, [s for s in steps if isinstance(s, Launch)], [s for s in steps if isinstance(s, Call)]


class Figures(NamedTuple):
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


def noted() -> dict[str, Figures]:
    return {name: Figures(*figures) for name, figures in json.loads(FIGURES.read_text(encoding="utf-8")).items()}


def compiled(name: str) -> Any:
    """The kernel of a variant."""
    recorded = Recorded(*VARIANTS[name])
    return recorded.compiled(next(launch for launch in recorded.launches if launch.described))


def assembled(kernel: Any, folder: Path) -> tuple[Figures, str]:
    """Its figures, and what the assembler says."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    command = [sass.TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "again.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    log = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", log)[1]
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return Figures(int(registers), kernel.metadata.shared, *map(int, spills)), log


def assert_sound(kernel: Any, figures: Figures, folder: Path, fenced: bool = False) -> str:
    """No more registers, memory or spills than noted, no serialised WGMMA, no register used unset, no hasty arrival.

    fenced: ptxas may put fences between products (C7519), which then still run beside other work. Returns the disassembled
    kernel.
    """
    found, log = assembled(kernel, folder)
    assert all(now <= then for now, then in zip(found, figures, strict=True)), f"{found}, noted {figures}"
    assert not re.findall(r"C75(?!19)\d\d" if fenced else r"C75\d\d", log), log
    code = sass.disassemble(kernel.asm["cubin"], folder)
    # Of what moves or makes 64 bits, addresses and factors have 32: there the reading is too strict.
    assert not [i for i in sass.unset_reads(code) if not re.search(r"\.64|\.WIDE", i)]
    assert not sass.hasty_arrivals(kernel.asm["ptx"])
    return code


def is_fenced(name: str) -> bool:
    """With a cap and no band, parts of P are made between the products that read them."""
    return name.startswith("backward") and " full" in name and name.endswith("cap")


def forward_tiles() -> dict[str, tuple[int, ForwardTile]]:
    """All tiles of the table by name: a head dim, and queries × keys."""
    return {
        f"{row.widest} ({64 * t.consumers}x{t.keys}{' keys first' if t.keys_first else ''})": (row.widest, t)
        for row in FORWARD
        for t in row[1:6]
        if isinstance(t, ForwardTile)
    }


def _variants() -> dict[str, tuple[Any, Any]]:
    """(launcher, arguments) by name: each tile under every flag that is a constant of the kernel."""
    made: dict[str, tuple[Any, Any]] = {}
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "lengths": {"lengths": True}, "packed": {"packed": 2}}
    for (tile_name, (dim, tile)), (kind, given), (band, flags), cap in itertools.product(
        forward_tiles().items(), kinds.items(), BANDS.items(), (False, True)
    ):
        args = attention(dim, flags._replace(softcap=30.0 if cap else 0.0), sink=cap, **given)
        name = f"forward {tile_name} {kind} {band}{' cap sink' if cap else ''}"
        made[name] = functools.partial(forward, tile=tile), args
    for of, packed, (band, flags), grouped, ordered, cap in itertools.product(
        BACKWARD, (False, True), BANDS.items(), (False, True), (True, False), (False, True)
    ):
        flags = flags._replace(deterministic=ordered, softcap=30.0 if cap else 0.0)
        args = attention(of.d0 + of.d1, flags, batch=1, group=4 if grouped else 1, packed=2 if packed else None)
        name = f"backward {of.d0 + of.d1} {'packed' if packed else 'dense'} {band}"
        name += " grouped" * grouped + " any order" * (not ordered) + " cap" * cap
        made[name] = backward, gradients_of(args)
    return made | _masked_and_biased() | _unequal()


def _masked_and_biased() -> dict[str, tuple[Any, Any]]:
    """Masks, and biases beside none and beside a mask, each in every tile that takes it."""
    made: dict[str, tuple[Any, Any]] = {}
    seen, float32 = meta(4096, 4096, dtype=torch.bool), torch.float32
    masks = {"mask": seen, "mask of queries": seen[:, :1]}
    biases = {
        "bias": meta(16, 4096, 4096),
        "float32 bias": meta(16, 4096, 4096, dtype=float32),
        "bias of keys": meta(2, 1, 1, 4096),
        "float32 bias of keys": meta(2, 1, 1, 4096, dtype=float32),
    }
    scores: dict[str, dict[str, Tensor]] = {name: {"mask": mask} for name, mask in masks.items()}
    for name, bias in biases.items():
        scores[name] = {"bias": bias}
        scores |= {f"{name} and {other}": {"bias": bias, "mask": mask} for other, mask in masks.items()}
    for (kind, given), (band, flags), cap in itertools.product(scores.items(), BANDS.items(), (False, True)):
        bias = given.get("bias")
        of_call = flags._replace(softcap=30.0 if cap else 0.0)
        for dim in (64, 96, 128) if bias is not None else (64, 96, 128, 192, 256):
            tile = masked_tile(dim) if bias is None else biased_tile(dim, bias.element_size())
            args = attention(dim, of_call)._replace(**given)
            made[f"forward {dim} {kind} {band}{' cap' * cap}"] = functools.partial(forward, tile=tile), args
        # The backward does not tell one kind of mask from another, takes 96 in the tile of 128, and no bias beside a cap.
        if kind.endswith("mask of queries") or (bias is not None and cap):
            continue
        for dim, grouped, ordered in itertools.product(
            (64, 128) if bias is not None else (64, 128, 192, 256), (False, True), (True, False)
        ):
            args = attention(dim, of_call._replace(deterministic=ordered), group=4 if grouped else 1)._replace(**given)
            name = f"backward {dim} {kind} {band}" + " grouped" * grouped + " any order" * (not ordered) + " cap" * cap
            made[name] = backward, gradients_of(args)
    return made


def _unequal() -> dict[str, tuple[Any, Any]]:
    """Values narrower than keys."""
    made: dict[str, tuple[Any, Any]] = {}
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "lengths": {"lengths": True}, "packed": {"packed": 2}}
    for (kind, given), (band, flags), cap in itertools.product(kinds.items(), BANDS.items(), (False, True)):
        of_call = flags._replace(softcap=30.0 if cap else 0.0)
        args = attention(192, of_call, batch=1, value_dim=128, sink=cap, **given)
        name = f"forward 192/128 {kind} {band}{' cap sink' * cap}"
        made[name] = functools.partial(forward, tile=FORWARD_UNEQUAL), args
        if kind == "lengths":
            continue
        for grouped, ordered in itertools.product((False, True), (True, False)):
            in_order = of_call._replace(deterministic=ordered)
            args = attention(192, in_order, batch=1, value_dim=128, group=4 if grouped else 1, **given)
            name = (
                f"backward 192/128 {kind} {band}" + " grouped" * grouped + " any order" * (not ordered) + " cap" * cap
            )
            made[name] = backward, gradients_of(args)
    return made


VARIANTS = _variants()


def main(pattern: str = ".") -> None:
    known: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    for name in filter(re.compile(pattern).search, VARIANTS):
        with tempfile.TemporaryDirectory() as folder:
            kernel = compiled(name)
            figures, _ = assembled(kernel, Path(folder))
            assert_sound(kernel, figures, Path(folder), is_fenced(name))
        print(name, figures, "" if name not in known else f"were {known[name]}", flush=True)
        known[name] = list(figures)
        lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(known[n])}" for n in VARIANTS if n in known)
        FIGURES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
