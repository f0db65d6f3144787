"""ONNX models of attention, norms, rotary embedding and cross-entropy: an `onnx.backend.base.Backend`.

    outputs = headwise.integrations.onnx.Backend.prepare(model).run(inputs)

It runs graphs that consist of the operators below and of nothing else; `is_compatible` says whether that is so.
``backend=`` of `prepare`, `run_model` and `run_node` names the backend of Headwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.backend.base
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import torch
from torch import Tensor

from headwise.integrations import _onnx_operators as operators

Inputs = Sequence[Tensor | None]
DEVICES = {"CPU": "cpu", "CUDA": "cuda"}


class Operator(NamedTuple):
    run: Callable[..., Sequence[Tensor | None]]  # (inputs, which outputs are wanted, backend, **attributes)
    versions: tuple[int, ...]  # opsets in which the operator got the meanings that are here
    attributes: frozenset[str]


OPERATORS = {
    "Attention": Operator(
        operators.attention_node, (23, 24, 25),
        frozenset((
            "is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode", "right_window_size",
            "scale", "softcap", "softmax_precision",
        )),
    ),
    "LayerNormalization": Operator(operators.layer_norm_node, (17,), frozenset(("axis", "epsilon", "stash_type"))),
    "RMSNormalization": Operator(operators.rms_norm_node, (23,), frozenset(("axis", "epsilon", "stash_type"))),
    "RotaryEmbedding": Operator(
        operators.rotary_node, (23,), frozenset(("interleaved", "num_heads", "rotary_embedding_dim"))
    ),
    "SoftmaxCrossEntropyLoss": Operator(
        operators.cross_entropy_node, (12, 13), frozenset(("ignore_index", "reduction"))
    ),
}  # fmt: skip


class Backend(onnx.backend.base.Backend):  # type: ignore[misc]
    """Prepares models for Headwise, and says which ones it cannot."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        return cls.supports_device(device) and _reason_against(model) is None

    @classmethod
    def supports_device(cls, device: str) -> bool:
        kind = device.split(":")[0]
        return kind == "CPU" or (kind == "CUDA" and torch.cuda.is_available())

    @classmethod
    def prepare(
        cls, model: onnx.ModelProto, device: str = "CPU", *, backend: str | None = None, **kwargs: Any
    ) -> Prepared:
        onnx.checker.check_model(model)
        reason = _reason_against(model)
        if reason is not None:
            raise NotImplementedError(f"headwise.integrations.onnx: {reason}")
        return Prepared(model, _torch_device(device), backend)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, *,
        backend: str | None = None, opset_version: int | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """One node; ``inputs`` are those that it names, in order."""
        opset = opset_version or onnx.defs.onnx_opset_version()
        reason = _reason_against_node(node, opset)
        if reason is not None:
            raise NotImplementedError(f"headwise.integrations.onnx: {reason}")
        names = [name for name in node.input if name]
        values = dict(zip(names, (_to_torch(x, _torch_device(device)) for x in inputs), strict=True))
        _run(node, values, backend)
        return tuple(_to_numpy(values[name]) for name in node.output if name)


class Prepared(onnx.backend.base.BackendRep):  # type: ignore[misc]
    """A model that is ready to run."""

    def __init__(self, model: onnx.ModelProto, device: torch.device, backend: str | None) -> None:
        self.device, self.backend = device, backend
        graph = model.graph
        self.nodes = list(graph.node)  # ONNX has them in an order that works
        self.constants = {x.name: _to_torch(onnx.numpy_helper.to_array(x), device) for x in graph.initializer}
        self.inputs = [x.name for x in graph.input if x.name not in self.constants]
        self.outputs = [x.name for x in graph.output]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The graph's outputs, numpy arrays; inputs: arrays or tensors in the order of the graph's inputs."""
        if len(inputs) != len(self.inputs):
            raise ValueError(f"headwise.integrations.onnx: got {len(inputs)} inputs; the model needs {self.inputs}")
        values = dict(self.constants)
        values |= zip(self.inputs, (_to_torch(x, self.device) for x in inputs), strict=True)
        with torch.no_grad():
            for node in self.nodes:
                _run(node, values, self.backend)
        return tuple(_to_numpy(values[name]) for name in self.outputs)


def _run(node: onnx.NodeProto, values: dict[str, Tensor], backend: str | None) -> None:
    """Read the node's inputs from the values and add its outputs to them."""
    inputs = [values[name] if name else None for name in node.input]
    wanted = [bool(name) for name in node.output]
    results = OPERATORS[node.op_type].run(inputs, wanted, backend, **_attributes(node))
    values.update((name, x) for name, x in zip(node.output, results, strict=False) if name and x is not None)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def _reason_against(model: onnx.ModelProto) -> str | None:
    """None where the model can run here."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    reasons = (_reason_against_node(node, opsets.get("ai.onnx", 0)) for node in model.graph.node)
    return next((reason for reason in reasons if reason is not None), None)


def _reason_against_node(node: onnx.NodeProto, opset: int) -> str | None:
    name = node.op_type
    if node.domain not in ("", "ai.onnx") or name not in OPERATORS:
        place = f" of {node.domain}" if node.domain not in ("", "ai.onnx") else ""
        return f"the operator {name}{place} is not here; there are: {', '.join(OPERATORS)}"
    operator = OPERATORS[name]
    version = onnx.defs.get_schema(name, opset, "").since_version
    if version not in operator.versions:
        return f"{name} of version {version} is not here; there are: {', '.join(map(str, operator.versions))}"
    attributes = _attributes(node)
    unknown = sorted(set(attributes) - operator.attributes)
    if unknown:
        return f"{name}: the attribute {unknown[0]} is not supported"
    if attributes.get("stash_type", 1) != 1:
        return f"{name}: stash_type={attributes['stash_type']} is not supported; sums are float32, which is 1"
    return None


def _torch_device(device: str) -> torch.device:
    kind, _, index = device.partition(":")
    if kind not in DEVICES:
        raise ValueError(f"headwise.integrations.onnx: device is {device!r}; it needs CPU or CUDA, perhaps with :index")
    return torch.device(f"cuda:{index}" if index and kind == "CUDA" else DEVICES[kind])


def _to_torch(x: Any, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(device)
    array = np.asarray(x)
    if array.dtype.name == "bfloat16":  # a type of ml_dtypes, which PyTorch does not know
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.ascontiguousarray(array).copy() if not array.flags.writeable else array).to(device)


def _to_numpy(x: Tensor) -> Any:
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        bfloat16 = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
        return x.contiguous().view(torch.int16).numpy().view(bfloat16)
    return x.numpy()
