"""Models with any layout of inputs are judged: right files pass, faults are found."""

from __future__ import annotations

import pytest

from gate.api import EvaluationResult, check
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.export.export import export_model
from gate.measure.job import EvaluationData, Reference
from gate.records.evidence import Source
from gate.records.export import ExportSettings

from .layouts import CASES, Arrays, Case


def judged(case: Case, onnx, arrays: Arrays, **axes: int | None) -> EvaluationResult:
    return check(
        onnx,
        reference=Reference(case.model(), Source(factory="tests:net")),
        data=EvaluationData(SampleSet.from_arrays(arrays).with_batch_axes(axes)),
    )


@pytest.mark.parametrize("name", CASES)
def test_right_file_passes_and_its_batch_axes_are_stated(tmp_path, name):
    case = CASES[name]
    result = judged(case, case.export(tmp_path / "model.onnx"), case.own)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    dataset = result.evidence.dataset
    assert dataset.samples == case.samples
    axes = dataset.batch_axes
    assert ({**axes.inputs, **axes.outputs} if axes else {}) == case.axes


@pytest.mark.parametrize("name", CASES)
def test_fault_is_found(tmp_path, name):
    case = CASES[name]
    result = judged(case, case.export(tmp_path / "wrong.onnx", right=False), case.own)
    assert result.decision.verdict is Verdict.FAIL
    assert any(check.output for check in result.decision.problems)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("right", [True, False])
def test_calls(tmp_path, name, right):
    case = CASES[name]
    onnx = case.export(tmp_path / "model.onnx", right=right)
    result = judged(case, onnx, case.as_calls())
    verdict = Verdict.PASS if right else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    assert result.evidence.dataset.samples == 12
    assert result.evidence.dataset.batch_axes.one_call


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
            key: others
            for key in case.own
            if (others := {a: n for a, n in case.dynamic.get(key, {}).items() if a != inputs[key]})
        },
    )
    export_model(case.model(right=right), case.example(), settings=settings, output=onnx)
    result = judged(case, onnx, case.as_calls() if case.samples == 1 else case.own)
    verdict = Verdict.PASS if right else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    axes = result.evidence.dataset.batch_axes
    assert ({key: axes.inputs[key] for key in case.own} if axes else {}) == (
        inputs if case.axes else {}
    )
