"""Models over ranks, in each of PyTorch's ways: ``python distributed_models.py RANK RANKS FILE [name of a check …]``.

The truth is the same model in one process in float64; what is allowed is twice the error of one process in the dtype of the
test, as everywhere.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import transformers_models
from distributed_rank import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import headwise as hw
import headwise.distributed as hwd
import headwise.integrations.transformers as headwise_transformers
from headwise import testing
from headwise.nn import Packing, TransformerConfig, TransformerLM

LENGTH = 53
DOCUMENTS = [5, 1, 30, 11, 6]
# gpt_oss alone does not look for documents in its position_ids.
LLAMA = transformers_models.BY_NAME["llama"]
TRANSFORMERS = {"llama": ("left", "packed"), "gemma2": ("plain", "packed"), "gpt_oss": ("right",), "mistral": ("plain",),
                "qwen3": ("plain",)}  # fmt: skip


def config(**changes):
    return TransformerConfig(
        vocabulary=61, dim=32, layers=2, heads=4, key_heads=2, hidden=64, windows=(7, None), qk_norm=True,
        sink=True, positions=128, **changes,
    )  # fmt: skip


def make_model(dtype=torch.float32):
    model = TransformerLM(config())
    model.reset_parameters(torch.Generator().manual_seed(3))
    return model.to(dtype)


def inputs(packed):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(61, (LENGTH,) if packed else (2, LENGTH), generator=generator)
    targets = ids.roll(-1, -1)
    targets[..., ::7] = -100
    return (ids, targets), {"packing": Packing.of(DOCUMENTS)} if packed else {}


def of_one_process(packed, dtype):
    model = make_model(dtype)
    args, kwargs = inputs(packed)
    loss = model(*args, **kwargs)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def within_budget(found, packed, what):
    truth, plain = of_one_process(packed, torch.float64), of_one_process(packed, torch.float32)
    assert found.keys() == truth.keys()
    for name, x in found.items():
        error = testing.compare(name, x, truth[name], plain[name])
        assert error.ok, f"{what}: {error}"


def results(model, loss):
    """The loss and the gradients by their names in the plain model."""
    grads = {}
    for name, p in model.named_parameters():
        plain = name.removeprefix("module.").replace("_orig_mod.", "")
        grads[plain] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return {"loss": loss.detach(), **grads}


def check_model(group):
    for packed in (False, True):
        args, kwargs = inputs(packed)
        for method in ("ring", "ulysses"):
            model = make_model()
            shared = hwd.context_parallel(model, group, method=method)
            loss = model(*args, **kwargs)
            loss.backward()
            hwd.sum_gradients(model, group)
            within_budget(results(model, loss), packed, f"{method}, packed {packed}")
        rows = model(args[0], **kwargs).detach()
        whole = hwd.unshard(rows, group, dim=-2)
        shared.remove()
        error = testing.compare("logits", whole, make_model(torch.float64)(args[0], **kwargs), model(args[0], **kwargs))
        assert error.ok, error


def check_data_parallel(group):
    """DDP and FSDP2 over the same ranks: both average the gradients."""
    args, kwargs = inputs(True)
    model = make_model()
    hwd.context_parallel(model, group, averaged=True)
    wrapped = DistributedDataParallel(model)
    loss = wrapped(*args, **kwargs)
    loss.backward()
    within_budget(results(wrapped, loss), True, "DDP")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    model = make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hwd.context_parallel(model, mesh, averaged=True)
    loss = model(*args, **kwargs)
    loss.backward()
    within_budget(results(model, loss), True, "FSDP2")


def refused(words, call, kind=NotImplementedError):
    with pytest.raises(kind, match=words):
        call()


def check_refused_models(group, ranks):
    """What would be wrong in silence across ranks."""
    share, build = headwise_transformers.context_parallel, transformers_models.build
    headwise_transformers.register()
    ids = transformers_models.tokens(length=LENGTH)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refused("dynamic", lambda: share(build(LLAMA, "headwise", rope_scaling=dynamic), group))
    refused("deepseek_v3", lambda: share(build(transformers_models.BY_NAME["deepseek_v3"], "headwise"), group))
    model = build(LLAMA, "headwise")
    share(model, group)
    refused("logits_to_keep", lambda: model(input_ids=ids, logits_to_keep=1))
    few = transformers_models.tokens(length=ranks - 1)
    refused(f"{ranks - 1} tokens on {ranks} ranks", lambda: model(input_ids=few, labels=few), ValueError)
    embedded = model.get_input_embeddings()(few)
    refused(f"{ranks - 1} tokens on {ranks} ranks", lambda: model(inputs_embeds=embedded), ValueError)
    model(input_ids=transformers_models.tokens(length=2 * ranks))
    routed = build(transformers_models.BY_NAME["gpt_oss"], "headwise", output_router_logits=True)
    share(routed, group)
    refused("output_router_logits", lambda: routed(input_ids=ids, labels=ids))
    model = make_model()
    model.loss.reduction = "sum"
    hwd.context_parallel(model, group)
    refused("reduction", lambda: model(*inputs(False)[0]))


def check_batches(group, rank, ranks):
    """Batches, calls and models that differ between ranks: refused on all of them, with nothing left under way."""
    last = rank == ranks - 1
    ids, targets = inputs(False)[0]
    model = make_model()
    hwd.context_parallel(model, group)
    mine = ids.roll(1) if last else ids
    refused("fingerprint of ids", lambda: model(mine, targets), ValueError)
    refused(
        "fingerprint of targets is None on rank 0", lambda: model(*((ids, targets) if last else (ids,))), ValueError
    )
    refused("fingerprint of ids", lambda: model(ids[:, : LENGTH - last], targets[:, : LENGTH - last]), ValueError)
    refused(
        "lengths",
        lambda: model(ids, lengths=targets) if last else model(ids),
        NotImplementedError if last else ValueError,
    )
    other = torch.nn.Linear(3, 4, bias=not last)
    refused("shape and dtype of bias", lambda: hwd.sum_gradients(other, group), ValueError)
    headwise_transformers.register()
    shared = transformers_models.build(LLAMA, "headwise")
    headwise_transformers.context_parallel(shared, group)
    ids = transformers_models.tokens(length=LENGTH)
    mine = ids.roll(1) if last else ids
    refused("fingerprint of input_ids", lambda: shared(input_ids=mine), ValueError)
    model(*inputs(False)[0]).backward()
    hwd.sum_gradients(model, group)


def check_two_forwards(group):
    """Layers that are computed again in the backward get the mask of their own forward."""
    headwise_transformers.register()
    ids, found = transformers_models.tokens(length=LENGTH), []
    for again in (False, True):
        model = transformers_models.build(LLAMA, "headwise").train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        headwise_transformers.context_parallel(model, group)
        loss = 0
        for side in ("left", "right"):
            mask = transformers_models.padding(side, length=LENGTH)
            loss = loss + model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_checkpointing(group):
    """Blocks computed again in the backward: the same bits."""
    args, kwargs = inputs(False)
    found = []
    for again in (False, True):
        model = make_model()
        hwd.context_parallel(model, group)
        if again:
            for block in model.blocks:
                forward = block.forward
                block.forward = lambda *x, forward=forward, **how: checkpoint(forward, *x, use_reentrant=False, **how)
        loss = model(*args, **kwargs)
        loss.backward()
        hwd.sum_gradients(model, group)
        found.append(results(model, loss))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def check_compiled(group):
    """torch.compile stops its graph at the calls that ranks talk about, and goes on after them."""
    args, kwargs = inputs(True)
    model = make_model()
    hwd.context_parallel(model, group)
    model.blocks[1].compile(backend="aot_eager")
    loss = model(*args, **kwargs)
    loss.backward()
    hwd.sum_gradients(model, group)
    within_budget(results(model, loss), True, "compiled")
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0


def check_dtensor(group, ranks):
    """Of a length that the ranks do not divide; the shards of a DTensor are those of torch.chunk."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    generator = torch.Generator().manual_seed(5)
    for length in (4 * ranks + 1, 8 * ranks):
        whole = [torch.randn(2, h, length, 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
        q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole)
        sinks = torch.randn(4, generator=generator)
        sink = distribute_tensor(sinks.clone(), mesh, [Replicate()]).requires_grad_()
        sinks.requires_grad_()
        for method in ("ring", "gather", "ulysses"):
            out = hwd.context_parallel_attention(q, k, v, mesh, sink=sink, method=method)
            (ours,) = torch.autograd.grad(out.full_tensor().square().sum(), sink)
            versions = []
            for dtype in (torch.float64, torch.float32):
                plain = hw.attention(*(x.to(dtype) for x in whole), sink=sinks.to(dtype))
                versions += torch.autograd.grad(plain.square().sum(), sinks)
            error = testing.compare("sink", ours.full_tensor(), *versions)
            assert error.ok, f"{method}: {error}"
            out, lse = hwd.context_parallel_attention(
                q, k, v, mesh, causal=True, window=(9, 0), method=method, return_lse=True
            )
            assert isinstance(out, DTensor)
            assert tuple(out.placements) == (Shard(2),)
            truth = hw.attention(*(x.double() for x in whole), causal=True, window=(9, 0), return_lse=True)
            plain = hw.attention(*whole, causal=True, window=(9, 0), return_lse=True)
            grads = [x.full_tensor() for x in torch.autograd.grad(out.full_tensor().square().sum(), (q, k, v))]
            expected, near = (torch.autograd.grad(x[0].square().sum(), whole) for x in (truth, plain))
            versions = ((out.full_tensor(), lse.full_tensor(), *grads), (*truth, *expected), (*plain, *near))
            for number, (ours, exact, other) in enumerate(zip(*versions, strict=True)):
                error = testing.compare(str(number), ours, exact, other)
                assert error.ok, f"{method}, {length}: {error}"


def check_transformers(group):
    """Padding on either side, packed documents and labels; sliding windows, soft caps, sinks."""
    headwise_transformers.register()
    for model in (transformers_models.BY_NAME[name] for name in TRANSFORMERS):
        ids = transformers_models.tokens(length=LENGTH)
        positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        calls = {
            "plain": {"input_ids": ids},
            "left": {"input_ids": ids, "attention_mask": transformers_models.padding("left", length=LENGTH)},
            "right": {"input_ids": ids, "attention_mask": transformers_models.padding("right", length=LENGTH)},
            "packed": {"input_ids": ids[:1], "position_ids": positions},
        }  # fmt: skip
        for name in TRANSFORMERS[model.name]:
            call = calls[name]
            labels = call["input_ids"].clone()
            if "attention_mask" in call:
                labels[~call["attention_mask"].bool()] = -100
            found = []
            for dtype, shared in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
                built = transformers_models.build(model, "headwise").to(dtype).train(False)
                if shared:
                    handle = headwise_transformers.context_parallel(built, group)
                throughout = transformers_models.Float64Throughout() if dtype == torch.float64 else nullcontext()
                with throughout:
                    loss = built(**call, labels=labels, use_cache=False).loss
                    loss.backward()
                if shared:
                    hwd.sum_gradients(built, group)
                    handle.remove()
                found.append({"loss": loss.detach(), **{n: p.grad for n, p in built.named_parameters()}})
            for tensor, ours in found[2].items():
                if found[0][tensor] is None:  # a weight that this call has no use for
                    continue
                error = testing.compare(tensor, ours, found[0][tensor], found[1][tensor])
                assert error.ok, f"{model.name}, {name}: {error}"


CHECKS = (
    check_refused_models,
    check_batches,
    check_two_forwards,
    check_transformers,
    check_model,
    check_data_parallel,
    check_checkpointing,
    check_compiled,
    check_dtensor,
)

if __name__ == "__main__":
    # Of PyTorch's own code, when it is imported or first used.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    main(CHECKS)
