"""Four ranks, two by two: ``python distributed_meshes.py RANK 4 FILE [name of a check …]``."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import torch
import torch.distributed as dist
from distributed_models import make_model, refused, results
from distributed_rank import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import headwise as hw
import headwise.distributed as hwd
from headwise import testing

LENGTH = 29


def two_by_two(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("data", "context"))


def batch():
    ids = torch.randint(61, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, -1)
    targets[:, ::7] = -100
    return ids, targets


def of_one_process(dtype):
    model = make_model(dtype)
    loss = model(*batch())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_data_parallel():
    """The recipes of docs/distributed.md: who averages over which ranks, and who sums."""
    mesh = two_by_two()
    context, data = mesh["context"], mesh["data"].get_local_rank()
    mine = [x[2 * data :][:2] for x in batch()]
    truth, plain = of_one_process(torch.float64), of_one_process(torch.float32)
    everything = mesh._flatten("everything")
    recipes = {
        "DDP over all ranks": (lambda model: DistributedDataParallel(model), True),
        "HSDP": (lambda model: sharded(model, mesh), True),
        "FSDP2 over all ranks": (lambda model: sharded(model, everything), True),
        "FSDP2 over data, summed over context": (lambda model: sharded(model, mesh["data"]), False),
    }
    for name, (wrap, averaged) in recipes.items():
        model = make_model()
        hwd.context_parallel(model, context, averaged=averaged)
        wrapped = wrap(model)
        wrapped(*mine).backward()
        if not averaged:
            hwd.sum_gradients(model, context)
        found = results(wrapped, torch.zeros(()))
        for tensor, exact in truth.items():
            error = testing.compare(tensor, found[tensor], exact, plain[tensor])
            assert error.ok, f"{name}: {error}"
    model = sharded(make_model(), mesh["context"])
    refused("embedding.weight has placements .*averaged=True", lambda: hwd.sum_gradients(model, context), ValueError)


def grads_of(x, leaves):
    return torch.autograd.grad(x.square().sum(), leaves)


def check_attention():
    """DTensors whose batch entries or heads are sharded over the other dimension, or replicated there."""
    generator = torch.Generator().manual_seed(2)
    for number, (other, shape) in enumerate(
        itertools.product((Shard(0), Shard(1), Replicate()), ((3, LENGTH), (2, 16)))
    ):
        batch, length = shape
        mesh = two_by_two("other", "context")
        bias_shape = ((batch, 4, length, length), (4, 1, length), (1, length))[number % 3]
        whole = {
            **{name: torch.randn(batch, h, length, 8, generator=generator) for name, h in (("q", 4), ("k", 2), ("v", 2))},
            "sink": torch.randn(4, generator=generator), "bias": torch.randn(bias_shape, generator=generator),
        }  # fmt: skip
        context = Shard(2 - 4 + len(bias_shape)) if bias_shape[-2] > 1 else Replicate()
        of_bias = {
            Shard(0): Shard(0) if len(bias_shape) == 4 else Replicate(),
            Shard(1): Shard(len(bias_shape) - 3) if len(bias_shape) > 2 else Replicate(),
            Replicate(): Replicate(),
        }[other]
        places = {
            **{name: [other, Shard(2)] for name in "qkv"}, "bias": [of_bias, context],
            "sink": [Shard(0) if other == Shard(1) else Replicate(), Replicate()],
        }  # fmt: skip
        versions = []
        for dtype in (torch.float64, torch.float32):
            leaves = {name: x.to(dtype).requires_grad_() for name, x in whole.items()}
            out, lse = hw.attention(**leaves, causal=True, return_lse=True)
            versions.append([out, lse, *grads_of(out, list(leaves.values()))])
        for method in ("ring", "gather", "ulysses"):
            leaves = {name: distribute_tensor(x, mesh, places[name]).requires_grad_() for name, x in whole.items()}
            out, lse = hwd.context_parallel_attention(
                **leaves, group=mesh["context"], causal=True, method=method, return_lse=True
            )
            assert out.placements == lse.placements == (other, Shard(2))
            found = [out, lse, *grads_of(out, list(leaves.values()))]
            for name, ours, truth, plain in zip(("out", "lse", *leaves), found, *versions, strict=True):
                error = testing.compare(name, ours.full_tensor(), truth, plain)
                assert error.ok, f"{method}, {other}, {shape}: {error}"
            own = Shard(0) if other == Shard(1) else Partial() if other == Shard(0) else Replicate()
            assert found[5].placements == (own, Partial())  # of the sink
    lengths = distribute_tensor(torch.tensor([9, 16]), mesh, [Replicate(), Replicate()])
    found = hwd.context_parallel_attention(
        *(leaves[name] for name in "qkv"), mesh["context"], kv_lengths=lengths
    ).full_tensor()  # fmt: skip
    plain = hw.attention(*(whole[name] for name in "qkv"), kv_lengths=torch.tensor([9, 16]))
    assert torch.allclose(found, plain, atol=1e-5)


def check_refusals(rank):
    mesh = two_by_two()
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))

    def attend(*placements, group=mesh["context"], k=None, heads=4, **others):
        q = distribute_tensor(x[:, :heads].contiguous(), mesh, placements)
        k = q if k is None else distribute_tensor(x, mesh, k)
        others = {name: distribute_tensor(y, mesh, places) for name, (y, places) in others.items()}
        return partial(hwd.context_parallel_attention, q, k, q, group, **others)

    apart = Shard(0), Shard(2)
    refused(r"2 dimensions.*'data', 'context'.*needs one", attend(*apart, group=mesh), ValueError)
    refused("group needs to be the dimension", attend(*apart, group=two_by_two()["data"]), ValueError)
    refused("group needs to be the dimension", attend(*apart, group=dist.group.WORLD), ValueError)
    refused(r"q is a DTensor.*Shard\(2\) on the dimension of group, 1", attend(Shard(2), Shard(0)), ValueError)
    refused(r"Shard\(0\), Shard\(1\) or Replicate", attend(Shard(2), Shard(2)), ValueError)
    refused("k is a DTensor with placements .*as q on", attend(*apart, k=(Replicate(), Shard(2))), ValueError)
    refused("3 heads, sharded over 2", attend(Shard(1), Shard(2), heads=3), ValueError)
    whole = attend(Replicate(), Shard(2))  # dropout counts batch entries and heads from the first of a rank
    refused("dropout is 0.5 and q has placements", partial(attend(*apart), dropout=0.5), NotImplementedError)
    plain = hw.attention(x, x, x, dropout=0.5, dropout_seed=3)
    assert torch.allclose(whole(dropout=0.5, dropout_seed=3).full_tensor(), plain, atol=1e-5)
    sink = torch.ones(4), (Replicate(), Replicate())
    refused(r"sink is a DTensor.*needs \(Shard\(dim=0\)", attend(Shard(1), Shard(2), sink=sink), ValueError)
    rows = torch.ones(8, 8), (Replicate(), Replicate())
    refused(r"mask is a DTensor.*Shard\(dim=0\)", attend(*apart, mask=(rows[0] > 0, rows[1])), ValueError)
    one = (Shard(0), Shard(0)) if rank == 1 else apart  # of four ranks one: both of its context are told
    if rank < 2:
        refused("Shard", attend_local(x, mesh, one), ValueError)
    else:
        attend_local(x, mesh, apart)()


def attend_local(x, mesh, placements):
    """Without a collective of the mesh before the call."""
    local = DTensor.from_local(x[:1, :, :4].contiguous(), mesh, placements, run_check=False)
    return lambda: hwd.context_parallel_attention(local, local, local, mesh["context"])


CHECKS = (check_attention, check_refusals, check_data_parallel)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    main(CHECKS)
