"""``headwise web``: the WebGPU kernels in a browser, checked and measured there, and a demo's attention maps."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli import _terminal
from headwise.cli._terminal import UsageError
from headwise.demo.record import ATTENTION, DEFAULT_FOLDER

if TYPE_CHECKING:
    from headwise.demo.record import AttentionSample

DEFAULT_RUN = Path(DEFAULT_FOLDER)
DEFAULT_PORT = 8321


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="DIR", type=Path, nargs="?",
        help=f"a demo's folder, for its attention maps (default: {DEFAULT_RUN}, if it is there)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", type=Path, help="write the site there, to be hosted; serve nothing")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"of localhost (default: {DEFAULT_PORT})")
    parser.add_argument("--no-open", action="store_true", help="say where the page is, open no browser")
    parser.add_argument("--json", action="store_true", help="say where it is as JSON")


def run(args: argparse.Namespace) -> int:
    for package in ("wgpu", "jinja2", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"it needs the package {package}: pip install 'headwise[webgpu]' (no GPU is needed for it)"
            )
    sample = _sample(args.run_folder)
    if args.out is not None:
        _write(args.out, sample)
        if args.json:
            _terminal.print_json({"folder": str(args.out), "bytes": _bytes(args.out)})
        else:
            print(f"{args.out}: {_megabytes(args.out)}, to be served as static files over https")
        return 0
    with tempfile.TemporaryDirectory(prefix="headwise-web-") as folder:
        return _serve(Path(folder), sample, args.port, not args.no_open, args.json)


def _serve(folder: Path, sample: AttentionSample | None, port: int, opens: bool, as_json: bool) -> int:
    from headwise.web import server

    try:
        serving = server.server(folder, port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port} cannot be used: {error}; --port 0 takes any that is free") from error
    with serving:
        _write(folder, sample)
        if as_json:
            _terminal.print_json({"address": server.address(serving)})
            sys.stdout.flush()
        else:
            print(f"{server.address(serving)}   (Ctrl-C stops it)", flush=True)
        if opens and not webbrowser.open(server.address(serving)):
            print("headwise web: no browser could be started here; open the address above in one", file=sys.stderr)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _sample(folder: Path | None) -> AttentionSample | None:
    """The attention of a demo. A folder that was named must hold some."""
    if folder is None:
        folder = DEFAULT_RUN
        if not (folder / ATTENTION).is_file():
            return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; `headwise demo --out {folder}` makes it")
    try:
        from headwise.demo.report import read_attention

        sample = read_attention(folder)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; pip install 'headwise[demo]' brings it") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from error
    if sample is None:
        raise UsageError(f"{folder} holds no attention to look at: there is no {ATTENTION} in it")
    return sample


def _write(folder: Path, sample: AttentionSample | None) -> None:
    from headwise.web.site import write_site

    console = _terminal.progress_console()
    begin = time.perf_counter()
    try:
        with console.status("recording …") as status:
            write_site(folder, sample, lambda what: status.update(f"recording: {what} …"))
    except OSError as error:
        raise UsageError(f"the site cannot be written to {folder}: {error}") from error
    except ValueError as error:
        raise UsageError(f"these attention maps cannot be computed: {error}") from error
    console.print(f"Recorded in {time.perf_counter() - begin:.1f} s, {_megabytes(folder)}.", style="dim")


def _megabytes(folder: Path) -> str:
    return f"{_bytes(folder) / 1e6:.1f} MB"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
