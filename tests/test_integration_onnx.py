"""The ONNX backend: ONNX's own test runner on its own node tests, and its reference on many more calls."""

from __future__ import annotations

import functools
import importlib
import itertools
import unittest

import numpy as np
import pytest
import torch
from backends_under_test import RUNNABLE
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import headwise as hw
from headwise.integrations import onnx as adapter

NODE_TESTS = {
    "Attention": "attention",
    "LayerNormalization": "layernormalization",
    "RMSNormalization": "rmsnormalization",
    "RotaryEmbedding": "rotaryembedding",
    "SoftmaxCrossEntropyLoss": "softmax_cross_entropy_loss",
}
# How many node tests of one node there were in onnx 1.23.2.
COUNTS = {"Attention": 93, "LayerNormalization": 19, "RMSNormalization": 19, "RotaryEmbedding": 8}
COUNTS["SoftmaxCrossEntropyLoss"] = 34


@functools.cache
def node_tests(operator):
    """ONNX's tests of models that are one node of this operator; importing their module makes them."""
    from onnx.backend.test.case import node

    importlib.import_module(f"onnx.backend.test.case.node.{NODE_TESTS[operator]}")
    return [t for t in node._NodeTestCases if [n.op_type for n in t.model.graph.node] == [operator]]


def run_by_onnx(backend, tests, device="cpu"):
    """The result of ONNX's runner over these tests."""
    from onnx.backend.test import BackendTest, runner

    with pytest.MonkeyPatch.context() as patch:  # the runner would make the tests of all operators first
        patch.setattr(runner, "load_model_tests", lambda kind=None: tests if kind == "node" else [])
        made = BackendTest(backend, __name__)
    kind = made.test_cases["OnnxBackendNodeModelTest"]
    result = unittest.TestResult()
    unittest.TestSuite(kind(f"{test.name}_{device}") for test in tests).run(result)
    return result


@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx", "ignore::DeprecationWarning:onnx")
@pytest.mark.parametrize("operator", NODE_TESTS)
def test_onnx_runs_its_own_tests(operator):
    tests = node_tests(operator)
    assert len(tests) >= COUNTS[operator]
    assert [test.name for test in tests if not adapter.Backend.is_compatible(test.model)] == []
    result = run_by_onnx(adapter.Backend, tests)
    assert result.testsRun == len(tests)
    assert [(str(test), text.strip().splitlines()[-1]) for test, text in result.failures + result.errors] == []
    assert result.skipped == []


def test_the_runner_sees_mistakes():
    """A backend that is a little wrong fails ONNX's tests."""

    class Wrong(adapter.Backend):
        @classmethod
        def prepare(cls, model, device="CPU", **kwargs):
            prepared = super().prepare(model, device, **kwargs)
            run = prepared.run
            prepared.run = lambda inputs: tuple(x * x.dtype.type(1.01) for x in run(inputs))
            return prepared

    tests = node_tests("RotaryEmbedding")
    assert len(run_by_onnx(Wrong, tests).failures) == len(tests)


# ------------------------------------------------------------------------------------------------- ONNX's reference


def model_of(nodes, inputs, outputs, opset, initializers=()):
    """inputs: name -> array; outputs: name -> array or shape."""
    typed = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, np.shape(x)) for name, x in outputs.items()]
    graph = helper.make_graph(nodes, "graph", typed, made, [numpy_helper.from_array(x, n) for n, x in initializers])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def agree(node, inputs, opset, backend=None):
    names = [name for name in node.output if name]
    by_reference = ReferenceEvaluator(model_of([node], inputs, dict.fromkeys(names, 0), opset)).run(None, inputs)
    wanted = dict(zip(names, by_reference, strict=True))
    got = adapter.Backend.prepare(model_of([node], inputs, wanted, opset), backend=backend).run(list(inputs.values()))
    for (name, theirs), mine in zip(wanted.items(), got, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11, err_msg=name)


def arrays(queries, keys, heads=4, key_heads=2, seed=0):
    make = np.random.default_rng(seed)
    shapes = {"Q": (2, heads, queries, 6), "K": (2, key_heads, keys, 6), "V": (2, key_heads, keys, 5)}
    return {name: make.standard_normal(shape) for name, shape in shapes.items()}


MASKS = [None, ("bool", (1, 1)), ("bool", (2, 4)), ("float", (1, 4)), ("float", (2, 1))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (4, 7), (7, 4), (1, 6)])
@pytest.mark.parametrize("cache", ["none", "past", "nonpad"])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_attention_as_the_reference_has_it(queries, keys, cache, is_causal):
    windows = [(-1, -1), (1, -1), (-1, 1), (2, 1), (0, 0)]
    for (left, right), mask, mode in itertools.product(windows, MASKS, (0, 1, 2, 3)):
        inputs = arrays(queries, keys)
        make = np.random.default_rng(5)
        names = ["Q", "K", "V", "", "", "", ""]
        total = keys
        if cache == "past":
            inputs |= {"past_key": make.standard_normal((2, 2, 3, 6)), "past_value": make.standard_normal((2, 2, 3, 5))}
            names[4:6] = "past_key", "past_value"
            total += 3
        if cache == "nonpad":
            inputs["nonpad_kv_seqlen"] = np.array([keys, max(keys - 2, 0)])
            names[6] = "nonpad_kv_seqlen"
        if mask is not None:
            kind, lead = mask
            width = total if cache == "nonpad" or mode == 1 else total - 1  # a mask may be too short
            shape = (*lead, queries, width)
            inputs["attn_mask"] = make.standard_normal(shape) if kind == "float" else make.random(shape) > 0.3
            names[3] = "attn_mask"
        outputs = ["Y", *(("present_key", "present_value") if cache == "past" else ("", "")), "qk_matmul_output"]
        while not names[-1]:
            names.pop()
        attributes = {"is_causal": is_causal, "qk_matmul_output_mode": mode, "scale": 0.25}
        if mode:  # the reference caps what it calls raw, too
            attributes["softcap"] = 2.0
        node = helper.make_node(
            "Attention", names, outputs, left_window_size=left, right_window_size=right, **attributes
        )
        agree(node, inputs, 25)


def test_attention_without_heads_and_before_windows():
    inputs = {"Q": np.random.default_rng(0).standard_normal((2, 5, 24))}
    inputs |= {name: np.random.default_rng(i).standard_normal((2, 7, 12)) for i, name in enumerate("KV")}
    for opset in (23, 24, 25):
        node = helper.make_node("Attention", list("QKV"), ["Y"], q_num_heads=4, kv_num_heads=2, is_causal=1)
        agree(node, inputs, opset)


@pytest.mark.parametrize("operator", ["RMSNormalization", "LayerNormalization"])
def test_norms_over_several_dims_and_small_weights(operator):
    make = np.random.default_rng(0)
    for axis, shape in ((1, (4, 5)), (1, (1, 5)), (2, (5,)), (-2, (4, 1)), (0, (3, 4, 5))):
        inputs = {"X": make.standard_normal((3, 4, 5)), "W": make.standard_normal(shape)}
        if operator == "RMSNormalization" or axis == 2:
            agree(helper.make_node(operator, ["X", "W"], ["Y"], axis=axis, epsilon=0.1), inputs, 23)
        if operator == "LayerNormalization":
            inputs["B"] = make.standard_normal(shape)
            agree(helper.make_node(operator, ["X", "W", "B"], ["Y", "M", "I"], axis=axis), inputs, 23)


# --------------------------------------------------------------------------------------------------- models and nodes


def test_a_model_of_several_nodes_with_weights_inside():
    make = np.random.default_rng(0)
    weight = make.standard_normal(24)
    inputs = {"X": make.standard_normal((2, 5, 24))}
    nodes = [
        helper.make_node("RMSNormalization", ["X", "W"], ["N"]),
        helper.make_node("Attention", ["N", "N", "X"], ["A"], q_num_heads=4, kv_num_heads=4, is_causal=1),
        helper.make_node("LayerNormalization", ["A", "W"], ["Y"]),
    ]
    model = model_of(nodes, inputs, {"Y": inputs["X"]}, 23, [("W", weight)])
    assert adapter.Backend.is_compatible(model)
    wanted = ReferenceEvaluator(model).run(None, inputs)[0]
    for given in (inputs["X"], torch.from_numpy(inputs["X"])):
        (got,) = adapter.Backend.run_model(model, [given])
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="got 2 inputs"):
        adapter.Backend.run_model(model, [inputs["X"], inputs["X"]])


def test_one_node():
    inputs = list(arrays(5, 7).values())
    node = helper.make_node("Attention", list("QKV"), ["Y", "", "", "S"], qk_matmul_output_mode=3)
    out, probs = adapter.Backend.run_node(node, inputs)
    assert out.shape == (2, 4, 5, 5)
    np.testing.assert_allclose(probs.sum(-1), 1.0)
    weight = np.ones(5, dtype=np.float32)
    x = np.full((2, 5), 3.0, dtype=np.float32)
    (y,) = adapter.Backend.run_node(helper.make_node("RMSNormalization", ["X", "W"], ["Y"]), [x, weight])
    np.testing.assert_allclose(y, 1.0, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.5])  # float32 in a node
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scales_that_are_not_positive(scale, mode):
    inputs = arrays(5, 7)
    options = {"scale": scale, "softcap": 3.0, "qk_matmul_output_mode": mode}
    node = helper.make_node("Attention", list("QKV"), ["Y", "", "", "S"], **options)
    got = adapter.Backend.run_node(node, list(inputs.values()))
    wanted = hw.attention(*(2 * scale * x if name == "Q" else x for name, x in tensors(inputs)), scale=0.5, softcap=3.0)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-9, atol=1e-11)
    scores = np.einsum("bhid,bhjd->bhij", inputs["Q"], inputs["K"].repeat(2, 1)) * scale
    if mode:
        scores = 3.0 * np.tanh(scores / 3.0)
    if mode == 3:
        scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(got[1], scores, rtol=1e-9, atol=1e-11)


def tensors(inputs):
    return ((name, torch.from_numpy(x)) for name, x in inputs.items())


@pytest.mark.parametrize(
    "types", [("f4", "f4", "f2"), ("f2", "f2", "f4"), ("f2", "f4", "f4"), ("f4", "f2", "f8")], ids=str
)
def test_keys_and_values_of_other_types(types):
    """The result has Q's type, and the present values have their own."""
    given = [x.astype(kind) for x, kind in zip(arrays(5, 7).values(), types, strict=True)]
    node = helper.make_node("Attention", list("QKV"), ["Y", "K2", "V2"])
    out, *present = adapter.Backend.run_node(node, given)
    assert [x.dtype.str[1:] for x in (out, *present)] == list(types)
    wanted = hw.attention(*(torch.from_numpy(x).double() for x in given))
    tolerance = 2e-3 if types[0] == "f2" else 1e-5
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_is_ignored_without_ignore_index(weighted):
    """Labels that other libraries ignore, and others that are no class: NaN, and the rest is right."""
    scores = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    labels = np.array([0, -100, 2, 7, -1])
    weights = [np.linspace(0.5, 2.0, 7, dtype=np.float32)] if weighted else []
    names = ["x", "y", "w"][: 2 + weighted]
    losses = -np.log(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))[[0, 2], [0, 2]] * (
        [0.5, 1.0] if weighted else 1.0
    )

    def run(**attributes):
        node = helper.make_node("SoftmaxCrossEntropyLoss", names, ["l"], **attributes)
        return adapter.Backend.run_node(node, [scores, labels, *weights])[0]

    np.testing.assert_allclose(run(reduction="none"), [losses[0], np.nan, losses[1], np.nan, np.nan], rtol=1e-5)
    assert np.isnan(run())
    ignoring = run(reduction="none", ignore_index=-100)
    np.testing.assert_allclose(ignoring, [losses[0], 0.0, losses[1], np.nan, np.nan], rtol=1e-5)


def refused_models():
    x = {"X": np.ones((2, 5)), "W": np.ones(5)}
    node = helper.make_node
    return {
        "the operator MatMul": (node("MatMul", ["X", "X"], ["Y"]), {"X": np.ones((2, 2))}, {"Y": np.ones((2, 2))}, 23),
        "stash_type=11": (node("RMSNormalization", ["X", "W"], ["Y"], stash_type=11), x, {"Y": x["X"]}, 23),
    }


@pytest.mark.parametrize("named", ["the operator MatMul", "stash_type=11"])
def test_what_is_not_here_is_refused_by_name(named):
    node, inputs, outputs, opset = refused_models()[named]
    model = model_of([node], inputs, outputs, opset)
    assert not adapter.Backend.is_compatible(model)
    with pytest.raises(NotImplementedError, match=named):
        adapter.Backend.prepare(model)
    with pytest.raises(NotImplementedError, match=named):
        adapter.Backend.run_node(node, list(inputs.values()), opset_version=opset)


def test_an_unknown_version_or_attribute_is_refused(monkeypatch):
    node = helper.make_node("Attention", list("QKV"), ["Y"], is_causal=1)
    row = adapter.OPERATORS["Attention"]
    for changed, named in (
        (row._replace(versions=(99,)), "of version 25"),
        (row._replace(attributes=frozenset()), "is_causal"),
    ):
        monkeypatch.setitem(adapter.OPERATORS, "Attention", changed)
        with pytest.raises(NotImplementedError, match=named):
            adapter.Backend.run_node(node, list(arrays(5, 5).values()), opset_version=25)


def test_weights_that_differ_from_row_to_row_are_refused():
    inputs = [np.ones((3, 5)), np.ones((3, 5))]
    with pytest.raises(NotImplementedError, match="scale has shape"):
        adapter.Backend.run_node(helper.make_node("RMSNormalization", ["X", "W"], ["Y"]), inputs)


def test_devices():
    assert adapter.Backend.supports_device("CPU")
    assert adapter.Backend.supports_device("CUDA") == torch.cuda.is_available()
    assert not adapter.Backend.supports_device("TPU")


ON_WEBGPU = {  # names of tests end so; all of the quick ones
    "Attention": (
        "4d_gqa_causal",
        "3d_attn_mask",
        "4d_causal_bf16",
        "4d_with_qk_matmul_softmax",
        "local_window_with_past",
    ),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "RotaryEmbedding", "SoftmaxCrossEntropyLoss"), ("",)),
}


def asks_for_float64(test):
    return any(a.name == "softmax_precision" and a.i == TensorProto.DOUBLE for a in test.model.graph.node[0].attribute)


def hold_on(backend, operator, endings):
    """The node tests whose names end so, on a backend of ours that has no float64."""

    class OnBackend(adapter.Backend):
        @classmethod
        def prepare(cls, model, device="CPU", **kwargs):
            return super().prepare(model, device, backend=backend, **kwargs)

    tests = [test for test in node_tests(operator) if test.name.endswith(endings) and not asks_for_float64(test)]
    assert len(tests) >= max(len(endings), COUNTS[operator] - 1 if endings == ("",) else 0)
    result = run_by_onnx(OnBackend, tests)
    assert result.testsRun == len(tests)
    assert [(str(test), text) for test, text in result.failures + result.errors] == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")
@pytest.mark.parametrize("operator", ON_WEBGPU)
def test_on_webgpu(operator):
    hold_on("webgpu", operator, ON_WEBGPU[operator])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")
def test_all_of_attention_on_webgpu():
    hold_on("webgpu", "Attention", ("",))


ON_TRITON = {  # some of each: in the interpreter
    "Attention": ("4d_gqa_causal", "3d_attn_mask", "4d_softcap", "local_window_with_past"),
    "LayerNormalization": ("2d_axis1", "3d_axis2_epsilon"),
    "RMSNormalization": ("2d_axis1", "3d_axis2_epsilon"),
    "RotaryEmbedding": ("3d_input", "interleaved"),
    "SoftmaxCrossEntropyLoss": ("_mean", "_none_weights"),
}


@pytest.mark.skipif("triton" not in RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx")
@pytest.mark.parametrize("operator", ON_TRITON)
def test_on_triton(operator):
    hold_on("triton", operator, ON_TRITON[operator])
