"""Models with any input layout are judged: correct files pass, faults are detected."""

from __future__ import annotations

import numpy as np
import onnx as onnx_
import pytest

from gate.api import EvaluationResult, check
from gate.data.batch_axes import arrange
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.errors import DataError, InputMismatch
from gate.export.export import export_model
from gate.measure.job import EvaluationData, Reference
from gate.records.evidence import Source, TensorSpec
from gate.records.export import ExportSettings

from .layouts import CASES, Arrays, Case


def check_file(case: Case, onnx, arrays: Arrays, **axes: int | None) -> EvaluationResult:
    return check(
        onnx,
        reference=Reference(case.model(), Source(factory="tests:net")),
        data=EvaluationData(SampleSet.from_arrays(arrays).with_batch_axes(axes)),
    )


@pytest.mark.parametrize("name", CASES)
def test_right_file_passes_and_its_batch_axes_are_stated(tmp_path, name):
    case = CASES[name]
    result = check_file(case, case.export(tmp_path / "model.onnx"), case.own)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    dataset = result.evidence.dataset
    assert dataset.samples == case.samples
    axes = dataset.batch_axes
    assert ({**axes.inputs, **axes.outputs} if axes else {}) == case.axes


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", CASES)
def test_fault_is_found(tmp_path, name):
    case = CASES[name]
    result = check_file(case, case.export(tmp_path / "wrong.onnx", right=False), case.own)
    assert result.decision.verdict is Verdict.FAIL
    assert any(check.output for check in result.decision.problems)
    if name == "recurrent":  # the state, whose batch is on axis 1, is compared per sample
        outputs = [output for runtime in result.evidence.runtimes for output in runtime.outputs]
        state = next(output for output in outputs if output.name == "h")
        assert len({worst.sample for worst in state.worst}) > 1


@pytest.mark.further
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("right", [True, False])
def test_model_call_with_layout(tmp_path, name, right):
    case = CASES[name]
    onnx = case.export(tmp_path / "model.onnx", right=right)
    result = check_file(case, onnx, case.as_calls())
    verdict = Verdict.PASS if right else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    assert result.evidence.dataset.samples == 12
    assert result.evidence.dataset.batch_axes.is_unbatched


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("right", [True, False])
def test_exported_file_is_judged(tmp_path, name, right):
    case, onnx = CASES[name], tmp_path / "model.onnx"
    inputs = {key: case.axes.get(key, 0) for key in case.own}
    settings = ExportSettings(
        opset="auto",
        strategy="direct",
        lint="off",
        batch_axes=inputs,
        dynamic_axes={
            key: rest
            for key in case.own
            if (rest := {a: n for a, n in case.dynamic.get(key, {}).items() if a != inputs[key]})
        },
    )
    export_model(case.model(right=right), case.example(), settings=settings, output=onnx)
    result = check_file(case, onnx, case.as_calls() if case.samples == 1 else case.own)
    verdict = Verdict.PASS if right else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    axes = result.evidence.dataset.batch_axes
    assert ({key: axes.inputs[key] for key in case.own} if axes else {}) == (
        inputs if case.axes else {}
    )


X, H, SR = (CASES["voice"].own[name] for name in ("x", "state", "sr"))
WRONG: dict[str, tuple[str, Arrays]] = {
    "missing input": ("voice", {"x": X, "state": H}),
    "unknown input": ("voice", {"x": X, "state": H, "rate": SR}),
    "one input too many": ("voice", {"x": X, "state": H, "sr": SR, "other": X}),
    "state of another batch": ("voice", {"x": X, "state": H[:, :5], "sr": SR}),
    "state in rows, scalar not": ("voice", {"x": X, "state": H.swapaxes(0, 1), "sr": SR}),
    "state as a call, the rest not": ("voice", {"x": X, "state": H[None], "sr": SR}),
    "sampling rates that differ": (
        "voice",
        {"x": X, "state": H.swapaxes(0, 1), "sr": np.arange(12) + 8000},
    ),
    "layers of the state": ("voice", {"x": X, "state": H[:1], "sr": SR}),
    "hidden size of the state": ("voice", {"x": X, "state": H[..., :3], "sr": SR}),
    "swapped by name": ("voice", {"x": H, "state": X, "sr": SR}),
    "scalar as a vector": ("voice", {"x": X, "state": H, "sr": SR[None]}),
    "all empty": ("voice", {"x": X[:0], "state": H[:, :0], "sr": SR}),
    "calls of other numbers": ("graph", {"x": np.stack([CASES["graph"].own["x"]] * 3),
                                         "edge_index": CASES["graph"].calls["edge_index"]}),
    "a graph with three rows of edges": (
        "graph",
        {"x": CASES["graph"].own["x"], "edge_index": np.zeros((3, 14), np.int64)},
    ),
    "channels last": ("picture", {"image": np.zeros((12, 10, 10, 3), np.float32)}),
    "one channel": ("picture", {"image": np.zeros((1, 10, 10), np.float32)}),
    "no axes": ("picture", {"image": np.float32(1)}),
    "another length": (
        "lists",
        {"maps.0": CASES["lists"].own["maps.0"], "maps.1": CASES["lists"].own["maps.1"][:7]},
    ),
    "swapped pictures": (
        "masks",
        {**CASES["masks"].own, "image": CASES["masks"].own["boxes"],
         "boxes": CASES["masks"].own["image"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_samples_are_refused(tmp_path, wrong):
    name, arrays = WRONG[wrong]
    case = CASES[name]
    onnx = case.export(tmp_path / "model.onnx")
    with pytest.raises((InputMismatch, DataError)) as raised:
        check_file(case, onnx, arrays)
    assert "\n" not in str(raised.value)


def test_wrong_axis_order_error_contains_the_transpose(tmp_path):
    case = CASES["lists"]
    onnx = case.export(tmp_path / "model.onnx")
    arrays = {**case.own, "maps.0": np.zeros((12, 6, 6, 2), np.float32)}
    with pytest.raises(InputMismatch, match=r"x\.transpose\(0, 3, 1, 2\)"):
        check_file(case, onnx, arrays)


@pytest.mark.parametrize(
    ("axes", "samples"),
    [({"image": None}, 1), ({"image": 0}, 3)],
)
def test_stated_axis_overrides_the_inferred_axis(tmp_path, axes, samples):
    case = CASES["picture"]
    onnx = case.export(tmp_path / "model.onnx")
    result = check_file(case, onnx, case.own, **axes)
    assert result.evidence.dataset.samples == samples


@pytest.mark.parametrize("axes", [{"picture": 0}, {"image": 3}])
def test_missing_stated_axis_is_refused(tmp_path, axes):
    case = CASES["picture"]
    with pytest.raises(InputMismatch, match="--batch-axis"):
        check_file(case, case.export(tmp_path / "model.onnx"), case.own, **axes)


def test_ambiguous_batch_axis_is_refused(tmp_path):
    case = CASES["picture"]
    onnx = case.export(tmp_path / "model.onnx")
    model = onnx_.load(onnx)
    dims = model.graph.output[0].type.tensor_type.shape.dim
    for name in ("height", "width"):
        dims.add().dim_param = name
    onnx_.save(model, onnx)
    with pytest.raises(InputMismatch, match="'height' or 'width'"):
        check_file(case, onnx, {"image": np.zeros((3, 10, 10), np.float32)})


@pytest.mark.parametrize("symbols", [("nodes", "edges"), ("s77", "s18")])
@pytest.mark.parametrize("extra", [False, True])
def test_one_call_is_one_sample_if_no_dimension_is_shared(symbols, extra):
    nodes, edges = symbols
    arrays = {"x": np.ones((12, 9, 5), np.float32), "edges": np.ones((7, 2), np.int64)}
    inputs = [
        TensorSpec(name="x", dtype="float32", shape=(nodes, 9, 5)),
        TensorSpec(name="edges", dtype="int64", shape=(edges, 2)),
    ]
    if extra:
        arrays["scale"] = np.float32(2.0)
        inputs.append(TensorSpec(name="scale", dtype="float32", shape=()))
    outputs = [TensorSpec(name="y", dtype="float32", shape=(nodes, edges, 2))]
    arranged = arrange(SampleSet.from_arrays(arrays), inputs, outputs)
    assert len(arranged) == 1
    assert arranged.layout.is_unbatched
