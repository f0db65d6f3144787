"""Every launcher of the Triton backend is recorded without a GPU, in both directions, as the cases of every op call it.

And every fake kernel, which says how results lie in memory, agrees with it and with the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_gpu import FakeGpu
from result_layouts import layouts
from torch import Tensor

import headwise as hw
from headwise import testing
from headwise.arguments import tensors_of
from headwise.backends.triton.attention_forward import attention_forward
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.recording import Recording
from headwise.cases import SUITES
from headwise.ops.attention._arguments import Attention, Flags
from headwise.testing import Case, Suite

CASES = [(suite, case) for suite in SUITES.values() for case in suite.cases if "quick" in case.tags]


def run(suite: Suite, case: Case, dtype: torch.dtype, device: str, backend: str | None) -> dict[str, Tensor]:
    """Outputs and gradients, by name."""
    maker = testing.maker_of(suite, case, dtype, device)
    arguments = suite.make(maker, **case.params)
    return testing._with_gradients(lambda x: suite.run(x, backend), arguments, suite.differentiable, maker, {})


each_case = pytest.mark.parametrize(("suite", "case"), [pytest.param(s, c, id=f"{s.op}-{c.name}") for s, c in CASES])


@each_case
def test_results_without_memory_are_laid_out_as_those_of_the_cpu(suite, case):
    found = run(suite, case, torch.bfloat16, "meta", None)
    assert {x.device.type for x in found.values()} == {"meta"}
    assert layouts(found) == layouts(run(suite, case, torch.bfloat16, "cpu", "cpu"))


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_90", torch.bfloat16),
        ("sm_80", torch.float32),
        ("sm_90", torch.float32),
        ("sm_100", torch.bfloat16),
        ("gfx942", torch.bfloat16),
    ],
    ids=str,
)
@each_case
def test_every_launcher_is_recorded_without_a_gpu(monkeypatch, arch, dtype, suite, case):
    """Nothing is computed: what is held against the truth is what a launcher allocates and returns."""
    expected = run(suite, case, dtype, "meta", None)
    gpu = FakeGpu(monkeypatch, arch)
    for _ in range(2):
        gpu.launches.clear()
        found = run(suite, case, dtype, "cpu", "triton")
        assert layouts(found) == layouts(expected)
        assert gpu.launches or any(x.numel() == 0 for x in found.values())


def computed_by(gpu: FakeGpu) -> list[tuple[str, str]]:
    """Kernels and what they are given beside addresses."""
    return [(name, repr([x for x in given if not isinstance(x, int) or x < 2**32])) for name, _, given in gpu.launches]


def float32_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    q, k, v = (torch.randn(1, 2, 70, 64) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([70])
    yield "forward", lambda: hw.attention(q, k, v, backend="triton")
    yield "backward", lambda: hw.attention(*leaves, backend="triton").sum().backward()
    yield "decode", lambda: hw.attention_decode(q[:, :, 0], k, v, lengths, backend="triton")
    yield "probs", lambda: hw.attention_probs(q, k, backend="triton")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["forward", "backward", "decode", "probs"])
def test_how_float32_is_multiplied_is_up_to_the_switch_of_pytorch(monkeypatch, arch, name):
    gpu, call = FakeGpu(monkeypatch, arch), dict(float32_calls())[name]
    computed, switch = {}, torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee", "tf32"):
            switch.fp32_precision = precision
            gpu.launches.clear()
            call()
            assert computed.setdefault(precision, computed_by(gpu)) == computed_by(gpu)
    finally:
        switch.fp32_precision = before
    assert computed["ieee"] != computed["tf32"]


@pytest.mark.parametrize(("arch", "refused"), [("sm_80", True), ("sm_90", False)])
def test_a_token_too_far_from_the_next_is_refused_by_the_plain_kernel_alone(arch, refused):
    far_apart = torch.empty_strided((1, 16, 2048, 64), (2**40, 64, 2**25, 1), dtype=torch.bfloat16, device="meta")
    flags = Flags(left=-1, right=0, scale=0.125, softcap=0.0, deterministic=True)
    args = Attention(*[far_apart] * 3, *[None] * 6, packing=None, flags=flags)
    recording = Recording(KNOWN[arch])
    if refused:
        with pytest.raises(ValueError, match="from token to token"):
            recording.run(attention_forward, args, [0] * len(tensors_of(args)))
    else:
        recording.run(attention_forward, args, [0] * len(tensors_of(args)))
        assert recording.steps
