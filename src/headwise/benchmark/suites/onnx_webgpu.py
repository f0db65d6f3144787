"""The peer on WebGPU: the attention of ONNX Runtime (package onnxruntime-webgpu), on the same GPU through Dawn.

Our clocks cannot time its GPU queue, and its Python package cannot bind GPU memory. So graphs of many attentions in a
row are timed: each output is the query of the next, and one number is read back at the end. The time of an attention is
the difference between a long and a short graph, divided by the number of attentions between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.benchmark.case import Absent, Contender
from headwise.benchmark.suites.attention import QKV
from headwise.benchmark.timing import WEBGPU_WARM_UP_S, SelfTimed
from headwise.testing import Arguments

ORT = "ONNX Runtime"
_PROVIDER = "WebGpuExecutionProvider"
_SHORT, _LONG = 4, 24  # attentions in the two graphs


def ort_peer() -> Contender:
    return Contender(ORT, _prepare)


def _prepare(arguments: Arguments) -> OrtAttention:
    if any(arguments.get(name) is not None for name in ("window", "mask", "bias", "softcap", "sink", "kv_lengths")):
        raise Absent("it was asked for plain attention alone")
    q, k, v = (arguments[name].torch() for name in QKV)
    if q.dtype == torch.bfloat16:
        raise Absent("it has no bfloat16")
    return OrtAttention(q, k, v, bool(arguments["causal"]))


class OrtAttention(SelfTimed):
    """q, k and v are CPU tensors ``(B, H, S, D)``. A call returns the output."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        import onnx  # noqa: F401  # absent: the case runs without this peer
        import onnxruntime

        if _PROVIDER not in onnxruntime.get_available_providers():
            raise Absent("this ONNX Runtime is not the one for WebGPU: pip install onnxruntime-webgpu")
        self._shape = q.shape
        self._q, rows = _rows(q), [_rows(k), _rows(v)]
        self._whole = _session(_graph(q.shape, k.shape[1], rows, causal, 1, whole=True))
        self._sessions = [_session(_graph(q.shape, k.shape[1], rows, causal, n, whole=False)) for n in (_SHORT, _LONG)]

    def __call__(self) -> tuple[Tensor]:
        batch, heads, length, dim = self._shape
        (out,) = self._whole.run(None, {"q": self._q})
        return (torch.from_numpy(out).view(batch, length, heads, dim).transpose(1, 2),)

    def seconds(self, calls: int) -> float:
        """The median of a few differences."""
        # A short graph at idle clocks takes as long as a long one at full clocks.
        warm = time.perf_counter() + 2 * WEBGPU_WARM_UP_S
        while time.perf_counter() < warm:
            self._once(self._sessions[1])
        differences = []
        for _ in range(max(3, -(-calls // _LONG))):
            short, long = (self._once(session) for session in self._sessions)
            differences.append((long - short) / (_LONG - _SHORT))
        positive = sorted(x for x in differences if x > 0)
        return positive[len(positive) // 2] if positive else float("nan")

    def _once(self, session: Any) -> float:
        start = time.perf_counter()
        session.run(None, {"q": self._q})
        return time.perf_counter() - start


def _rows(x: Tensor) -> Any:
    """``(B, H, S, D)`` as ``(B, S, H · D)``, the layout of the operator."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1).contiguous().numpy()


def _session(model: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        # No fallback: it would measure the CPU.
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[_PROVIDER], enable_fallback=0
        )
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise Absent(f"{type(error).__name__}: {lines[-1]}") from error


def _graph(
    shape: Sequence[int], key_heads: int, keys_and_values: list[Any], causal: bool, attentions: int, whole: bool
) -> Any:
    """A chain of attentions. It returns the last output, or one number of it."""
    from onnx import TensorProto, helper, numpy_helper

    batch, heads, length, dim = shape
    k, v = keys_and_values
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[str(k.dtype)]
    query = helper.make_tensor_value_info("q", kind, [batch, length, heads * dim])
    constants = [numpy_helper.from_array(k, "k"), numpy_helper.from_array(v, "v")]
    flags: dict[str, Any] = {"num_heads": heads, "scale": dim**-0.5}
    if key_heads != heads:
        raise Absent("its attention of many heads has as many key heads as query heads")
    if causal:
        flags["unidirectional"] = 1
    nodes, last = [], "q"
    for i in range(attentions):
        nodes.append(
            helper.make_node("MultiHeadAttention", [last, "k", "v"], [f"out{i}"], domain="com.microsoft", **flags)
        )
        last = f"out{i}"
    size = [batch, length, heads * dim]
    if not whole:
        import numpy as np

        for name, value in (("starts", [0, 0, 0]), ("ends", [1, 1, 1]), ("axes", [0, 1, 2])):
            constants.append(numpy_helper.from_array(np.array(value, np.int64), name))
        nodes.append(helper.make_node("Slice", [last, "starts", "ends", "axes"], ["one"]))
        last, size = "one", [1, 1, 1]
    graph = helper.make_graph(nodes, "attention", [query], [helper.make_tensor_value_info(last, kind, size)], constants)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)
