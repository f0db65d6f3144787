"""torch.compile on ``device="webgpu"``: whole graphs, with the backends that run PyTorch's operators one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise as hw
import headwise.webgpu

DEVICE = "webgpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(nn.functional.gelu(self.first(hw.rms_norm(x, self.weight))))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_computes_what_it_does_uncompiled(backend):
    """fullgraph: a graph break is an error. The bits are the same, since the operators are."""
    torch.manual_seed(0)
    torch.compiler.reset()
    module, x = Block().to(DEVICE), torch.randn(5, 8, device=DEVICE)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    results = []
    for run in (module, compiled, compiled):
        module.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(p.grad.cpu() for p in module.parameters())])
    for expected, *found in zip(*results, strict=True):
        assert all(torch.equal(x, expected) for x in found)
    torch.compiler.reset()
