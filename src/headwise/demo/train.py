"""The training loop: AdamW, a learning rate with warm-up and cosine decay, clipped gradients.

A step depends only on the recipe, its number, and the weights and moments before it. So the same seed gives the same
losses bit for bit (on the same machine, with the same number of threads), and a resumed run gives the losses of a run
without interruption.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from headwise.demo.model import Computation, Shape, make_model
from headwise.demo.packing import IGNORED, Batches, whole_batches
from headwise.demo.text import Text

_WARMUP_STEPS = 20
_LAST_LEARNING_RATE = 0.05  # of the highest
_WEIGHT_DECAY = 0.1  # of matrices
_CLIP = 1.0
_HELD_OUT_BYTES = 32 * 1024  # evaluated at the end


class Diverged(Exception):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the losses of a run, besides the text."""

    steps: int = 300
    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    tokens: int = 1024  # of a step
    context: int = 512  # a longer document is cut
    learning_rate: float = 6e-3

    def options(self) -> dict[str, Any]:
        """As one flat dict of numbers; `from_options` is the inverse."""
        fields = asdict(self)
        return {**{name: value for name, value in fields.items() if name != "shape"}, **fields["shape"]}

    @staticmethod
    def from_options(options: dict[str, Any]) -> Recipe:
        shape = Shape(**{name: options[name] for name in Shape.__dataclass_fields__})
        own = {name: options[name] for name in Recipe.__dataclass_fields__ if name != "shape"}
        return Recipe(shape=shape, **own)

    def learning_rate_at(self, step: int) -> float:
        warmup = min(_WARMUP_STEPS, max(1, self.steps // 10))
        rise = min(1.0, (step + 1) / warmup)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return self.learning_rate * rise * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * fall)


class Training:
    """A model in training: its weights, its moments, and the losses so far."""

    def __init__(
        self, recipe: Recipe, text: Text, computation: Computation, device: torch.device | str = "cpu"
    ) -> None:
        self.recipe, self.text, self.device, self.computation = recipe, text, torch.device(device), computation
        self.model = make_model(recipe.shape, computation.backend, recipe.seed).to(self.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": _WEIGHT_DECAY},
                {"params": [p for p in self.model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type != "webgpu",
        )
        documents = [d.training for d in text.documents]
        self.batches = Batches(documents, recipe.tokens, recipe.context, recipe.seed, self.device)
        self.losses: list[float] = []
        self.seconds = 0.0  # of all steps, before an interruption too
        self.tokens_per_second = 0.0  # of the last `run`

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return len(self.losses)

    def run(self, until: int, after_step: Callable[[Training], bool] | None = None) -> None:
        """Train up to step ``until``, or until ``after_step`` returns True."""
        started = self.step
        before_second = 0.0
        while self.step < until:
            begun = time.perf_counter()
            loss = self._make_step()  # reading the loss waits for the device
            self.seconds += time.perf_counter() - begun
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} at step {self.step + 1}")
            self.losses.append(loss)
            # The first step loads libraries and compiles kernels: it counts only if it is the only one.
            if self.step == started + 1:
                before_second, steps, seconds = self.seconds, 1, time.perf_counter() - begun
            else:
                steps, seconds = self.step - started - 1, self.seconds - before_second
            self.tokens_per_second = steps * self.recipe.tokens / seconds
            if after_step is not None and after_step(self):
                return

    def _make_step(self) -> float:
        batch = self.batches.batch(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        loss = self.computation.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.computation.finish_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        return loss.item()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The moments, by the parameter's name."""
        state = self.optimizer.state
        return {name: dict(state[parameter]) for name, parameter in self.model.named_parameters()}

    def load(
        self, weights: dict[str, Tensor], optimizer_state: dict[str, dict[str, Tensor]], losses: list[float]
    ) -> None:
        """Continue from this state. Names and shapes must be those of this model (`checkpoint.read` checks that)."""
        self.model.load_state_dict(weights)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        packed = self.optimizer.state_dict()
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        packed["state"] = {i: optimizer_state[names[p]] for i, p in enumerate(ordered) if names[p] in optimizer_state}
        self.optimizer.load_state_dict(packed)
        self.losses = list(losses)

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Nats per byte on held-out text; None if no document is long enough to hold some out."""
        documents, left = [], _HELD_OUT_BYTES
        for document in self.text.documents:
            documents.append(document.held_out[:left])
            left -= len(documents[-1])
        total, count = 0.0, 0
        for batch in whole_batches([d for d in documents if d], self.recipe.tokens, self.recipe.context, self.device):
            loss = self.computation.loss(self.model, batch)
            targets = int((batch.targets != IGNORED).sum())
            total, count = total + loss.item() * targets, count + targets
        return total / count if count else None


class StopRequest:
    """Ctrl-C as a request that the loop checks between two steps. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.wanted = False

    def __bool__(self) -> bool:
        return self.wanted

    @contextmanager
    def listening(self, heard: Callable[[], None]) -> Iterator[StopRequest]:
        """Within the block the first Ctrl-C makes the request and calls ``heard``."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
            yield self
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self.wanted:
                raise KeyboardInterrupt
            self.wanted = True
            heard()

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
