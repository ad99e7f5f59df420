"""Minimal reproducers show the same failure and contain no secrets."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gate import Localization, MeasurementJob, Policy, SampleSet, cli
from gate.api import build_job, check
from gate.localize.file_graph import Piece
from gate.localize.layer_script import LayerScript
from gate.localize.locate import compare_layers
from gate.localize.reduce import (
    Kind,
    NotReproduced,
    ReducedFailure,
    RoundingBound,
    distance,
    reduce_failure,
    run,
)
from gate.localize.reproducer import Reproducer
from gate.localize.standalone import Standalone, fewest_nodes, random_like, without_names
from gate.measure.job import EvaluationData, Reference
from gate.policy.runtime_options import plain_setup
from gate.records.evidence import ExportRecord, Source
from tests import small_project
from tests.localize.optimizers.faults import FAULTS
from tests.measure import tiny

FILES = {
    "model.onnx", "inputs.npz", "expected.npz", "reproduce.py", "environment.txt", "issue.md"
}  # fmt: skip


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    """Return a function that reduces each real optimizer fault once."""

    @functools.cache
    def make(name: str) -> tuple[ReducedFailure, Localization]:
        fault = FAULTS[name]
        file = fault.file(tmp_path_factory.mktemp("fault") / "model.onnx")
        samples = SampleSet.from_arrays({"input": fault.inputs})
        case = MeasurementJob(fault.model().eval(), file, samples, tiny.policy())
        compared = compare_layers(case, runtime="ort-cpu-optimized")
        return reduce_failure(compared), compared.localization

    return make


def test_fewest_nodes_keeps_only_necessary_nodes():
    tried: list[tuple[int, ...]] = []

    def differs(indices: tuple[int, ...]) -> bool:
        tried.append(indices)
        return {3, 17} <= set(indices)

    assert fewest_nodes(range(40), differs) == (3, 17)
    assert len(tried) == len(set(tried))


@pytest.mark.further
@pytest.mark.parametrize(("name", "nodes", "raises"), [
    ("a transposed matrix by a vector", ["Transpose", "MatMul"], False),
    ("ReLU and clip in float64", ["Relu", "Clip"], True),
    ("zeros around a pool", ["Pad", "MaxPool"], False),
])  # fmt: skip
def test_optimizer_fault_is_reduced_to_the_fused_nodes(reduced, tmp_path, name, nodes, raises):
    failure, result = reduced(name)
    assert failure.kind == "optimizer"
    assert [node.op_type for node in failure.model.graph.node] == nodes
    assert (failure.raises is not None) == raises
    Reproducer(failure, result, {}).write(tmp_path / "bug.zip", venv=False)
    assert set(zipfile.ZipFile(tmp_path / "bug.zip").namelist()) == FILES


class Flattened(torch.nn.Module):
    """A model that returns two outputs of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(6, 4), torch.nn.Linear(6, 3)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = input.reshape(-1, 6)
        return self.first(flat), self.last(flat)


def _set_reshape_batch(model: onnx.ModelProto) -> None:
    """Write a constant batch size into Reshape."""
    node = next(node for node in model.graph.node if node.op_type == "Reshape")
    node.input[1] = "shape"
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 6]), "shape"))


def _fix_batch_axis(model: onnx.ModelProto) -> None:
    """Fix the batch axis, although the export record states that it is dynamic."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2


def _refuses_all(model: onnx.ModelProto) -> None:
    """Write a shape into Reshape that no batch has."""
    _set_reshape_batch(model)
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.array([-1, 6, 97]), "shape"))


def _without_kernel(model: onnx.ModelProto) -> None:
    """Insert an operator that ONNX Runtime has no kernel for, and the reference evaluator has."""
    output = model.graph.output[0].name
    last = next(node for node in model.graph.node if output in node.output)
    last.output[0] = "before"
    nodes = [("Cast", {"to": TensorProto.INT16}), ("ArgMax", {}), ("Cast", {"to": 1})]
    names = ["before", "narrow", "index", output]
    for (operator, settings), *ends in zip(nodes, names, names[1:], strict=False):
        model.graph.node.append(helper.make_node(operator, ends[:1], ends[1:], **settings))


def _reverse_outputs(model: onnx.ModelProto) -> None:
    model.graph.output.reverse()


@pytest.mark.further
@pytest.mark.parametrize(
    ("edit", "operator", "kind", "raises", "accepted"),
    [
        (_set_reshape_batch, "Reshape", "exporter", True, (2,)),
        (_fix_batch_axis, "Reshape", "exporter", True, (2,)),
        (_reverse_outputs, "Gemm", "exporter", False, ()),
        (_refuses_all, "Reshape", "exporter", True, ()),
        (_without_kernel, "ArgMax", "runtime", True, ()),
    ],
    ids=["batch size", "fixed batch axis", "order of outputs", "every batch", "no kernel"],
)
def test_file_that_cannot_be_compared_is_reduced(tmp_path, edit, operator, kind, raises, accepted):
    x = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32)
    model, example = Flattened().eval(), {"input": x[:2]}
    correct = tiny.export(model, tmp_path / "right.onnx", example=example, outputs=("a", "b"))
    path = tiny.edit(correct, tmp_path / "model.onnx", edit).path
    policy = Policy.default()
    record = ExportRecord(strategy="direct", settings={"dynamic_batch": True})
    reference = Reference(model, Source(factory="tests"), export=record)
    arguments = {
        "reference": reference,
        "data": EvaluationData(SampleSet.from_arrays({"input": x})),
    }
    result = check(path, *arguments.values(), policy)
    job = build_job(path, policy=policy, **arguments)
    reproducer = Reproducer.from_rejection(job, result.evidence, result.decision)
    assert reproducer is not None
    reproducer.write(tmp_path / "bug.zip", venv=False)
    failure = reproducer.failure
    operators = [node.op_type for node in failure.model.graph.node]
    assert (failure.kind, failure.accepted_batches) == (kind, accepted)
    assert operator in operators
    assert (failure.raises is not None) == raises
    if raises and not accepted:
        assert operators == [operator]
        assert reproducer.stripped(weights=True, inputs=True).failure.shows()


@pytest.mark.further
def test_strip_replaces_names_weights_and_expected_values(reduced):
    failure, result = reduced("a transposed matrix by a vector")
    before = [numpy_helper.to_array(tensor) for tensor in failure.model.graph.initializer]
    graph = failure.model.graph
    names = [item.name for item in (*graph.node, *graph.initializer) if item.name]
    assert names
    assert result.fault
    stripped = Reproducer(failure, result, {}).stripped(weights=True, inputs=True)
    assert result.fault not in stripped.issue("", venv=False)
    stripped_failure = stripped.failure
    assert not any(name.encode() in stripped_failure.model.SerializeToString() for name in names)
    assert stripped_failure.random_weights
    assert stripped_failure.shows()
    for tensor, original in zip(stripped_failure.model.graph.initializer, before, strict=True):
        array = numpy_helper.to_array(tensor)
        assert array.size == 1 or not np.isin(array, original).all()
    for name, array in stripped_failure.inputs.items():
        assert not np.array_equal(array, failure.inputs[name])
    for name, array in stripped_failure.expected.items():
        assert not np.array_equal(array, failure.expected[name])


WEIGHT = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)


def _make_failure(model: onnx.ModelProto, kind: Kind = "optimizer", **more: Any) -> ReducedFailure:
    """Return a failure of a graph x0 -> y0 whose expected values differ from its outputs."""
    settings: dict[str, Any] = {
        "kind": kind,
        "model": model,
        "inputs": {"x0": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "expected": {"y0": np.full((2, 2), 9.0, np.float32)},
        "tolerances": {"y0": RoundingBound(0.0, 0.0)},
        "setup": plain_setup("ort-cpu"),
        "tensors": {"y0": "y"},
    }
    return ReducedFailure(**{**settings, **more})


def _make_model(*nodes: onnx.NodeProto, **more: Any) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x0", "y0")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], **more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_names_in_subgraphs_are_replaced():
    inner = helper.make_graph(
        [helper.make_node("Add", ["secret_a", "secret_c"], ["secret_o"], name="secret_node")],
        "b",
        [],
        [helper.make_tensor_value_info("secret_o", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32([1.0]), "secret_c")],
    )
    yes = helper.make_tensor("", TensorProto.BOOL, [], [True])
    nodes = [
        helper.make_node("Relu", ["x0"], ["secret_a"]),
        helper.make_node("Constant", [], ["secret_b"], value=yes),
        helper.make_node("If", ["secret_b"], ["y0"], then_branch=inner, else_branch=inner),
    ]
    model = without_names(_make_model(*nodes))
    assert b"secret" not in model.SerializeToString()
    inputs = {"x0": np.float32([-1.0, 2.0])}
    assert run(model, inputs, plain_setup("ort-cpu"))["y0"].tolist() == [1.0, 3.0]


RELU = helper.make_node("Relu", ["x0"], ["y0"])
COEFFICIENTS = helper.make_node(
    "LinearRegressor", ["x0"], ["y0"], domain="ai.onnx.ml", coefficients=[1.0, 2.0, 3.0]
)
BRANCH = helper.make_graph(
    [helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0])], "b", [], []
)
BLOB = helper.make_node("EPContext", ["x0"], ["y0"], domain="com.microsoft", ep_context=b"w" * 99)


@pytest.mark.parametrize(
    "nodes",
    [
        [COEFFICIENTS],
        [helper.make_node("Custom", ["x0"], ["y0"], numbers=list(range(17)))],
        [helper.make_node("If", ["x0"], ["y0"], then_branch=BRANCH)],
        [BLOB],
        [helper.make_node("Constant", [], ["y0"], value_strings=["a"] * 17)],
        [RELU, helper.make_node("Constant", [], ["t"],
                                value=helper.make_tensor("t", TensorProto.STRING, [1], [b"w"]))],
    ],
    ids=["floats", "integers", "branch", "bytes", "texts", "text tensor"],
)  # fmt: skip
def test_strip_refuses_weights_outside_of_tensors(nodes):
    reproducer = Reproducer(_make_failure(_make_model(*nodes)), Localization.model_construct(), {})
    with pytest.raises(NotReproduced):
        reproducer.stripped(weights=True, inputs=False)


def test_issue_names_the_file_that_computes_the_expected_values():
    failure = _make_failure(_make_model(RELU), "exporter")
    for is_converted in (False, True):
        reproducer = Reproducer(failure, Localization.model_construct(fault=None, blame=None), {})
        text = replace(reproducer, is_converted=is_converted).issue("", venv=False)
        assert ("original" in text.splitlines()[0]) == is_converted
        assert ("PyTorch" in text) != is_converted


def test_strip_counts_the_weights_of_the_layer():
    failure = _make_failure(_make_model(RELU), "exporter")
    for weights, is_refused in (({"weight": WEIGHT}, True), ({}, False)):
        layer = LayerScript("", weights)
        reproducer = Reproducer(failure, Localization.model_construct(), {}, layer)
        with pytest.raises(NotReproduced) if is_refused else contextlib.nullcontext():
            assert reproducer.stripped(weights=True, inputs=False) is reproducer


@pytest.mark.further
def test_strip_replaces_inputs_that_are_weights(reduced):
    failure = _make_failure(_make_model(RELU), "exporter", constant_inputs=("x0",))
    with pytest.raises(NotReproduced):
        Reproducer(failure, Localization.model_construct(), {}).stripped(weights=True, inputs=False)
    failure, result = reduced("zeros around a pool")
    assert failure.constant_inputs == ()
    unchanged_inputs = Reproducer(failure, result, {}).stripped(weights=True, inputs=False).failure
    assert all(unchanged_inputs.inputs[name] is array for name, array in failure.inputs.items())
    failure = replace(failure, constant_inputs=tuple(failure.inputs))
    replaced_inputs = Reproducer(failure, result, {}).stripped(weights=True, inputs=False).failure
    assert not any(np.isin(replaced_inputs.inputs[n], a).all() for n, a in failure.inputs.items())


def test_distance_is_exact_for_large_integers_and_empty_arrays():
    large = np.array([2**60, 2**60 + 1])
    assert distance(large, large) == (0.0, 0.0)
    assert distance(large, large[[0, 0]])[1] == 1.0
    assert distance(large[:0], large[:0]) == (0.0, 0.0)
    numbers = np.array([np.nan, np.inf, 1.5], np.float32)
    assert distance(numbers, numbers) == (0.0, 0.0)
    assert distance(numbers, numbers[[2, 1, 2]])[1] == np.inf


def test_random_numbers_stay_in_the_finite_range():
    large = np.array([2**63, 2**64 - 1], np.uint64)
    drawn = random_like(large, 0)
    assert drawn.dtype == np.uint64
    assert drawn.min() >= 2**63
    floats = random_like(np.array([np.nan, 1.0, 2.0, np.inf], np.float32), 0)
    assert ((floats >= 1.0) & (floats <= 2.0)).all()
    two_values = np.array([0.1, 7.3], np.float32)  # each value is an end of the range
    assert not any(np.isin(random_like(two_values, seed), two_values).any() for seed in range(50))


def test_layer_in_bfloat16_has_no_script():
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    failure = _make_failure(_make_model(RELU), "exporter", arguments=("x0",))
    assert LayerScript.from_layer(layer, failure) is None


class Scaled(torch.nn.Module):
    """A custom module that is not part of a library."""

    def __init__(self, table: tuple[float, ...] = (1.0, 2.0)) -> None:
        super().__init__()
        self.weight, self.table = torch.nn.Parameter(torch.from_numpy(WEIGHT)), table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) + torch.add(x.new_tensor(self.table), 0.5)


class Branching(torch.nn.Module):
    """A module with a submodule, a loop over a weight and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.scaled.weight:
            x = x + row.sum()
        return self.scaled(x) if float(x.sum()) > 0 else x


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.further
@pytest.mark.parametrize("module", [Scaled, Branching])
def test_custom_module_becomes_a_class_without_its_source(tmp_path, module):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with torch.no_grad():
        expected = {"y0": module()(torch.from_numpy(x)).numpy()}
    failure = _make_failure(_make_model(RELU), "exporter", arguments=("x0",), expected=expected)
    script = LayerScript.from_layer(module(), failure)
    assert script is not None
    assert module.__name__ not in script.text
    np.savez(tmp_path / "weights.npz", **script.weights)
    np.savez(tmp_path / "inputs.npz", **failure.inputs)
    (tmp_path / "layer.py").write_text(script.text)
    for shift, code in ((0.0, 0), (1.0, 1)):
        np.savez(tmp_path / "expected.npz", y0=expected["y0"] + np.float32(shift))
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(tmp_path / "layer.py"), run_name="__main__")
        assert exit_info.value.code == code
        gc.collect()  # the script closes its files only when its process ends
    # A table in the code might be a weight.
    table = tuple(float(number) / 3 for number in range(64))
    assert LayerScript.from_layer(Scaled(table), failure) is None


def _run_script(failure: ReducedFailure, folder: Path) -> tuple[int, str]:
    """Run the script, which has at most 40 lines; return its exit code and last line."""
    script = Reproducer(failure, Localization.model_construct(), {}).script()
    assert script.count("\n") <= 40
    (folder / "reproduce.py").write_text(script)
    onnx.save(failure.model, folder / "model.onnx")
    np.savez(folder / "inputs.npz", **failure.inputs)
    np.savez(folder / "expected.npz", **failure.expected)
    command = [sys.executable, "-I", str(folder / "reproduce.py")]
    completed = subprocess.run(command, check=False, capture_output=True, text=True)
    return completed.returncode, completed.stdout.splitlines()[-1]


def test_script_exit_code_distinguishes_failures(tmp_path):
    setup = plain_setup("ort-cpu")
    entries = {"config": {"session.disable_prepacking": "1"}, "disabled_optimizers": ("Relu",)}
    setup = replace(setup, settings=setup.settings.model_copy(update=entries))
    no_rows = np.zeros((0, 3), np.float32)
    empty = _make_failure(
        _make_model(RELU), setup=setup, inputs={"x0": no_rows}, expected={"y0": no_rows}
    )
    assert _run_script(empty, tmp_path) == (0, "agrees")
    assert _run_script(_make_failure(_make_model(RELU)), tmp_path) == (1, "DIFFERS")
    product = _make_failure(_make_model(helper.make_node("MatMul", ["x0", "x0"], ["y0"])))
    with pytest.raises(Exception, match="MatMul") as raised:
        run(product.model, product.inputs, product.setup)
    words = f"{raised.type.__name__}: …MatMul…"
    assert _run_script(replace(product, raises=words), tmp_path) == (1, "DIFFERS")
    assert _run_script(replace(product, raises="NotImplemented: …"), tmp_path) == (2, "ERROR")


SECRET = "/home/someone/secret"


def _write_secrets(message: Any) -> None:
    """Write the secret into every text field of a message that is not a name."""
    for field in message.DESCRIPTOR.fields:
        if field.name in ("doc_string", "producer_name", "producer_version"):
            setattr(message, field.name, SECRET)
        elif field.name == "metadata_props":
            message.metadata_props.add(key="code", value=SECRET)
        elif field.message_type is not None and (field.is_repeated or message.HasField(field.name)):
            inner = getattr(message, field.name)
            for item in inner if field.is_repeated else [inner]:
                _write_secrets(item)


def test_model_contains_only_necessary_data():
    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["i"])], SECRET, [],
        [helper.make_tensor_value_info("i", TensorProto.FLOAT, None)],
        value_info=[helper.make_tensor_value_info("i", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Constant", [], ["c"], value_floats=[5.0, 6.0]),
        helper.make_node("If", ["b"], ["t"], then_branch=inner, else_branch=inner),
        helper.make_node("Mine", ["t", "c"], ["y"], domain="own"),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def function(name: str, number: float) -> onnx.FunctionProto:
        constant = helper.make_node("Constant", [], ["k"], value_float=number)
        added = helper.make_node("Add", ["p", "k"], ["q"])
        return helper.make_function("own", name, ["p", "r"], ["q"], [constant, added], opsets[:1])

    values = helper.make_tensor("other", TensorProto.FLOAT, [1], [77.0])
    locations = helper.make_tensor("other_places", TensorProto.INT64, [1], [0])
    graph = helper.make_graph(
        nodes, SECRET,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
         helper.make_tensor_value_info("b", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        sparse_initializer=[helper.make_sparse_tensor(values, locations, [3])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9, domain=SECRET)
    model.functions.extend([function("Mine", 1.0), function("Theirs", 2.0)])
    model.training_info.add().algorithm.initializer.add(name=SECRET)
    model.graph.quantization_annotation.add(tensor_name=SECRET)
    _write_secrets(model)
    feed = {"x": np.ones(2, np.float32), "b": np.array(True)}
    standalone = Standalone.from_piece(Piece(model, {}, ("y",)), feed).model
    assert SECRET.encode() not in standalone.SerializeToString()
    assert [each.name for each in standalone.functions] == ["Mine"]
    assert not standalone.graph.sparse_initializer
    tensors = standalone.graph.initializer
    assert [numpy_helper.to_array(tensor).tolist() for tensor in tensors] == [[5.0, 6.0]]
    inputs = {"x0": feed["x"], "x1": feed["b"]}
    assert run(standalone, inputs, plain_setup("ort-cpu"))["y0"].tolist() == [2.0, 2.0]


@pytest.fixture(scope="module")
def rejected(tmp_path_factory):
    """A folder with the report on a file with a wrong weight."""
    folder = tmp_path_factory.mktemp("rejected")
    shutil.copytree(small_project.create_project(), folder, dirs_exist_ok=True)
    policy = "schema_version: 1\ntask: auto\nconfidential: true\nruntimes:\n"
    bounds = "  ort-cpu:\n    required: always\n    bounds: {noise_ratio: 2.0}\n"
    (folder / "policy.yaml").write_text(policy + bounds)
    check = ["check", "bad.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert cli.main([*check, "--policy", "policy.yaml", "--report", "report"]) == 1
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def project(rejected, monkeypatch):
    monkeypatch.chdir(rejected)
    return rejected


REPRODUCE = ["reproduce", "report", "--no-venv"]


@pytest.mark.further
def test_command_writes_a_reproducing_script(project, tmp_path, capsys):
    output = tmp_path / "bug.zip"
    options = ["--include-confidential", "--output", str(output), "--json"]
    assert cli.main([*REPRODUCE, *options]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["kind"], plain["nodes"], plain["operators"]) == ("exporter", 1, ["Gemm"])
    archive = zipfile.ZipFile(output)
    assert set(archive.namelist()) == FILES | {"layer.py", "weights.npz"}
    assert archive.read("reproduce.py").decode().count("\n") <= 40
    assert b"onnxruntime" in archive.read("environment.txt")
    model = onnx.load_from_string(archive.read("model.onnx"))
    onnx.checker.check_model(model)
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
    archive.extractall(tmp_path / "bug")
    script = [sys.executable, "-I", str(tmp_path / "bug" / "reproduce.py")]
    assert subprocess.run(script, check=False, capture_output=True).returncode == 1
    # With the model's weight the script agrees, so it does not report just any difference.
    right = onnx.load(project / "good.onnx").graph.initializer
    for tensor in model.graph.initializer:
        tensor.CopyFrom(next(t for t in right if t.name == tensor.name))
    onnx.save(model, tmp_path / "bug" / "model.onnx")
    completed = subprocess.run(script, check=False, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout.splitlines()[-1]) == (0, "agrees")


def test_confidential_policy_writes_no_archive(project, tmp_path, capsys):
    output = tmp_path / "bug.zip"
    assert cli.main([*REPRODUCE, "--output", str(output), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["output"] is None
    assert not output.exists()


@pytest.mark.further
def test_accepted_file_has_no_reproducer(project, tmp_path, capsys):
    check = ["check", "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]
    report = str(tmp_path / "report")
    assert cli.main([*check, "--report", report]) == 0
    capsys.readouterr()
    command = ["reproduce", report, "--no-venv", "--output", str(tmp_path / "bug.zip"), "--json"]
    assert cli.main(command) == 1
    assert "PASS" in json.loads(capsys.readouterr().out)["reason"]


def test_samples_not_matching_the_report_are_refused(project, tmp_path):
    images = np.load(project / "images.npy")
    np.save(tmp_path / "other.npy", images + 1)
    command = [*REPRODUCE, "--inputs", str(tmp_path / "other.npy")]
    assert cli.main([*command, "--output", str(tmp_path / "bug.zip")]) == 2
    assert not (tmp_path / "bug.zip").exists()


def test_policy_not_matching_the_report_is_refused(project, tmp_path):
    text = (project / "policy.yaml").read_text().replace("confidential: true", "")
    (tmp_path / "open.yaml").write_text(text)
    command = [*REPRODUCE, "--policy", str(tmp_path / "open.yaml")]
    assert cli.main([*command, "--output", str(tmp_path / "bug.zip")]) == 2
    assert not (tmp_path / "bug.zip").exists()


def test_script_that_agrees_is_not_written(reduced, tmp_path):
    failure, result = reduced("zeros around a pool")
    session = failure.setup.plain
    agreeing = Reproducer(ReducedFailure(**{**vars(failure), "setup": session}), result, {})
    with pytest.raises(NotReproduced):
        agreeing.write(tmp_path / "bug.zip", venv=False)
    assert not (tmp_path / "bug.zip").exists()


@pytest.mark.slow
@pytest.mark.proof
def test_script_needs_only_the_packages_of_its_environment(reduced, tmp_path):
    failure, result = reduced("zeros around a pool")
    Reproducer(failure, result, {}).write(tmp_path / "bug.zip", venv=True)
    assert "new virtual environment" in (
        zipfile.ZipFile(tmp_path / "bug.zip").read("issue.md").decode()
    )
