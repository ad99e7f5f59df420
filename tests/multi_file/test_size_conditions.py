"""A batch-size branch in one part becomes a probe of that part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from gate import EvaluationData, Reference, check
from tests.multi_file import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    tiny.export_files(path)
    return path


def add_branch(source: Path, path: Path, batch: int, *, factor: float) -> None:
    """Multiply the output by the factor if the batch has this size."""
    model = onnx.load(source)
    graph, name = model.graph, model.graph.output[0].name
    for node in graph.node:
        node.output[:] = ["before" if output == name else output for output in node.output]
    constants = {"zero": np.array([0]), "size": np.array([batch]), "factor": np.float32(factor)}
    for key, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), key))
    graph.node.extend(
        [
            helper.make_node("Shape", [graph.input[0].name], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["count"]),
            helper.make_node("Equal", ["count", "size"], ["condition"]),
            helper.make_node("Mul", ["before", "factor"], ["scaled"]),
            helper.make_node("Where", ["condition", "scaled", "before"], [name]),
        ]
    )
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("part", "batch", "factor"), [("encoder", 3, 1.01), ("head", 33, 1.01), ("head", 33, 1.0)]
)
def test_branch_of_a_part_is_probed(folder: Path, part: str, batch: int, factor: float) -> None:
    files = {"encoder": "encoder.onnx", "head": "head.onnx"}
    add_branch(folder / files[part], folder / "branched.onnx", batch, factor=factor)
    result = check(
        tiny.write_release(folder, **{**files, part: "branched.onnx"}),
        reference=Reference.from_factory("tests.multi_file.tiny:build"),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
    )
    problems = {(problem.name, problem.part) for problem in result.decision.problems}
    assert result.decision.passed == (factor == 1.0)
    assert ((f"probe_batch_{batch}", part) in problems) == (factor != 1.0)
