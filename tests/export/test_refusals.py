from __future__ import annotations

import pytest
from torch.onnx.errors import UnsupportedOperatorError

from gate.export.refusals import Refusal, brief


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (
            UnsupportedOperatorError("aten::sdpa", 13, 14),
            "the operator aten::sdpa can't be exported at opset 13",
            "Set export.opset to 14 or more.",
        ),
        (
            UnsupportedOperatorError("aten::eig", 13, None),
            "the operator aten::eig can't be exported at opset 13",
            "Replace it in the model",
        ),
        (
            UnsupportedOperatorError("mine::op", 13, None),
            "the operator mine::op is not torch's own",
            "register a symbolic function",
        ),
        (
            RuntimeError("Bad rank.  [Caused by x]. The containing node has kind 'onnx::Add'.]"),
            "the exporter failed at the operator onnx::Add: RuntimeError: Bad rank",
            "Simplify this part",
        ),
        (ValueError(""), "the exporter failed: ValueError: no message", "Simplify"),
    ],
)
def test_names_the_operator_and_the_way_out(error: Exception, cause: str, remedy: str) -> None:
    refusal = Refusal.of(error)
    assert refusal.cause.startswith(cause)
    assert remedy in refusal.remedy


def test_brief_is_one_line() -> None:
    assert brief(RuntimeError("\n  first.\ngraph(%0):\n")) == "RuntimeError: first"
