"""Each export failure has a cause and a remedy from the table."""

from __future__ import annotations

import string

import pytest
from torch.onnx.errors import OnnxExporterError, UnsupportedOperatorError

from gate.export.failures import FAILURES, ExportFailure
from tests.exhaustive import for_each


@pytest.mark.parametrize(("error", "cause", "remedy"), [
    (
        OnnxExporterError(
            "Unsupported: ONNX export of quantile in opset 13. Please try opset version 17."
        ),
        "the operator aten::quantile can't be exported: quantile",
        "Set export.opset to 17 or more.",
    ),
    (
        RuntimeError("Bad rank.  [Caused by x]. The containing node has kind 'onnx::Add'.]"),
        "the exporter failed at the operator onnx::Add: RuntimeError: Bad rank",
        "Simplify this part",
    ),
    (
        RuntimeError("required keyword attribute 'Subgraph' is undefined"),
        "the scripted module calls Python code",
        "as torch.ops.namespace.name",
    ),
    (
        RuntimeError(
            "Unsupported: ONNX export of transpose for tensor of unknown rank.  [Caused by the "
            "value '5'. The containing node has kind 'onnx::Add'.]"
        ),
        "the exporter has lost a shape or a type that it needs: RuntimeError: Unsupported",
        "Set export.strategy to direct if the module was traced",
    ),
    (
        RuntimeError('x INTERNAL ASSERT FAILED at "/a/b.cpp":7, please report a bug. No.'),
        "the exporter failed inside: RuntimeError: x INTERNAL ASSERT FAILED",
        "Set export.strategy to direct or dynamo",
    ),
    (
        OnnxExporterError("ONNX export failed: Couldn't export Python operator Swish"),
        "the Python operator Swish has no ONNX form",
        "a static method symbolic(g, *inputs)",
    ),
    (
        ValueError("Constraints violated (batch)! For more information, run with x."),
        "forward fixes an axis that should be dynamic: ValueError: Constraints violated",
        "Use the tensor's own shape there",
    ),
    (ValueError(""), "the exporter failed: ValueError: no message", "Simplify"),
])  # fmt: skip
def test_error_has_cause_and_remedy(error, cause, remedy):
    refusal = ExportFailure.from_error(error)
    assert refusal.cause.startswith(cause)
    assert remedy in refusal.remedy


def test_failed_strategy_is_not_suggested():
    error = UnsupportedOperatorError("aten::fft_fft2", 18, None)
    assert "strategy to dynamo" in ExportFailure.from_error(error, strategy="direct").remedy
    assert "dynamo" not in ExportFailure.from_error(error, strategy="dynamo").remedy


@for_each(FAILURES)
def test_each_code_has_a_cause_and_a_remedy(code):
    named = {
        name
        for text in FAILURES[code][:2]
        for _, name, _, _ in string.Formatter().parse(text)
        if name and not name.isdigit()
    }
    params: dict[str, object] = {**dict.fromkeys(named, "x"), "error": 0.5}
    failure = ExportFailure.from_code(code, "whole", "group", **params)
    assert failure.code == code
    assert failure.cause
    assert not failure.cause.endswith(".")
    assert failure.remedy.endswith(".")
    assert failure.text().splitlines()[-1] == failure.remedy
