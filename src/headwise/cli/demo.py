"""``headwise demo``: train a small byte-level transformer with Headwise's ops, generate text with it, look at its attention.

It trains on Python's own documentation, then trains the first steps again on plain PyTorch ops, generates text with a
cache, checks that decoding computes what a forward pass does, and leaves a report in a folder: `headwise view` opens
it. Ctrl-C stops after the current step and still writes all of it; --resume goes on from there.

Exit code 1: something failed on the way (disk full, out of memory, decoding over its error budget), the last good
checkpoint is kept; 2: the command asks for something that is not here; 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text as Styled

import headwise
from headwise.backends.registry import BACKENDS, availability
from headwise.cli import _terminal, env
from headwise.config import settings
from headwise.demo import checkpoint as checkpoints
from headwise.demo import record, text
from headwise.demo.attention_sample import LENGTH, attention_sample, passage
from headwise.demo.generate import check_decoding, generate
from headwise.demo.model import Headwise, parameter_count
from headwise.demo.plain import Plain
from headwise.demo.ranks import NotLaunched, Ranks
from headwise.demo.text import Text, TextError
from headwise.demo.train import Diverged, Recipe, StopRequest, Training
from headwise.distributed import RankLostError

FAILED, INTERRUPTED = 1, 130
DEFAULT_FOLDER = Path(record.DEFAULT_FOLDER)

PLAIN_STEPS = 20  # enough to compare the losses and the speed
_CHECKED_POSITIONS = 160  # two and a half windows
LAST_STEPS = 20  # the last loss is the mean of these
_SECONDS_BETWEEN_CHECKPOINTS = 30.0
_WIDTH_OF_A_CORE = 128
_WIDEST = 1 << 30  # above, PyTorch's sizes in bytes overflow
_WEBGPU = "webgpu"
_NEEDED = {"safetensors": "checkpoints", "matplotlib": "pictures", "numpy": "pictures"}


class Failed(Exception):
    """The command failed while it ran. The message is one line; exit code 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Recipe()
    parser.add_argument(
        "--backend", help="backend whose kernels run (default: triton where there is a GPU for it, else cpu)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda", _WEBGPU),
        help="where the model is (default: where the kernels are); webgpu: everything stays on that GPU",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help=f"of training (default: {default.steps})")
    parser.add_argument("--layers", type=int, help=f"of the model (default: {default.shape.layers})")
    parser.add_argument("--width", type=int, help=f"of the model (default: {default.shape.width})")
    parser.add_argument("--seed", type=int, help="random seed for weights, data order and sampling (default: 0)")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="train on these files instead")
    parser.add_argument("--prompt", help="text to continue (default: how the first document begins)")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR",
        help=f"where the report and the checkpoint go (default: {DEFAULT_FOLDER})",
    )  # fmt: skip
    parser.add_argument(
        "--context-parallel", type=int, metavar="N",
        help="share every batch between N processes on CPUs, which torchrun has started",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR, with its options")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    try:
        ranks = Ranks(args.context_parallel)
    except NotLaunched as error:
        raise _terminal.UsageError(str(error)) from error
    try:
        return _run(args, ranks)
    except (Failed, Diverged, checkpoints.CheckpointError, RankLostError) as error:
        print(f"headwise demo: {error}", file=sys.stderr)
        return FAILED
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        print(
            "headwise demo: out of memory; a checkpoint that was saved is kept. "
            "A smaller --width or fewer --layers need less",
            file=sys.stderr,
        )
        return FAILED
    finally:
        ranks.close()


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    for package, purpose in _NEEDED.items():
        if importlib.util.find_spec(package) is None:
            raise _terminal.UsageError(f"its {purpose} need the package {package}: pip install 'headwise[demo]'")
    backend = "cpu" if ranks.group is not None and args.backend is None else _backend(args.backend, args.device)
    device = _device(args.device, backend)
    if ranks.group is not None and backend != "cpu":
        raise _terminal.UsageError(f"--context-parallel runs on CPUs, and --backend is {backend}")
    corpus = _corpus(args.text)
    kept = checkpoints.read(args.out / record.CHECKPOINT) if args.resume else None
    recipe = _recipe(args, kept, corpus)
    prompt = _prompt(args.prompt, corpus, recipe)
    _make_folder(args.out)
    leads = ranks.leads
    teller, stop = _Teller(quiet=args.json or not leads), StopRequest()
    if kept is None and leads:
        teller.setting_aside(checkpoints.set_aside(args.out / record.CHECKPOINT))

    with _threads(recipe), stop.listening(teller.stopping):
        training = Training(recipe, corpus, Headwise(backend), device)
        if kept is not None:
            training.load(kept.weights, kept.optimizer_state, kept.losses)
            training.seconds, training.tokens_per_second = kept.seconds, kept.tokens_per_second
        device_name = _device_name(backend, device)
        teller.beginning(training, device_name, kept, backend)
        with ranks.sharing(training):
            name = training.computation.name
            _train(training, backend, args.out, stop, teller, ranks)
        if not leads:
            return INTERRUPTED if stop else 0
        plain = None if stop else _train_plain(recipe, corpus, device, stop, teller)
        with teller.waiting("reading the text that was held out"):
            held_out_loss = training.held_out_loss()
        with teller.waiting("checking that decoding computes what a forward pass does"):
            decode = check_decoding(training.model, passage(corpus, _CHECKED_POSITIONS))
        with teller.waiting("generating text"):
            spoken = generate(training.model, prompt, recipe.context - len(prompt), seed=recipe.seed)
        with teller.waiting("looking at its attention"):
            sample = attention_sample(training.model, recipe.shape, passage(corpus, LENGTH))
        result = record.Run(
            backend=backend,
            device=device_name,
            versions=_versions(),
            options=recipe.options(),
            parameters=parameter_count(training.model),
            text=str(corpus),
            seconds=training.seconds,
            interrupted=training.step < recipe.steps,
            curve=record.Curve(name, training.losses, training.tokens_per_second),
            plain=plain,
            prompt=prompt.decode(errors="replace"),
            generated=spoken.decode(errors="replace"),
            decode=decode,
            held_out_loss=held_out_loss,
        )
        with teller.waiting("writing the report"):
            files = _write(result, sample, args.out)
    if args.json:
        _terminal.print_json(_summary(result, args.out, files))
    else:
        teller.ending(result, args)
    if not decode.passed:
        return FAILED
    return INTERRUPTED if stop else 0


# ------------------------------------------------------------------------------------------------ what was asked for


def _backend(name: str | None, device: str | None = None) -> str:
    known = [row.name for row in BACKENDS]
    name = name or settings.backend or (_WEBGPU if device == _WEBGPU else None)
    if name is None:
        # WebGPU only if it is named: its adapter may be software.
        return "triton" if availability("triton") is None else "cpu"
    if name not in known:
        raise _terminal.UsageError(f"--backend {name} is not known; there are: {', '.join(known)}")
    reason = availability(name)
    if reason is not None:
        raise _terminal.UsageError(f"--backend {name} does not run here: {reason}")
    return name


def _device(asked: str | None, backend: str) -> str:
    able = next(row.devices for row in BACKENDS if row.name == backend)
    device = able[0] if asked is None else asked
    if device not in able:
        raise _terminal.UsageError(
            f"--device {device} is not for --backend {backend}, which runs on {' or '.join(able)}"
        )
    if device == _WEBGPU:
        from headwise.backends.webgpu.torch_device import REGISTERED

        if not REGISTERED:
            raise _terminal.UsageError(
                f"--device {device}: PyTorch has a GPU of its own here; HEADWISE_WEBGPU_DEVICE=1 uses WebGPU in its place"
            )
    return device


def _corpus(paths: list[Path] | None) -> Text:
    try:
        return text.python_topics() if paths is None else text.files(paths)
    except TextError as error:
        raise _terminal.UsageError(f"--text: {error}") from error


def _recipe(args: argparse.Namespace, kept: checkpoints.Checkpoint | None, corpus: Text) -> Recipe:
    """The defaults or the options of the checkpoint, overridden by the command line."""
    asked = {
        name: getattr(args, name) for name in ("steps", "layers", "width", "seed") if getattr(args, name) is not None
    }
    if asked.get("width", 0) > _WIDEST:
        raise _terminal.UsageError(f"--width is {asked['width']}; it needs to be at most {_WIDEST}")
    if asked.get("steps", 1) < 1:
        raise _terminal.UsageError(f"--steps is {asked['steps']}; it needs to be at least 1")
    if not 0 <= asked.get("seed", 0) < 1 << 63:
        raise _terminal.UsageError(f"--seed is {asked['seed']}; it needs to be from 0 to 2^63 - 1")
    base = Recipe() if kept is None else kept.recipe
    if kept is not None:
        different = checkpoints.differences(kept, asked, corpus.fingerprint())
        if different:
            path = args.out / record.CHECKPOINT
            raise _terminal.UsageError(f"--resume cannot go on from {path}: {'; '.join(different)}")
        if asked.get("steps", base.steps) < kept.step:
            raise _terminal.UsageError(f"--steps is {asked['steps']}, and the checkpoint already has {kept.step} steps")
    try:
        return Recipe.from_options({**base.options(), **asked})
    except ValueError as error:
        raise _terminal.UsageError(f"--{error}") from error


def _prompt(given: str | None, corpus: Text, recipe: Recipe) -> bytes:
    if given is None:
        line = next(d.training for d in corpus.documents if d.training).split(b"\n")[0]
        return line[:32] or b"\n"
    prompt = given.encode(errors="surrogateescape")
    if not 0 < len(prompt) < recipe.context:
        raise _terminal.UsageError(
            f"--prompt has {len(prompt)} bytes; it needs to have from 1 to {recipe.context - 1}, "
            f"since the model was trained on {recipe.context} at once"
        )
    return prompt


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # fails now, not after the training
            pass
    except OSError as error:
        raise _terminal.UsageError(f"--out {folder} cannot be written to: {error.strerror or error}") from error


def _device_name(backend: str, device: str) -> str:
    if backend == "triton" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    name = f"{env._cpu_model()} ({threads} {'thread' if threads == 1 else 'threads'})"
    if backend == "webgpu":
        from headwise.webgpu import capabilities

        gpu = capabilities().name
        return gpu if device == _WEBGPU else f"{gpu}; the rest of the model on {name}"
    return name


def _versions() -> dict[str, str]:
    return {"headwise": headwise.__version__, "torch": torch.__version__, "python": platform.python_version()}


# --------------------------------------------------------------------------------------------------------- what is done


@contextmanager
def _threads(recipe: Recipe) -> Iterator[None]:
    """Within the block PyTorch uses no more threads than help a model of this width.

    An operation of the default model takes a tenth of a millisecond. On an idle machine a second core makes it 1.4
    times as fast; on a busy one each operation waits for the slower core, and the run takes five times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, recipe.shape.width // _WIDTH_OF_A_CORE)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(training: Training, backend: str, folder: Path, stop: StopRequest, teller: _Teller, ranks: Ranks) -> None:
    path = folder / record.CHECKPOINT
    saved_step, saved_at = training.step, time.monotonic()

    def after_step(now: Training) -> bool:
        nonlocal saved_step, saved_at
        teller.step(now)
        if ranks.leads and time.monotonic() - saved_at > _SECONDS_BETWEEN_CHECKPOINTS:
            checkpoints.write(now, backend, path)
            saved_step, saved_at = now.step, time.monotonic()
        stop.wanted = ranks.any(stop.wanted)
        return bool(stop)

    with teller.training(training, training.recipe.steps):
        training.run(training.recipe.steps, after_step)
    if ranks.leads and training.step > saved_step:
        checkpoints.write(training, backend, path)


def _train_plain(recipe: Recipe, corpus: Text, device: str, stop: StopRequest, teller: _Teller) -> record.Curve:
    """The first steps of the same model, from the same weights, on plain PyTorch ops."""
    training = Training(recipe, corpus, Plain(), device)
    steps = min(PLAIN_STEPS, recipe.steps)

    def after_step(now: Training) -> bool:
        teller.step(now)
        return bool(stop)

    with teller.training(training, steps):
        training.run(steps, after_step)
    return record.Curve(training.computation.name, training.losses, training.tokens_per_second)


def _write(result: record.Run, sample: record.AttentionSample, folder: Path) -> list[Path]:
    from safetensors import SafetensorError

    from headwise.demo.report import write_pictures, write_report

    try:
        record.save_run(result, folder)
        record.save_attention(sample, folder)
        return [write_report(folder), *write_pictures(folder)]
    except (OSError, SafetensorError) as error:
        raise Failed(f"the report could not be written to {folder}: {error}") from error


def _out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in words for sign in ("allocate memory", "not enough memory", "out of memory", "has no room for")
    )


# ------------------------------------------------------------------------------------------------------ what is printed


class _Teller:
    """Prints results to standard output, and progress to standard error if that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.console = _terminal.console()
        self.errors = _terminal.progress_console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._live = self.errors.is_terminal and not quiet

    def beginning(self, training: Training, device: str, kept: checkpoints.Checkpoint | None, backend: str) -> None:
        if self.quiet:
            return
        recipe, shape = training.recipe, training.recipe.shape
        about = Table.grid(padding=(0, 3))
        about.add_row("text", Styled(_printable(str(training.text))))
        about.add_row(
            "model",
            f"{parameter_count(training.model):,} parameters · {shape.layers} layers, window {shape.window} and "
            f"global in turn · {shape.query_heads} query heads on {shape.key_heads} key heads",
        )
        about.add_row(
            "training",
            f"{recipe.steps:,} steps of {recipe.tokens:,} bytes: documents, packed, of at most {recipe.context}",
        )
        about.add_row("kernels", f"{backend} · {device}")
        name = _printable(training.text.name)
        self.console.print(Styled(f"A small transformer learns to write like {name}\n", "bold"))
        self.console.print(about)
        self.console.print()
        if kept is not None:
            self.console.print(_resumed(kept, recipe, backend))

    def stopping(self) -> None:
        if not self.quiet:
            self.errors.print("stopping after this step; the report is still written (Ctrl-C again: at once)")

    @contextmanager
    def training(self, training: Training, until: int) -> Iterator[None]:
        if not self._live or training.step >= until:
            yield
            return
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]} bytes/s"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.errors, transient=True) as self._progress:
            self._task = self._progress.add_task(
                training.computation.name, total=until, completed=training.step, loss="–", speed="–"
            )
            yield
        self._progress = self._task = None

    def step(self, training: Training) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                completed=training.step,
                loss=f"{training.losses[-1]:.3f}",
                speed=f"{training.tokens_per_second:,.0f}",
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if not self._live:
            yield
            return
        with self.errors.status(what):
            yield

    def setting_aside(self, path: Path | None) -> None:
        if path is not None:
            told = f"An earlier run's checkpoint is here: it is kept as {path.name}. To go on from one: --resume.\n"
            (self.errors if self.quiet else self.console).print(Styled(told))

    def ending(self, result: record.Run, args: argparse.Namespace) -> None:
        folder: Path = args.out
        self.console.print(_results(result))
        self.console.print(_footnote(result))
        if result.decode is not None:
            self.console.print(_verdict(result.decode))
        self.console.print("\n[bold]Generated text[/bold] [dim](the prompt in bold)[/dim]")
        spoken = Styled.assemble((_printable(result.prompt), "bold"), _printable(result.generated))
        for line in spoken.wrap(self.console, self.console.width - 2):
            line.rstrip()
            self.console.print(Styled("  ") + line)
        where = "" if folder == DEFAULT_FOLDER else f" {shlex.quote(str(folder))}"
        if result.interrupted:
            again = _to_go_on(args)
            done = f"\nStopped after step {len(result.curve.losses):,}. To go on: "
            self.console.print(Styled.assemble(done, (again, "bold")), soft_wrap=True)
        told = f"\nReport: {folder / record.REPORT}. To look at it: "
        self.console.print(Styled.assemble(told, (f"headwise view{where}", "bold")), soft_wrap=True)


def _to_go_on(args: argparse.Namespace) -> str:
    """The command that resumes, with the options that a checkpoint does not hold: text, backend, prompt."""
    words = ["headwise", "demo", "--resume"]
    if args.out != DEFAULT_FOLDER:
        words += ["--out", str(args.out)]
    for option in ("backend", "device", "prompt"):
        if getattr(args, option) is not None:
            words += [f"--{option}", getattr(args, option)]
    if args.text is not None:
        words += ["--text", *map(str, args.text)]
    return shlex.join(words)


def _resumed(kept: checkpoints.Checkpoint, recipe: Recipe, backend: str) -> str:
    told = f"Going on after step {kept.step:,}."
    if kept.step == recipe.steps:
        told = f"All {kept.step:,} steps are made already: what follows is made anew."
    if recipe.steps != kept.recipe.steps:
        told += (
            f" It was to end at step {kept.recipe.steps:,}, now at {recipe.steps:,}: the learning rate falls along another"
            " curve from here, so the losses are not those of a run made in one go."
        )
    if backend != kept.backend:
        told += f" It was trained with {kept.backend} so far: the last digits of the losses depend on that."
    return told + "\n"


def _results(result: record.Run) -> Table:
    curves = [curve for curve in (result.curve, result.plain) if curve is not None]
    common = min(len(curve.losses) for curve in curves)  # the last step that both made
    table = _terminal.table("", "first loss", f"loss at step {common:,}", "last loss", "bytes/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for curve in curves:
        table.add_row(
            Styled(curve.name, "bold"),
            f"{curve.losses[0]:.4f}",
            f"{curve.losses[common - 1]:.4f}",
            Styled(f"{last_loss(curve):.3f}", "bold green") if curve is result.curve else "",
            f"{curve.tokens_per_second:,.0f}",
        )
    return table


def _footnote(result: record.Run) -> str:
    steps = min(LAST_STEPS, len(result.curve.losses))
    held_out = "" if result.held_out_loss is None else f" On text that was held out: {result.held_out_loss:.3f}."
    return (
        f"Losses in nats per byte; a guess costs ln 256 = {math.log(256):.3f}. Last: the mean of {steps} steps.{held_out}"
        f" {result.seconds:.0f} s of training."
    )


def _verdict(decode: record.DecodeCheck) -> Styled:
    mark = Styled("✓ ", "bold green") if decode.passed else Styled("✗ ", "bold red")
    return mark.append(
        f"decoding with a cache gives the logits of a full forward pass: over {decode.positions} positions they differ by "
        f"at most {decode.largest_difference:.1e}, allowed are {decode.allowed:.1e}",
        "not bold default",
    )


def _printable(spoken: str) -> str:
    """Replaces control characters: a byte-level model may write any, and a terminal would act on them."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in spoken)


def last_loss(curve: record.Curve) -> float:
    """The mean of the last steps: one step alone says little."""
    losses = curve.losses[-LAST_STEPS:]
    return sum(losses) / len(losses)


def _summary(result: record.Run, folder: Path, files: list[Path]) -> dict[str, Any]:
    told = {name: value for name, value in asdict(result).items() if name not in ("curve", "plain")}
    for name, curve in (("headwise", result.curve), ("plain", result.plain)):
        told[name] = (
            None if curve is None else {**asdict(curve), "first_loss": curve.losses[0], "last_loss": last_loss(curve)}
        )
    if result.decode is not None:
        told["decode"]["passed"] = result.decode.passed
    return {"folder": str(folder), "files": [str(path) for path in files], **told}
