"""Each rewrite computes the intended function where the original operators lose digits or
overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from gate.errors import ExportError
from gate.mend.rewrites import (
    FUNCTIONS,
    Graph,
    GraphEdit,
    edit,
    find_functions,
    forms,
    replaced_functions,
)
from gate.storage.digest import Digest

WIDE = np.concatenate(
    [np.linspace(-200, 200, 41), np.linspace(-1, 1, 40), np.logspace(-8, -2, 40)]
).astype(np.float32)[None]

Node = tuple[str, list[str], dict[str, object]]


def node(kind: str, *inputs: str, **attributes: object) -> Node:
    return kind, list(inputs), attributes


def expm1_where_finite(x: np.ndarray) -> np.ndarray:
    return np.expm1(np.minimum(x, 80))


TABLE: dict[str, tuple[list[Node], Callable[[np.ndarray], np.ndarray]]] = {
    "log_softmax": (
        [node("Softmax", "x", axis=1), node("Log", "0")],
        lambda x: x - np.log(np.exp(x - x.max()).sum()) - x.max(),
    ),
    "log_sum_exp": (
        [node("Exp", "x"), node("ReduceSum", "0", "axes", keepdims=1), node("Log", "1")],
        lambda x: np.log(np.exp(x - x.max()).sum(keepdims=True)) + x.max(),
    ),
    "log_sigmoid": (
        [node("Sigmoid", "x"), node("Log", "0")], lambda x: -np.logaddexp(0, -x)
    ),
    "softplus": (
        [node("Exp", "x"), node("Add", "0", "one"), node("Log", "1")],
        lambda x: np.logaddexp(0, x),
    ),
    "log_add_exp": (
        [node("Neg", "x"), node("Exp", "x"), node("Exp", "0"), node("Add", "1", "2"),
         node("Log", "3")],
        lambda x: np.logaddexp(x, -x),
    ),
    "log1p": (
        [node("Abs", "x"), node("Add", "0", "one"), node("Log", "1")],
        lambda x: np.log1p(np.abs(x)),
    ),
    "expm1": (
        [node("Min", "x", "eighty"), node("Exp", "0"), node("Sub", "1", "one")],
        expm1_where_finite,
    ),
    "clip": (
        [node("Relu", "x"), node("Min", "0", "six")], lambda x: np.clip(x, 0, 6)
    ),
    "variance": (
        [node("Add", "x", "far"), node("Mul", "0", "0"),
         node("ReduceMean", "1", axes=[1], keepdims=1), node("ReduceMean", "0", axes=[1], keepdims=1),
         node("Mul", "3", "3"), node("Sub", "2", "4")],
        lambda x: (x + 20000.0).astype(np.float32).astype(np.float64).var(1, keepdims=True),
    ),
    "layer_norm": (
        [node("LayerNormalization", "x", "ones", "zeros", epsilon=1e-5)],
        lambda x: (x - x.mean()) / np.sqrt(x.var() + 1e-5),
    ),
    "float64": (
        [node("CumSum", "x", "axis")], lambda x: np.cumsum(x, 1)
    ),
}  # fmt: skip


RELATIVE_TO_ALL = ("log_softmax", "layer_norm")
"""Their values near zero are differences of large values."""


def write_chain(path: Path, nodes: list[Node]) -> Path:
    """Write a chain of nodes; the n-th one computes the tensor `n`."""
    constants = {
        "one": np.float32(1), "six": np.float32(6), "eighty": np.float32(80),
        "far": np.float32(20000), "axes": np.array([1]), "axis": np.array(1),
        "no_axes": np.array([], np.int64),
        "ones": np.ones(WIDE.shape[1], np.float32), "zeros": np.zeros(WIDE.shape[1], np.float32),
    }  # fmt: skip
    used = {name for _, inputs, _ in nodes for name in inputs}
    created = [
        helper.make_node(kind, inputs, [str(index)], **attributes)
        for index, (kind, inputs, attributes) in enumerate(nodes)
    ]
    held = [
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in constants.items()
        if name in used
    ]
    selected = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDE.shape[1]])
    arguments = helper.make_tensor_value_info(
        str(len(nodes) - 1), TensorProto.FLOAT, ["rows", "columns"]
    )
    graph = helper.make_graph(created, "chain", [selected], [arguments], held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def compute(path: Path, x: np.ndarray) -> np.ndarray:
    """Run without ONNX Runtime's optimizations, which include other rewrites."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("name", TABLE)
def test_a_rewrite_is_as_exact_as_float32_allows(name, tmp_path):
    nodes, right = TABLE[name]
    path = write_chain(tmp_path / "m.onnx", nodes)
    before = Digest.from_file(path)
    locations = tuple(form.at for form in forms(Graph.load(path), name))
    assert locations == (str(len(nodes) - 1),)
    (created,) = edit(path, [GraphEdit(rewrite=name, at=locations)])
    assert (created.before, created.after) == (before, Digest.from_file(path))
    expected = right(WIDE.astype(np.float64))
    few = 1e-6 * np.abs(expected).max() if name in RELATIVE_TO_ALL else 1e-30
    np.testing.assert_allclose(compute(path, WIDE), expected, rtol=3e-6, atol=few)


def test_a_second_edit_of_a_tensor_gives_new_names(tmp_path):
    path = write_chain(tmp_path / "m.onnx", TABLE["log_sigmoid"][0])
    edit(path, [GraphEdit(rewrite=name, at=("1",)) for name in ("log_sigmoid", "float64")])
    right = TABLE["log_sigmoid"][1](WIDE.astype(np.float64))
    np.testing.assert_allclose(compute(path, WIDE), right, rtol=3e-6, atol=1e-30)


def test_log_of_sigmoid_overflows_where_pytorch_does(tmp_path):
    path = write_chain(tmp_path / "m.onnx", TABLE["log_sigmoid"][0])
    edit(path, [GraphEdit(rewrite="log_sigmoid_exp", at=("1",))])
    expected = torch.from_numpy(WIDE).sigmoid().log().numpy()
    assert np.isneginf(expected).any()
    assert np.isfinite(expected[WIDE > -80]).all()
    np.testing.assert_allclose(compute(path, WIDE), expected, rtol=3e-6, atol=1e-6)


def test_a_sum_over_no_axes_is_one_over_all(tmp_path):
    path = write_chain(
        tmp_path / "m.onnx",
        [node("Exp", "x"), node("ReduceSum", "0", "no_axes"), node("Log", "1")],
    )
    edit(path, [GraphEdit(rewrite="log_sum_exp", at=("2",))])
    np.testing.assert_allclose(compute(path, WIDE), [[200.0]], rtol=3e-6)


@pytest.mark.parametrize("name", ["log1p", "expm1", "layer_norm", "float64"])
def test_a_graph_of_another_precision_has_no_place_for_float32_constants(name, tmp_path):
    path = write_chain(tmp_path / "m.onnx", TABLE[name][0])
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    onnx.save(model, path)
    assert not list(forms(Graph.load(path), name))


def test_float64_leaves_an_input_that_is_absent(tmp_path):
    path = write_chain(tmp_path / "m.onnx", [node("ReduceSum", "x", "", keepdims=1)])
    edit(path, [GraphEdit(rewrite="float64", at=("0",))])
    right = WIDE.astype(np.float64).sum(keepdims=True)
    np.testing.assert_allclose(compute(path, WIDE), right, rtol=1e-6)


def test_an_edit_of_another_file_is_refused(tmp_path):
    path = write_chain(tmp_path / "m.onnx", TABLE["log_sigmoid"][0])
    expected = GraphEdit(rewrite="log_sigmoid", at=("1",), before=Digest.from_bytes(b"another"))
    with pytest.raises(ExportError, match="does not fit"):
        edit(path, [expected])
    with pytest.raises(ExportError, match="no place at 7"):
        edit(path, [GraphEdit(rewrite="log_sigmoid", at=("7",))])


ARGUMENTS = {
    "scaled_dot_product_attention": lambda: [torch.randn(2, 2, 5, 4) for _ in range(3)],
    "logaddexp": lambda: [torch.from_numpy(WIDE), torch.from_numpy(WIDE).flip(1)],
    "logsigmoid": lambda: [torch.from_numpy(WIDE)],
    "log1p": lambda: [torch.from_numpy(WIDE).abs()],
    "expm1": lambda: [torch.from_numpy(WIDE).clamp(max=80)],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_replaced_function_computes_the_same(name):
    torch.manual_seed(0)
    function, arguments = FUNCTIONS[name][0][0], ARGUMENTS[name]()
    right = function(*(item.double() for item in arguments))
    with replaced_functions([name]):
        created = make_fx(function)(*arguments)
    operators = [str(item.target).replace("_", "") for item in created.graph.nodes]
    assert not any(name.replace("_", "") in operator for operator in operators)
    torch.testing.assert_close(created(*arguments).double(), right, rtol=2e-6, atol=1e-6)


INDEX = torch.tensor([[0, 0, 2, 1, 0]])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=5)),
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, (2, 3), divisor_override=7)),
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, (2,), divisor_override=7)),
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, 2, 3, 1, True, divisor_override=7)),
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
        ("scatter_reduce", lambda x: x[0, 0].scatter_reduce(0, INDEX, x[0, 1], "mean")),
        ("scatter_reduce", lambda x: x[0, 0].scatter_reduce(
            0, INDEX, x[0, 1], "mean", include_self=False)),
        ("scatter_reduce", lambda x: x[0, 0].long().scatter_reduce(
            0, INDEX, x[0, 1].long(), "mean")),
        ("scatter_reduce", lambda x: torch.scatter_reduce(x[0, 0], 0, INDEX, x[0, 1], "amax")),
        ("cdist", lambda x: torch.cdist(x[0], x[1], p=1.0)),
        ("cdist", lambda x: torch.cdist(x[0], x[1])),
    ],
)  # fmt: skip
def test_a_replaced_reduction_computes_the_same(name, call):
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    with replaced_functions([name]):
        actual = call(x)
    torch.testing.assert_close(actual, call(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_multi_head_attention_is_exported_as_ordinary_functions():
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(3, 5, 8)
    name = "multi_head_attention"
    assert find_functions(model, {"x": x.numpy()}) == {name: ("inner",)}

    def operators(names: list[str]) -> str:
        with torch.no_grad(), replaced_functions(names):
            created = make_fx(model)(x)
        torch.testing.assert_close(created(x), model(x))
        return " ".join(str(item.target) for item in created.graph.nodes)

    assert "attention" in operators([])
    assert "attention" not in operators([name])


MASK = torch.ones(5, 5).triu(1).bool()
PADDED = torch.arange(5)[None] >= torch.tensor([5, 3, 4])[:, None]


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": MASK},
        {"attn_mask": MASK, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(6, 5, 5), "key_padding_mask": torch.randn(3, 5)},
        {"key_padding_mask": PADDED, "average_attn_weights": False},
        {"need_weights": False},
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("made", [{}, {"kdim": 4, "vdim": 6, "bias": False}, {"add_bias_kv": True}],
                         ids=str)  # fmt: skip
def test_replaced_heads_attend_as_those_of_torch(made, options):
    torch.manual_seed(0)
    heads = nn.MultiheadAttention(8, 2, batch_first=True, **made).eval()
    query = torch.randn(3, 5, 8)
    key, value = (torch.randn(3, 5, made.get(name, 8)) for name in ("kdim", "vdim"))
    with torch.no_grad():
        right = heads(query, key, value, **options)
        with replaced_functions(["multi_head_attention"]):
            actual = heads(query, key, value, **options)
    torch.testing.assert_close(actual[0], right[0])
    assert (actual[1] is None) == (right[1] is None)
    if right[1] is not None:
        torch.testing.assert_close(actual[1], right[1])


def test_replaced_attention_masks_as_torch_does():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    mask = torch.ones(5, 5).tril().bool()
    for keywords in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float()}):
        right = functional.scaled_dot_product_attention(query, key, value, **keywords)
        with replaced_functions(["scaled_dot_product_attention"]):
            got = functional.scaled_dot_product_attention(query, key, value, **keywords)
        torch.testing.assert_close(got, right)
