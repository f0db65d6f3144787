"""Ranks that are lost in the middle of a call: ``python distributed_faults.py FOLDER some|all``.

Each scenario is a group of three forked processes. In the phase that it names, one of them raises, is killed, or hangs; the
others have to raise `RankLostError` before the group's timeout and a little more, and what they computed before has to be
right. All scenarios run at the same time, since most of it is waiting.

In some a rank hangs and wakes up when the others have given up, and all of them try again; or it talks to another group.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import headwise as hw
import headwise.distributed as hwd
from headwise.distributed import costs, groups, models

RANKS, LOST = 3, 1
TIMEOUT = 8.0  # of the group, in seconds
GRACE = 12.0  # two cores and dozens of processes
WAYS = ("raises", "killed", "hangs")
# What runs, and the phase in which the rank is lost.
PHASES = (
    ("ring", "comparing arguments"),
    ("ring", "step 2 of 3 of the ring, forward"),
    ("ring", "step 1 of 3 of the ring, backward"),
    ("ring", "step 2 of 3 of the ring of gradients"),
    ("ring", "comparing calls, backward"),
    ("direct", "step 2 of 3 of direct sends, forward"),
    ("direct", "step 2 of 3 of direct sends of gradients"),
    ("gather", "the gather of keys"),
    ("gather", "the sum of the gradients"),
    ("ulysses", "the exchange of sequence"),
    ("ulysses", "the exchange of heads"),
    ("decode", "merging parts"),
    ("decode in two exchanges", "scattering parts"),
    ("decode in two exchanges", "gathering merged parts"),
    ("loss", "the sum of the gradient of hidden"),
    ("ring", "connecting"),
    ("direct", "step 2 of 3 of direct sends, backward"),
    ("bias", "joining shards"),
    ("bias", "the sum of the gradient of the bias"),
    ("weights", "the sum of the gradients of the weights"),
    ("whole loss", "the sum of the loss"),
    ("logits", "merging parts"),
)
SPECIAL = (
    *(
        ((what, phase), "wakes")
        for what, phase in PHASES
        if phase in ("comparing arguments", "the exchange of sequence")
    ),
    (("ring", "step 2 of 3 of the ring, forward"), "wakes"),
    (("ring", "comparing arguments"), "elsewhere"),
)
SCENARIOS = {
    "some": (*((phase, WAYS[number % 3]) for number, phase in enumerate(PHASES)), *SPECIAL),
    "all": (*itertools.product(PHASES, WAYS), *SPECIAL),
}


def tells(way):
    """The ranks that say how it ended."""
    return range(RANKS) if way in ("wakes", "elsewhere") else [rank for rank in range(RANKS) if rank != LOST]


class Mistake(Exception):
    """Of the rank itself."""


def lose_a_rank(phase, way):
    """The process ends, or stands still, when it comes to this phase."""
    real = groups.answered

    @contextmanager
    def answered(peers, name):
        if name.startswith(phase):
            groups.answered = real  # once
            if way == "raises":
                raise Mistake
            os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        with real(peers, name):
            yield

    groups.answered = answered


def work(what, group):
    """One call with its gradients; whether the results are those of one process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 24, 8, generator=generator)
    if what.startswith("decode"):
        way = "scatter" if what == "decode in two exchanges" else "gather"
        costs.way_of_decode = lambda *_: way
        lengths = torch.tensor([24])
        own = x[:, :, 8 * dist.get_rank() :][:, :, :8]
        found = hwd.context_parallel_decode(x[:, :, 0], own, own, lengths, group)
        return torch.allclose(found, hw.attention_decode(x[:, :, 0], x, x, lengths), atol=1e-5)
    if what == "loss":
        hidden, weight, targets = x[0, 0].clone().requires_grad_(), x[0, 1], torch.arange(24)
        own = weight[8 * dist.get_rank() :][:8]
        loss = hwd.vocabulary_parallel_linear_cross_entropy(hidden, own, targets, group)
        loss.backward()
        return torch.allclose(loss, hw.linear_cross_entropy(hidden, weight, targets), atol=1e-5)
    if what == "logits":
        own = x[0, 1][:, : 8 - dist.get_rank()]
        loss = hwd.vocabulary_parallel_cross_entropy(own, torch.arange(24) % 8, group)
        whole = torch.cat([x[0, 1][:, : 8 - rank] for rank in range(RANKS)], 1)
        return torch.allclose(loss, hw.cross_entropy(whole, torch.arange(24) % 8), atol=1e-5)
    if what == "weights":
        layer = torch.nn.Linear(2, 3)
        layer(torch.full((2,), 1.0 + dist.get_rank())).sum().backward()
        hwd.sum_gradients(layer, group)
        return torch.equal(layer.weight.grad, torch.full((3, 2), 6.0))
    if what == "whole loss":
        sharding = models.Sharding(group, "ring", "zigzag", False)
        return float(sharding.whole_loss(torch.tensor(1.0 + dist.get_rank()))) == 6.0
    if what == "ring":
        groups._connected.clear()  # as in a group that was not used before
    leaf = x.clone().requires_grad_()
    own = hwd.shard(leaf, group, dim=2)
    method, flags = {"direct": ("ring", {"window": (2, 0)}), "bias": ("ulysses", {})}.get(
        what, (what, {"causal": True})
    )
    if what == "bias":
        bias = torch.randn(24, 24, generator=generator).requires_grad_()
        mine = hwd.shard(bias, group, dim=0)
        out = hwd.context_parallel_attention(own, own, own, group, method=method, bias=mine)
        flags["bias"] = bias
    else:
        out = hwd.context_parallel_attention(own, own, own, group, method=method, **flags)
    out.sum().backward()
    return torch.allclose(out, hwd.shard(hw.attention(x, x, x, **flags), group, dim=2), atol=1e-5)


def rank_of(scenario, rank, folder):
    (what, phase), way = scenario
    name = f"{what}-{phase}-{way}".replace(" ", "_")
    result = {"rank": rank, "what": what, "phase": phase, "way": way, "error": "", "again": "", "right": []}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    other = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=TIMEOUT)) if way == "elsewhere" else None
    begun, group, sleeper = time.monotonic(), dist.group.WORLD, folder / f"{name}.pid"
    try:
        for turn in range(3):
            if turn == 1 and rank == LOST and way == "elsewhere":
                group = other
            elif turn == 1 and rank == LOST:
                sleeper.write_text(str(os.getpid()))
                lose_a_rank(phase, way)
            begun = time.monotonic()
            result["right"].append(work(what, group))
    except Mistake:
        os._exit(3)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = time.monotonic() - begun
    if way == "wakes":  # the first that has given up wakes it; nobody may take what it sends now for an answer
        os.kill(int(sleeper.read_text()), signal.SIGCONT)
        try:
            result["again"] = f"a result, right: {work(what, group)}"
        except Exception as error:
            result["again"] = type(error).__name__
    (folder / f"{name}-{rank}.json").write_text(json.dumps(result))


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    x = torch.zeros(1, 1, 1, 1)
    hw.attention(x, x, x)  # what is imported late is imported once, before the processes part
    children = {}
    telling = set()
    for scenario in SCENARIOS[sys.argv[2]]:
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    rank_of(scenario, rank, folder)
                finally:
                    os._exit(0)
            children[child] = rank
            if rank in tells(scenario[1]):
                telling.add(child)
    end = time.monotonic() + 2 * TIMEOUT + 3 * GRACE
    waiting = set(telling)
    while waiting and time.monotonic() < end:
        waiting = {child for child in waiting if os.waitpid(child, os.WNOHANG) == (0, 0)}
        time.sleep(0.1)
    for child in {*waiting, *(children.keys() - telling)}:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(f"{len(waiting)} processes had to be killed")


if __name__ == "__main__":
    main()
