"""The losses over ranks that hold some of the classes each; `distributed_rank.main` runs them."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import headwise.distributed as hwd
from headwise import reference as oracle
from headwise import testing


class OnAll(torch.autograd.Function):
    """A weight that all ranks hold."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.double()
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


def make_loss(maker, *, rows, classes, hidden=None, bias=False, weights=False, **options):
    targets = maker.integers(0, classes, 2, rows)
    targets[:, 1::5] = -100
    targets[0, :1] = classes - 1
    found = {"targets": targets, **options}
    if hidden is None:
        found["logits"] = maker.normal(2, rows, classes, scale=4.0)
    else:
        found |= {"hidden": maker.normal(2, rows, hidden), "weight": maker.normal(classes, hidden)}
        found["bias"] = maker.normal(classes) if bias else None
        found["token_weights"] = maker.normal(2, rows, dtype=torch.float32).abs() if weights else None
    return found


def run_loss(group, rank, ranks, arguments, backend):
    arguments = dict(arguments)
    classes = arguments["logits"].shape[-1] if "logits" in arguments else arguments["weight"].shape[0]
    widths = [0 if r == 1 else 3 + r for r in range(ranks - 1)]  # one rank has no class
    widths.append(classes - sum(widths))
    # The gradient of the whole: each rank's lies in its own classes, the others are zero.
    for name, dim in (("logits", -1), ("weight", 0), ("bias", 0)):
        if arguments.get(name) is not None:
            arguments[name] = OnAll.apply(arguments[name], group).split(widths, dim)[rank]
    run = (
        hwd.vocabulary_parallel_linear_cross_entropy if "hidden" in arguments else hwd.vocabulary_parallel_cross_entropy
    )
    return named_loss(run(**arguments, group=group), arguments)


def named_loss(found, arguments):
    names = ["loss", *(name for name in ("logprobs", "entropy") if arguments.get(f"return_{name}"))]
    return dict(zip(names, found if len(names) > 1 else [found], strict=True))


def reference_loss(arguments):
    if "hidden" in arguments:
        return named_loss(oracle.linear_cross_entropy(**arguments), arguments)
    others = {name: x for name, x in arguments.items() if name != "logits"}
    if "return_logprobs" not in arguments:
        return {"loss": oracle.cross_entropy(arguments["logits"], **others)}
    same = torch.eye(arguments["logits"].shape[-1], dtype=arguments["logits"].dtype)
    return named_loss(oracle.linear_cross_entropy(arguments["logits"], same, **others), arguments)


LOSSES = {
    "mean": {"reduction": "mean"},
    "sum, softcap": {"reduction": "sum", "softcap": 3.0},
    "none, smoothing, z-loss": {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-2},
    "linear, mean": {"hidden": 24, "reduction": "mean"},
    "linear, everything": {
        "hidden": 24, "reduction": "mean", "bias": True, "weights": True, "label_smoothing": 0.1, "z_loss": 1e-2,
        "softcap": 5.0,
    },
    "linear, none": {"hidden": 24, "reduction": "none", "weights": True},
    "log-probabilities, entropies": {
        "reduction": "sum", "softcap": 3.0, "return_logprobs": True, "return_entropy": True, "label_smoothing": 0.1,
    },
    "linear, log-probabilities": {"hidden": 24, "return_logprobs": True, "z_loss": 1e-2},
    "linear, entropies": {
        "hidden": 24, "reduction": "none", "return_logprobs": False, "return_entropy": True, "bias": True, "softcap": 5.0,
    },
    "linear, all three": {"hidden": 24, "return_logprobs": True, "return_entropy": True, "weights": True},
}  # fmt: skip


def check_loss(group, rank, ranks):
    for name, params in LOSSES.items():
        case = testing.Case(name, {"rows": 37, "classes": 101, **params})
        suite = testing.Suite(
            "vocabulary_parallel_cross_entropy", (case,), make_loss, partial(run_loss, group, rank, ranks),
            reference_loss, differentiable=("logits", "hidden", "weight", "bias", "token_weights"),
        )  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            for error in testing.measure(suite, case, dtype=dtype):
                assert error.ok, f"loss, {name}, {dtype}: {error}"
    hidden, weight = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(8)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = hwd.vocabulary_parallel_linear_cross_entropy(hidden, weight, torch.arange(7), group)
    low = (x.to(torch.bfloat16) for x in (hidden, weight))  # of which the products and the loss are float32
    assert torch.equal(found, hwd.vocabulary_parallel_linear_cross_entropy(*low, torch.arange(7), group))
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    loss = hwd.vocabulary_parallel_cross_entropy(logits, torch.tensor([-100, 5 * ranks, 2]), group, reduction="none")
    loss.sum().backward()
    assert loss[0] == 0
    assert loss.isnan().tolist() == [False, True, False]
    assert torch.equal(logits.grad.isnan().all(1), loss.isnan())
    assert (logits.grad[0] == 0).all()
    check_impossible_classes(group, rank, ranks)
    check_weights_of_nothing(group)


def check_weights_of_nothing(group):
    """Token weights that add up to nothing, tokens that are ignored, and no tokens: no loss and no gradient."""
    hidden, weight = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(9)).requires_grad_()
    for targets, weights in ((torch.full((4,), -100), torch.ones(4)), (torch.arange(4), torch.zeros(4))):
        weights.requires_grad_()
        loss = hwd.vocabulary_parallel_linear_cross_entropy(
            hidden, weight, targets, group, token_weights=weights, backend="cpu"
        )
        assert loss == 0
        assert all((x == 0).all() for x in torch.autograd.grad(loss, (hidden, weight, weights)))
    nothing = torch.zeros(0).long()
    for loss, leaf in (
        (hwd.vocabulary_parallel_cross_entropy(hidden[:0], nothing, group, label_smoothing=0.1), hidden),
        (hwd.vocabulary_parallel_linear_cross_entropy(hidden[:0], weight, nothing, group), weight),
    ):
        assert loss == 0
        assert (torch.autograd.grad(loss, leaf)[0] == 0).all()


def check_impossible_classes(group, rank, ranks):
    """Logits of -inf: on the last rank all of them. What they would multiply is never seen."""
    logits = torch.tensor([[0.5, -torch.inf, 2.0]] * 2) if rank < ranks - 1 else torch.full((2, 3), -torch.inf)
    logits.requires_grad_()
    run = partial(hwd.vocabulary_parallel_cross_entropy, logits, torch.tensor([2, -100]), group)
    loss, logprobs, entropy = run(return_logprobs=True, return_entropy=True)
    (loss + logprobs[0] + entropy[0]).backward()
    p = torch.tensor([0.5, 2.0]).repeat(max(ranks - 1, 1)).softmax(0)
    assert torch.allclose(entropy, torch.stack([-(p * p.log()).sum(), torch.zeros(())]))
    assert torch.allclose(-loss, logprobs[0])
    assert torch.allclose(logprobs, torch.stack([p[1].log(), torch.zeros(())]))
    assert not logits.grad.isnan().any()
    assert (logits.grad[:, 1] == 0).all()
    here = logits.grad[0, ::2] if rank < ranks - 1 else torch.zeros(2)
    there = -(p * (p.log() + entropy[0].detach()))[:2] if rank < ranks - 1 else torch.zeros(2)
    assert torch.allclose(here, there, atol=1e-6)  # loss and log-probability cancel: the entropy's is left
