"""Each lint rule reports a wrong export whose file fails, and the suggested rewrite passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gate import EvaluationData, EvaluationResult, Policy, Reference, SampleSet, Verdict, check
from gate.export.export_warnings import captured
from gate.lint.lint import lint_model
from gate.lint.rules import RULES
from gate.policy.sections import Instruments
from gate.records.evidence import Source
from tests.lint.rule_examples import CASES, Case, Net

POLICY = Policy.default(task="tensors").model_copy(
    update={"instruments": Instruments(noise_samples=8, stability_samples=4, search_inputs=4)}
)
FIRSTS = {case.code: case for case in reversed(CASES)}
TABLE = [
    case if FIRSTS[case.code] is case else pytest.param(case, marks=pytest.mark.proof)
    for case in CASES
]
"""The first case of each rule; the other cases are proofs."""
IDS = [f"{case.code}-{getattr(case.wrong, '__name__', '')}-{case.strategy}" for case in CASES]


def export(
    model: nn.Module, case: Case, path: Path, *, example: tuple[Any, ...], outputs: tuple[str, ...]
) -> None:
    """Export a model by the strategy of its case, with a dynamic batch axis."""
    tensors = [isinstance(each, torch.Tensor) for each in example]
    how: dict[str, Any] = {"input_names": list(case.inputs), "output_names": list(outputs)}
    if case.strategy == "dynamo":
        batch = {0: torch.export.Dim.DYNAMIC}
        how |= {"opset_version": 18, "external_data": False, "verbose": False}
        how["dynamic_shapes"] = tuple(batch if tensor else None for tensor in tensors)
    else:
        how["opset_version"] = 17
        how["dynamic_axes"] = {name: {0: "batch", 1: "columns"} for name in case.inputs}
    with captured(), torch.no_grad():
        if case.strategy == "traced" and all(tensors):
            model = torch.jit.trace(model, example, check_trace=False)
        elif case.strategy == "scripted":
            model = torch.jit.script(model)
        torch.onnx.export(model, example, str(path), dynamo=case.strategy == "dynamo", **how)


def judge(model: nn.Module, case: Case, path: Path) -> EvaluationResult:
    arrays = {name: make().numpy() for name, make in case.inputs.items()}
    return check(
        path,
        reference=Reference(model, Source(factory="tests")),
        data=EvaluationData(SampleSet.from_arrays(arrays), batch_size=case.batch_size),
        policy=POLICY,
    )


@pytest.mark.rows(5)
@pytest.mark.parametrize("case", TABLE, ids=IDS)
def test_wrong_export_is_found_by_lint_and_fails(case: Case, tmp_path: Path) -> None:
    model, path = case.wrong().eval(), tmp_path / "model.onnx"
    codes = {finding.code for finding in lint_model(model, strategy=case.strategy).active}
    assert case.code in codes
    export(model, case, path, example=case.example(), outputs=case.outputs)
    if case.raises is not None:
        with pytest.raises(case.raises):
            judge(case.caller(model), case, path)
        return
    assert judge(case.caller(model), case, path).decision.verdict is case.verdict


@pytest.mark.rows(5)
@pytest.mark.parametrize("case", TABLE, ids=IDS)
def test_rewrite_has_no_finding_and_passes(case: Case, tmp_path: Path) -> None:
    model, path = case.right().eval(), tmp_path / "model.onnx"
    report = lint_model(model, strategy=case.strategy)
    assert (report.findings, report.unread) == ((), ())
    example, outputs = (case.right_example or case.example)(), case.right_outputs or case.outputs
    export(model, case, path, example=example, outputs=outputs)
    decision = judge(model, case, path).decision
    assert decision.verdict is Verdict.PASS, decision.problems


def test_each_rule_has_a_case() -> None:
    assert {case.code for case in CASES} == set(RULES)


# --- Limits of the rules that the pages document -------------------------------------------------


class OneNegativeIndex(Net):
    def before(self, x):
        return x[:, torch.tensor([0, 1, 2, -1, -2, -3])]


class LeadingRankTwo(Net):
    def before(self, x):
        y = x.t() * 1.0
        y[torch.tensor([[0, 1], [2, 3]])] = x.t()[2:6].reshape(2, 2, -1)
        return y.t()


class ExpandedConstant(Net):
    def before(self, x):
        y = x * 1.0
        y[:, :3] = torch.tensor([1.0, 2.0, 3.0])
        return y


@pytest.mark.parametrize(
    ("make", "levels"),
    [(OneNegativeIndex, ["note"]), (LeadingRankTwo, ["warning"]), (ExpandedConstant, [])],
)
def test_model_without_lint_error_exports_correctly(make, levels, tmp_path: Path) -> None:
    model, path = make().eval(), tmp_path / "model.onnx"
    assert [finding.level for finding in lint_model(model).active] == levels
    case = Case("", make, make)
    export(model, case, path, example=case.example(), outputs=case.outputs)
    assert judge(model, case, path).decision.passed
