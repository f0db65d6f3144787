"""``headwise tour``: a short tour of the ops. Every step is code that is shown, run, and answered with its result."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

import headwise
from headwise.cli import _terminal


class Step(NamedTuple):
    title: str
    code: str  # the value of its last line is what is shown
    raises: bool = False  # the last line is there to show its ValueError


STEPS = (
    Step(
        "Attention: grouped heads, causal, a window of 128 keys",
        """
        import headwise as hw

        q = torch.randn(1, 8, 1024, 64, requires_grad=True)  # (B, Hq, Sq, D)
        k, v = torch.randn(2, 1, 2, 1024, 64)  # (B, Hk, Sk, D): 2 key heads
        flags = {"causal": True, "window": (127, 0)}
        out, lse = hw.attention(q, k, v, **flags, return_lse=True)
        out.sum().backward()
        out.shape, lse.shape, q.grad.shape
        """,
    ),
    Step(
        "A query that may see nothing gives zeros, never NaN",
        """
        lengths = torch.tensor([0])  # no key exists for this batch entry
        out, lse = hw.attention(q, k, v, kv_lengths=lengths, return_lse=True)
        out.abs().max().item(), lse.max().item()
        """,
    ),
    Step(
        "Decoding over a cache filled up to 700; the rest may hold anything",
        """
        k_cache, v_cache = k.clone(), v.clone()
        k_cache[:, :, 700:] = v_cache[:, :, 700:] = torch.nan
        query, lengths = q[:, :, 0].detach(), torch.tensor([700])
        token = hw.attention_decode(query, k_cache, v_cache, lengths)
        token.shape, token.isfinite().all().item()
        """,
    ),
    Step(
        "Two halves of the keys, merged: the same as attention over all of them",
        """
        out_1, lse_1 = hw.attention(q, k[:, :, :300], v[:, :, :300], return_lse=True)
        out_2, lse_2 = hw.attention(q, k[:, :, 300:], v[:, :, 300:], return_lse=True)
        merged, lse = hw.merge_attention([out_1, out_2], [lse_1, lse_2])
        f"largest difference {(merged - hw.attention(q, k, v)).abs().max():.0e}"
        """,
    ),
    Step(
        "Packed documents of 3, 0 and 5 tokens: none sees another",
        """
        x = torch.randn(8, 4, 32)  # (T, H, D)
        ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
        hw.attention_varlen(x, x, x, ends, ends, 5, 5, causal=True).shape
        """,
    ),
    Step(
        "The probabilities of the last query, with a sink that takes its share",
        """
        x = torch.randn(1, 1, 6, 16)
        sink = torch.zeros(1)
        hw.attention_probs(x, x, rows=[-1], window=(3, 0), sink=sink)
        """,
    ),
    Step(
        "The other ops of a training step",
        """
        weight = torch.randn(1000, 64, requires_grad=True)
        tokens = hw.embedding(torch.randint(1000, (32,)), weight)
        logits = hw.rms_norm(tokens, torch.ones(64)) @ weight.T
        loss = hw.cross_entropy(logits, torch.randint(1000, (32,)), z_loss=1e-4)
        loss.backward()
        loss.item(), weight.grad.shape
        """,
    ),
    Step(
        "Which backend runs a call, and why the others do not",
        """
        hw.explain("attention", q, k, v, causal=True)
        """,
    ),
    Step(
        "A backend asked for by name runs, or says why it does not",
        """
        hw.softmax(torch.randn(4, 100), backend="cuda")
        """,
        raises=True,
    ),
    Step(
        "Bad input is told what it got and what it needs",
        """
        k = v = torch.randn(1, 3, 1024, 64)
        hw.attention(q, k, v)
        """,
        raises=True,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    torch.manual_seed(0)
    names: dict[str, Any] = {"hw": headwise, "torch": torch}
    console = _terminal.console()
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    told = []
    with _short_tensors():
        for number, step in enumerate(STEPS, start=1):
            code = inspect.cleandoc(step.code)
            result = perform(code, names, step.raises)
            told.append({"title": step.title, "code": code, "result": result})
            if args.json:
                continue
            console.print(Text.assemble((f"{number} ", "bold cyan"), (step.title, "bold")))
            shown = syntax.highlight(code)
            shown.rstrip()
            console.print(Padding(shown, (0, 0, 0, 2), expand=False))
            answer = Table.grid(padding=(0, 1))
            answer.add_row(Text("=", "dim"), Text(result, "red" if step.raises else "green"))
            console.print(Padding(answer, (0, 0, 0, 2), expand=False))
            console.print()
    if args.json:
        _terminal.print_json(told)
    return 0


def perform(code: str, names: dict[str, Any], raises: bool = False) -> str:
    """Run the code; the value of its last expression, or the error it is there to show, as text."""
    *statements, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(statements, []), "<tour>", "exec"), names)
    expression = compile(ast.Expression(last.value), "<tour>", "eval")
    if not raises:
        return _shown(eval(expression, names))
    try:
        eval(expression, names)
    except ValueError as error:
        return f"ValueError: {error}"
    raise AssertionError(f"this was to raise: {code}")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, tuple):
        return "   ".join(_shown(v) for v in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


@contextlib.contextmanager
def _short_tensors() -> Iterator[None]:
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=100)
    try:
        yield
    finally:
        torch.set_printoptions(profile="default")
