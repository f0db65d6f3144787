"""Reads compiled kernels for two things that no compiler should leave.

A register that some path uses before anybody wrote it: ptxas 12.8 did so with the descriptor of a tile that two loops share
(docs/hopper-attention.md). The kernel ran, and gave other numbers at every run. Only uniform registers are looked at:
descriptors and addresses of shared memory are there.

An arrival at an mbarrier by one thread for all threads of its warps, some of which may still be at work on the shared memory
that it hands on. `compute-sanitizer` cannot tell: it does not follow mbarriers between warps.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__path__[0], "backends", "nvidia", "bin")

# Instructions whose first uniform register is read.
_NO_RESULT = ("UTMA", "UISETP", "UPLOP", "USETMAXREG", "SYNCS", "ST", "RED.", "BAR", "UVOTE", "UCGABAR", "CCTL", "UBLK")


class Instruction(NamedTuple):
    text: str
    next: list[int]
    reads: set[int]
    writes: set[int]
    copied: int | None = None  # register that a plain copy takes, which may be half of a pair that is filled in later

    def after(self, known: set[int]) -> set[int]:
        """Registers that are written behind it, where ``known`` are before it."""
        if self.copied is not None and self.copied not in known:
            return known - self.writes
        return known | self.writes


def disassemble(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout


def unset_reads(sass: str) -> list[str]:
    """Instructions that use a uniform register which is not written on every path to them."""
    program = _parse(sass)
    known: list[set[int] | None] = [None] * len(program)
    known[0] = set()
    todo = [0]
    while todo:
        at = todo.pop()
        after = program[at].after(known[at])
        for place in program[at].next:
            before = known[place]
            merged = set(after) if before is None else before & after
            if merged != before:
                known[place] = merged
                todo.append(place)
    return [i.text for i, there in zip(program, known, strict=True) if there is not None and i.reads - there]


_BARRIER = re.compile(r"(\{\s*)?(@!?%\w+\s+)?(bar\.sync|barrier\.sync|bar\.warp\.sync)\b")
_WORK = re.compile(r"\b(ld\.shared|st\.shared|stmatrix|ldmatrix|wgmma\.wait_group|red\.|st\.global)")
_ARRIVAL = re.compile(r"(@!?%\w+\s+)?mbarrier\.arrive\.(?!expect_tx)")
_BRANCH = re.compile(r"(@!?%\w+\s+)?bra(\.uni)?\s+(\$L__BB\w+);")


def hasty_arrivals(ptx: str) -> list[str]:
    """Arrivals that some path reaches with work on memory, or a wait for the tensor cores, since its last barrier.

    Those that expect bytes from a copy engine hand on nothing that threads have done.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    before = _predecessors(lines)
    arrivals = [at for at, line in enumerate(lines) if _ARRIVAL.match(line)]
    assert arrivals, "there is no arrival in this kernel: is it spelled otherwise now?"
    found = []
    for arrival in arrivals:
        seen: set[int] = set()
        todo = list(before[arrival])
        while todo:
            at = todo.pop()
            if at in seen or _BARRIER.match(lines[at]):
                continue
            seen.add(at)
            if _WORK.search(lines[at]):
                found.append(f"{lines[at]} … {lines[arrival]}")
            else:
                todo += before[at]
    return found


def _predecessors(lines: list[str]) -> list[list[int]]:
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$L__BB\w+):", line))}
    before: list[list[int]] = [[] for _ in lines]
    for at, line in enumerate(lines):
        branch = _BRANCH.match(line)
        if branch:
            before[labels[branch[3]]].append(at)
        goes_on = not (branch and not branch[1]) and not re.match(r"(ret|exit|brx)\b", line)
        if goes_on and at + 1 < len(lines):
            before[at + 1].append(at)
    return before


def _parse(sass: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    texts: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(texts)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            texts.append(code[1])
    return [_instruction(at, text, labels, len(texts)) for at, text in enumerate(texts)]


def _instruction(at: int, text: str, labels: dict[str, int], count: int) -> Instruction:
    guarded = text.startswith("@")
    body = text.split(maxsplit=1)[1] if guarded else text
    name, _, rest = body.partition(" ")
    following = [at + 1] if at + 1 < count else []
    if name.startswith(("BRA", "BRX")):
        jumps = [labels[x] for x in re.findall(r"\.L_x_\d+", text)]
        following = jumps + (following if guarded or re.match(r"!?U?P\d", rest) else [])
    elif name.startswith(("EXIT", "RET")):
        following = following if guarded else []
    reads, writes = _registers(name, rest)
    if copy := re.fullmatch(r"UMOV UR\d+, UR(\d+)", text):
        return Instruction(text, following, set(), writes, int(copy[1]))
    return Instruction(text, following, reads, writes)


def _registers(name: str, rest: str) -> tuple[set[int], set[int]]:
    operands = [x.strip() for x in re.split(r",(?![^\[]*\])", rest)]
    if name.startswith("HGMMA"):
        # Descriptors of two operands in four registers; of the second alone where the first is in vector registers.
        first = int(re.search(r"gdesc\[UR(\d+)\]", rest)[1])
        return set(range(first + 2 if re.match(r"R\d+, R\d+", rest) else first, first + 4)), set()
    uniform = name.startswith("U")
    written = 2 if uniform and (".64" in name or ".WIDE" in name) else 1
    read = 2 if uniform and ".64" in name and not name.startswith("ULDC") else 1
    result = None
    if not name.startswith(_NO_RESULT):
        plain = [x for x in operands if not re.fullmatch(r"!?U?P(\d|T)", x)]
        result = plain[0] if plain and re.fullmatch(r"UR\d+", plain[0]) else None
    reads, writes = set(), set()
    for operand in operands:
        first = {int(n) for n in re.findall(r"\bUR(\d+)\b", operand)}
        if operand is result and not writes:
            writes = {n + more for n in first for more in range(written)}
        else:
            reads |= {n + more for n in first for more in range(read if not operand.startswith("[") else 1)}
    return (set() if name.startswith("USETMAXREG") else reads), writes
