"""A captured step as a file: what is in it, and that Chromium runs it as Python does, on a GPU in software."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from browser import open_page
from test_web import NO_ZEROS
from webgpu_tint import compile_with_tint

from headwise import testing, webgpu
from headwise.demo.model import Shape, make_model
from headwise.nn import Packing
from headwise.web.server import address, server
from headwise.web.site import PAGE

DEVICE = "webgpu"


def header_of(path: Path) -> dict:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])


def run_in_chromium(path: Path, inputs: list[dict[str, torch.Tensor]], state: list[str]) -> tuple[list[dict], dict]:
    """The outputs of every run and the state after them. Numbers travel as text: whole ones of 64 bits do not fit JSON."""
    for module in ("program.js", "gpu.js", "step.js"):
        shutil.copyfile(PAGE / module, path.parent / module)
    (path.parent / "index.html").write_text('<!doctype html><title>a step</title><link rel="icon" href="data:," />')
    given = [
        {name: [x.dtype == torch.int64, [str(y) for y in x.reshape(-1).tolist()]] for name, x in one.items()}
        for one in inputs
    ]
    script = """async ([file, given, names]) => {
        const { open } = await import("./gpu.js");
        const { Step } = await import("./step.js");
        const step = await Step.load(await open(), await (await fetch(file)).arrayBuffer());
        const array = ([whole, x]) => (whole ? BigInt64Array.from(x, BigInt) : Float32Array.from(x, Number));
        const plain = (found) => Object.fromEntries(Object.entries(found).map(([name, x]) => [name, Array.from(x, Number)]));
        const runs = [];
        for (const one of given) {
            const inputs = Object.fromEntries(Object.entries(one).map(([name, x]) => [name, array(x)]));
            runs.push(plain(await step.run(inputs)));
        }
        let refused = "";
        await step.run({ unknown: new Float32Array(1) }).catch((error) => (refused = error.message));
        return [runs, plain(await step.state(names)), refused];
    }"""
    with server(path.parent, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            with open_page(address(serving), webgpu=True, flags=NO_ZEROS) as page:
                page.set_default_timeout(600_000)
                runs, found, refused = page.evaluate(script, [path.name, given, state])
                assert page.problems == []
        finally:
            serving.shutdown()
            thread.join()
    assert refused.startswith("the inputs of this step are")
    return runs, found


def test_a_step_with_everything_in_it_runs_in_chromium(tmp_path):
    """Weights that change, a draw, a constant that is changed, two inputs, whole numbers."""
    torch.manual_seed(0)
    with webgpu.portable():
        weight = torch.randn(8, 3, device=DEVICE, requires_grad=True)
        rows, rate = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.tensor(0.1, device=DEVICE)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            noise = torch.rand(5, 3, device=DEVICE) + torch.rand(5, 3, device=DEVICE)
            loss = (F.embedding(rows, weight) + noise).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(gradient * rate)
            count = torch.tensor(2.0, device=DEVICE)
            count += rows.sum()
            even = webgpu.array(torch.tensor(False))  # a byte; what is written is whole words
            even.logical_or_(rows.sum() % 2 == 0)
            return loss.detach(), count * torch.where(even, 1, -1)

        step()
        with webgpu.capture(rows, rate=rate) as captured:
            loss, count = step()
        captured(torch.tensor([1, 2, 3, 4, 5]), rate=torch.tensor(0.3))
        path = tmp_path / "some.step"
        webgpu.save_step(captured, path, outputs={"loss": loss, "count": count}, state={"weight": weight})
        inputs = [{"input 0": torch.randint(8, (5,)), "rate": torch.tensor(0.5 / (i + 1))} for i in range(3)]
        expected = []
        for one in inputs:
            captured(one["input 0"], rate=one["rate"])
            expected.append((loss.item(), count.item()))
        truth = weight.detach().cpu()
    runs, state = run_in_chromium(path, inputs, ["weight"])
    for run, (loss_here, count_here) in zip(runs, expected, strict=True):
        assert run["loss"][0] == pytest.approx(loss_here, rel=1e-5)
        assert run["count"] == [count_here]
    torch.testing.assert_close(torch.tensor(state["weight"]).view(8, 3), truth, rtol=1e-5, atol=1e-6)
    assert len({round(x, 3) for x, _ in expected}) == 3


def test_what_is_in_the_file(tmp_path):
    with webgpu.portable():
        x, total = torch.ones(4, device=DEVICE), torch.full((4,), 5.0, device=DEVICE)
        with webgpu.capture(x) as step:
            y = torch.exp(x) * total
            total += y
        webgpu.save_step(step, tmp_path / "a.step", outputs={"y": y}, state={"total": total})
        webgpu.save_step(step, tmp_path / "b.step", outputs={"y": y}, state={"total": total})
        assert (tmp_path / "a.step").read_bytes() == (tmp_path / "b.step").read_bytes()
        said = header_of(tmp_path / "a.step")
        program = said["program"]
        assert [place["name"] for place in program["inputs"] + program["outputs"] + program["state"]] == [
            "input 0", "y", "total",
        ]  # fmt: skip
        assert [len(program["dispatches"]), program["prepared"], program["draws"], program["restored"]] == [
            3,
            0,
            [],
            [],
        ]
        # What the step makes has no content; what it uses has.
        assert sum("data" in buffer for buffer in program["buffers"]) == 2
        for shader in said["shaders"].values():
            compile_with_tint(shader["text"], floor=True)

        with pytest.raises(TypeError, match="z of outputs is no tensor on the webgpu device of the step"):
            webgpu.save_step(step, tmp_path / "c.step", outputs={"z": torch.ones(3)})
        with pytest.raises(ValueError, match=r"t of state has strides .* contiguous"):
            webgpu.save_step(step, tmp_path / "c.step", outputs={}, state={"t": torch.ones(3, 2, device=DEVICE).T})
        with pytest.raises(ValueError, match="no kernel of the step has to do with z"):
            webgpu.save_step(step, tmp_path / "c.step", outputs={"z": torch.ones(3, device=DEVICE)})
        with (
            webgpu.capture(x) as unfinished,
            pytest.raises(webgpu.CaptureError, match="the capture is recording"),
        ):
            webgpu.save_step(unfinished, tmp_path / "c.step", outputs={"y": y})
        odd = torch.ones(3, dtype=torch.bool, device=DEVICE)
        with webgpu.capture(odd=odd) as step:
            z = odd + 1.0
        with pytest.raises(ValueError, match=r"odd of inputs is 3 bytes long .* whole words"):
            webgpu.save_step(step, tmp_path / "c.step", outputs={"z": z})
        own = torch.Generator().manual_seed(3)
        with webgpu.capture() as step:
            z = torch.empty(3, device=DEVICE).uniform_(generator=own)
        with pytest.raises(ValueError, match="draws from a generator of its own"):
            webgpu.save_step(step, tmp_path / "c.step", outputs={"z": z})


def test_a_step_for_one_gpu_is_not_written(tmp_path):
    x = torch.ones(4, device=DEVICE)
    with webgpu.capture(x) as step:
        y = x + 1
    with pytest.raises(ValueError, match=r"captured with kernels for .*portable\(\)"):
        webgpu.save_step(step, tmp_path / "a.step", outputs={"y": y})
    with webgpu.portable(), pytest.raises(webgpu.DeviceLost, match="portable"):
        (x + 1).tolist()


@pytest.mark.slow
def test_the_demos_model_trains_in_chromium(tmp_path):
    """Losses and weights of three steps, within the budget: twice the error of plain float32, and a rounding band."""
    shape, lengths = Shape(layers=2, width=64, window=16), (40, 9, 47)
    batches = [torch.randint(256, (2, sum(lengths))) for _ in range(4)]
    batches.append(batches[0])  # seen before: its loss is lower then

    def trained(device: str, dtype: torch.dtype):
        model = make_model(shape, "webgpu" if device == DEVICE else "cpu", seed=0).to(dtype).to(device)
        rate = torch.tensor(3e-3, device=device, dtype=dtype)
        capturable = device == DEVICE
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate if capturable else 3e-3, betas=(0.9, 0.95), eps=1e-5, capturable=capturable
        )  # eps: a step is g / (|g| + eps), and with less the rounding of a gradient near 0 decides the sign of a whole step
        packing = Packing.of(lengths, device)

        def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = model(ids, targets, packing=packing)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return model, step

    found: dict[str, tuple[list[float], dict[str, torch.Tensor]]] = {}
    for name, dtype in (("truth", torch.float64), ("plain", torch.float32)):
        model, step = trained("cpu", dtype)
        losses = [step(*batch).item() for batch in batches]
        found[name] = losses, {key: x.detach() for key, x in model.named_parameters()}
    path = tmp_path / "train.step"
    with webgpu.portable():
        model, step = trained(DEVICE, torch.float32)
        ids, targets = (x.to(DEVICE) for x in batches[0])
        losses = [step(ids, targets).item()]
        ids.copy_(batches[1][0])
        targets.copy_(batches[1][1])
        with webgpu.capture(ids=ids, targets=targets) as captured:
            loss = step(ids, targets)
        losses.append(loss.item())
        weights = dict(model.named_parameters())
        webgpu.save_step(captured, path, outputs={"loss": loss}, state=weights)
        for batch in batches[2:]:
            captured(*batch)
            losses.append(loss.item())
        found["python"] = losses, {key: x.detach().cpu() for key, x in weights.items()}
    runs, state = run_in_chromium(path, [{"ids": a, "targets": b} for a, b in batches[2:]], list(weights))
    in_chromium = losses[:2] + [run["loss"][0] for run in runs]
    found["chromium"] = in_chromium, {key: torch.tensor(state[key]).view(x.shape) for key, x in weights.items()}
    for name in ("python", "chromium"):
        for what, ours, true, plain in [
            ("losses", *(torch.tensor(found[k][0]) for k in (name, "truth", "plain"))),
            *((key, *(found[k][1][key] for k in (name, "truth", "plain"))) for key in weights),
        ]:
            result = testing.compare(f"{what}, {name}", ours.float(), true.double(), plain.float(), 1.0)
            assert result.ok, str(result)
    assert found["truth"][0][-1] < found["truth"][0][0]
