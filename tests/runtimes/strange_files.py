"""Files that a careless runtime reads wrongly, with batches of several sizes."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import nn

from gate import TestedFile
from gate.onnx_file.reading import read_subject
from gate.runtimes import Conditions, RunnableFile
from tests.measure import tiny


class Tokens(nn.Module):
    """Map token ids and a mask of any length to floats, an index and booleans."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids, mask):
        each = self.head(self.table(ids)) * mask.unsqueeze(-1)
        return each.sum(1), each.sum(1).argmax(1), mask > 0.5


def tokens(batch, length):
    rng = np.random.default_rng(batch)
    ids = rng.integers(0, 50, (batch, length))
    return {"ids": ids, "mask": (rng.random((batch, length)) > 0.3).astype(np.float32)}


def two_inputs(path):
    rng = np.random.default_rng(0)
    batches = [
        {name: rng.normal(size=(count, 4)).astype(np.float32) for name in ("left", "right")}
        for count in (3, 1)
    ]
    tiny.export(tiny.TwoInputs(), path, example=batches[0], outputs=("sum", "less", "more"))
    return batches


def integers_of_any_length(path):
    torch.manual_seed(0)
    batches = [tokens(2, 6), tokens(5, 6), tokens(1, 3)]
    axes = {0: "n", 1: "length"}
    example = tuple(torch.from_numpy(array) for array in batches[0].values())
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            Tokens(), example, str(path), dynamo=False, opset_version=13,
            input_names=["ids", "mask"], output_names=["sum", "best", "there"],
            dynamic_axes={"ids": axes, "mask": axes, "there": axes, "sum": {0: "n"}, "best": {0: "n"}},
        )  # fmt: skip
    return batches


def external_data(path):
    tiny.export(tiny.net(), path)
    proto = onnx.load(path)
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return [{"input": tiny.images(3)}, {"input": tiny.images(1)}]


def fixed_batch(path):
    tiny.export(tiny.net(), path, dynamic=False)
    return [{"input": tiny.images(2)}]


def input_is_output(path):
    """A graph in which one output is also an input, one input is unused, and two outputs are
    equal."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Identity", ["y"], ["z"])]
    _save(path, nodes, inputs="xu", outputs="zyx")
    return [
        {name: np.full((count, 2), count + index, np.float32) for index, name in enumerate("xu")}
        for count in (3, 1, 2, 4, 5, 6)
    ]


def weights_as_inputs(path):
    """Declare weights as inputs, as exporters did before IR version 4."""
    weights = onnx.numpy_helper.from_array(np.full((1, 2), 3.0, np.float32), "w")
    _save(path, [helper.make_node("Mul", ["x", "w"], ["y"])], inputs="wx", outputs="y", weights=[weights])  # fmt: skip
    return [{"x": np.ones((count, 2), np.float32)} for count in (3, 1)]


FILES = (
    two_inputs,
    integers_of_any_length,
    external_data,
    fixed_batch,
    input_is_output,
    weights_as_inputs,
)


def create_file(make, folder) -> tuple[TestedFile, list[dict[str, np.ndarray]]]:
    path = folder / "model.onnx"
    batches = make(path)
    return TestedFile(path, read_subject(path)), batches


def open_session(runtime, candidate, example, **options):
    """Open a session in this process."""
    return runtime.open(
        RunnableFile(candidate), options=runtime.options(**options), conditions=Conditions(),
        example=example,
    )  # fmt: skip


def assert_matches_onnxruntime(session, candidate, batches):
    """Assert that all outputs of all batches have ONNX Runtime's order, dtypes and values."""
    expected_session = onnxruntime.InferenceSession(
        str(candidate.path), providers=["CPUExecutionProvider"]
    )
    for batch in batches:
        expected, got = expected_session.run(None, batch), session.run(batch)
        assert [a.dtype for a in got] == [a.dtype for a in expected]
        assert [a.shape for a in got] == [a.shape for a in expected]
        for item, second in zip(got, expected, strict=True):
            np.testing.assert_allclose(item, second, rtol=1e-5, atol=1e-5)


def _save(path, nodes, *, inputs, outputs, weights=()):
    shape = {"w": [1, 2]}
    values = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape.get(n, ["n", 2])) for n in names]
        for names in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *values, initializer=list(weights))
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
