"""quack as a peer: losses, softmax and norms, where the package quack-kernels is installed and has them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headwise.benchmark.case import Contender
from headwise.benchmark.suites.peers import tried
from headwise.testing import Arguments

QUACK = "quack"


def cross_entropy_peer() -> Contender:
    return Contender(QUACK, _cross_entropy)


def softmax_peer() -> Contender:
    return Contender(QUACK, _softmax)


def rms_norm_peer(eps: float) -> Contender:
    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        from quack.rmsnorm import rmsnorm  # type: ignore[import-not-found,unused-ignore]

        x, weight = arguments["x"], arguments["weight"]
        return tried(lambda: rmsnorm(x, weight, eps=eps), arguments)

    return Contender(QUACK, prepare)


def layer_norm_peer(eps: float) -> Contender:
    """Forward only; its weight and bias are float32, which are made before the clock starts."""

    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        from quack.rmsnorm import layernorm_fwd  # type: ignore[import-not-found,unused-ignore]

        x, weight, bias = arguments["x"], arguments["weight"].float(), arguments["bias"].float()
        return tried(lambda: layernorm_fwd(x, weight, bias, eps=eps), arguments)

    return Contender(QUACK, prepare)


def _cross_entropy(arguments: Arguments) -> Callable[[], Tensor]:
    from quack.cross_entropy import cross_entropy  # type: ignore[import-not-found,unused-ignore]

    logits, targets = arguments["logits"], arguments["targets"]
    # Releases differ in the default reduction. Not in place: the gradient would overwrite the logits of all contenders.
    return tried(lambda: cross_entropy(logits, targets, reduction="mean", inplace_backward=False), arguments)


def _softmax(arguments: Arguments) -> Callable[[], Tensor]:
    from quack.softmax import softmax  # type: ignore[import-not-found,unused-ignore]

    return tried(lambda: softmax(arguments["x"]), arguments)
