"""``headwise run``: run a Python program whose ``import flash_attn`` finds Headwise.

The program is not changed and needs no flash_attn. With `--sdpa` its calls of PyTorch's scaled_dot_product_attention go to
Headwise as well. Options of headwise run come before the program; what follows it belongs to the program.

Processes that the program starts anew know nothing of this; under a launcher, let it start headwise run.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from headwise.cli._terminal import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="a Python file; with -m the name of a module")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the program")
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module, as in python -m")
    parser.add_argument("--sdpa", action="store_true", help="serve F.scaled_dot_product_attention too")
    parser.add_argument(
        "--fallback", action="store_true", help="with --sdpa: calls that Headwise refuses go to PyTorch's own function"
    )
    parser.add_argument("--backend", metavar="NAME", help="the backend of all calls (default: that of their device)")


def run(args: argparse.Namespace) -> int:
    from headwise.backends.registry import use_backend
    from headwise.integrations import flash_attn, sdpa

    if args.fallback and not args.sdpa:
        raise UsageError("--fallback is for --sdpa, which is not given")
    if args.program is None:
        raise UsageError("no program is named: headwise run program.py")
    if not args.module and not Path(args.program).is_file():
        raise UsageError(f"{args.program} is not a file")
    if args.backend is not None:
        try:
            with use_backend(args.backend):
                pass
        except ValueError as error:
            raise UsageError(str(error)) from error
        from headwise.config import settings

        settings.backend = args.backend  # in all threads of the program
    flash_attn.install()
    if args.sdpa:
        sdpa.enable(fallback=args.fallback)
    sys.argv = [args.program, *args.arguments]
    if args.module:
        sys.path.insert(0, "")
        runpy.run_module(args.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(args.program).resolve().parent))
        runpy.run_path(args.program, run_name="__main__")
    return 0
