"""Each export failure has a cause and a remedy from the table."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.onnx.errors import OnnxExporterError, UnsupportedOperatorError

from gate.export import failures
from gate.export.export_warnings import shorten_message
from gate.export.failures import FAILURES, MAX_LINES, ExportFailure, UnsupportedOperator, family
from tests.exhaustive import for_each

OPERATORS = st.builds(
    UnsupportedOperator,
    name=st.from_regex(r"(aten|prim|mine)::[a-z_]{1,30}", fullmatch=True),
    path=st.none() | st.text(max_size=200),
    source=st.none() | st.just("pkg/net.py:12"),
    since=st.none() | st.integers(9, 23),
    reason=st.none() | st.text(max_size=500),
)


@pytest.mark.parametrize(("error", "cause", "remedy"), [
    (
        UnsupportedOperatorError("aten::sdpa", 13, 14),
        "the operator aten::sdpa can't be exported at opset 13",
        "Set export.opset to 14 or more.",
    ),
    (
        UnsupportedOperatorError("aten::median", 13, None),
        "the operator aten::median can't be exported at opset 13",
        "Replace it in the model by operators that ONNX has, or try export.strategy: direct or dynamo.",
    ),
    (
        UnsupportedOperatorError("mine::op", 13, None),
        "the operator mine::op is not torch's own",
        "Register a symbolic function",
    ),
    (
        OnnxExporterError(
            "Unsupported: ONNX export of quantile in opset 13. Please try opset version 17."
        ),
        "the operator aten::quantile can't be exported: quantile",
        "Set export.opset to 17 or more.",
    ),
    (
        OnnxExporterError(
            "Unsupported: ONNX export of operator Pad, negative axis. Please feel free to "
            "request support or submit a pull request"
        ),
        "the operator aten::Pad can't be exported: Pad, negative axis",
        "Change this call in the model, or try export.strategy: direct or dynamo.",
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
        RuntimeError(
            "Only tuples, lists and Variables are supported as JIT inputs/outputs. Here, "
            "received an input of unsupported type: Config"
        ),
        "a trace takes only tensors; it was called with Config",
        "settings to the model's constructor",
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


def test_exception_chain_is_read():
    error = RuntimeError("Failed to do it")
    error.__cause__ = UnsupportedOperatorError("aten::eig", 13, None)
    assert ExportFailure.from_error(error).operators[0].name == "aten::eig"


def test_circular_causes_end():
    error = RuntimeError("round")
    error.__cause__ = error
    assert ExportFailure.from_error(error).cause.endswith("RuntimeError: round")


@pytest.mark.parametrize(("operator", "why"), [
    ("aten::_native_multi_head_attention", "fused attention"),
    ("aten::_upsample_bicubic2d_aa", "antialiased"),
    ("aten::fft_fft2", "complex"),
    ("aten::_fft_r2c", "complex"),
    ("aten::linalg_eigvals", "decomposition"),
    ("prim::DictConstruct", "a dict in a scripted module"),
    ("aten::is_autocast_enabled", "bookkeeping"),
    ("aten::swapaxes", "hidden in a traced submodule"),
])  # fmt: skip
def test_operator_families(operator, why):
    operator_family = family(operator)
    assert operator_family is not None
    assert why in operator_family.why
    assert (
        operator_family.strategy is None
        or family(operator, tried=[operator_family.strategy]) is None
    )


def test_failed_strategy_is_not_suggested():
    error = UnsupportedOperatorError("aten::fft_fft2", 18, None)
    assert "strategy to dynamo" in ExportFailure.from_error(error, strategy="direct").remedy
    assert "dynamo" not in ExportFailure.from_error(error, strategy="dynamo").remedy


def test_no_strategy_is_suggested_after_all_failed():
    tried = ("traced", "direct", "scripted", "dynamo")
    error = UnsupportedOperatorError("aten::fft_fft2", 18, None)
    refusal = ExportFailure.from_error(error, strategy="traced").for_all(tried, cause="none could")
    assert "export.strategy" not in refusal.text()
    assert refusal.remedy == "Replace it in the model by operators that ONNX has."
    dictionary = ExportFailure.from_error(
        RuntimeError("Encountering a dict at the output of the tracer")
    )
    assert "export.strategy" in dictionary.text()
    assert "export.strategy" not in dictionary.for_all(tried, cause="none could").text()
    median = ExportFailure.from_error(
        ValueError(), operators=[UnsupportedOperator("aten::a", since=16)]
    )
    assert median.for_all(tried, cause="x").remedy == "Set export.opset to 16 or more."


def test_text_of_several_operators():
    eig = [UnsupportedOperator("aten::eig", f"layer.{i}", "pkg/net.py:3") for i in range(6)]
    grid = UnsupportedOperator("aten::grid_sampler", "", None, since=16)
    swish = UnsupportedOperator("mine::swish", "head", "pkg/net.py:9")
    refusal = ExportFailure.from_error(
        UnsupportedOperatorError("aten::eig", 13, None),
        operators=[*eig, grid, swish],
        strategy="direct",
    )
    assert refusal.text(notes=["traced: failed too"], log=Path("x.log")).splitlines() == [
        "3 operators can't be exported at opset 13: aten::eig, aten::grid_sampler, mine::swish",
        "traced: failed too",
        "  aten::eig (a matrix decomposition, which ONNX has none of) at layer.0 (pkg/net.py:3), "
        "layer.1 (pkg/net.py:3), layer.2 (pkg/net.py:3), layer.3 (pkg/net.py:3), and 2 more",
        "  aten::grid_sampler (since opset 16) at the model itself",
        "  mine::swish at head (pkg/net.py:9)",
        "Ways out:",
        "  a higher export.opset: 16 has aten::grid_sampler; none that this exporter writes has "
        "aten::eig, mine::swish.",
        "  another form: other operators in the model, or try export.strategy: dynamo.",
        "    a matrix decomposition, which ONNX has none of: Replace it in the model, or compute it "
        "outside of the model.",
        "  a symbolic function of your own: export.custom_symbolics: package.module:register "
        "(docs/custom-operators.md).",
        "The exporter's log is x.log.",
        "Replace aten::eig in the model, or try export.strategy: dynamo; register a symbolic "
        "function for mine::swish (docs/custom-operators.md); set export.opset to 16 or more for "
        "aten::grid_sampler.",
    ]


def test_common_opset_is_the_remedy():
    operators = [UnsupportedOperator("aten::a", since=14), UnsupportedOperator("aten::b", since=16)]
    refusal = ExportFailure.from_error(RuntimeError(), operators=operators)
    assert refusal.remedy == "Set export.opset to 16 or more."


@given(
    operators=st.lists(OPERATORS, max_size=80),
    message=st.text(max_size=3000) | st.just("graph(%0):\n" * 5000),
    notes=st.lists(st.text(max_size=300), max_size=20),
    strategy=st.sampled_from([None, "traced", "direct", "scripted", "dynamo"]),
)
def test_text_is_short_and_ends_with_the_remedy(operators, message, notes, strategy):
    refusal = ExportFailure.from_error(
        RuntimeError(message), operators=operators, strategy=strategy
    )
    lines = refusal.text(notes=notes, log=Path("model.onnx.export.log")).splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[-1].strip() == refusal.remedy.strip()
    assert refusal.remedy.strip()
    assert max(len(line) for line in lines) < 6000
    for operator in operators:
        assert operator.name in "\n".join(lines)


def test_graph_dump_is_removed():
    assert shorten_message(RuntimeError("\n  first.\ngraph(%0):\n")) == "RuntimeError: first"
    assert len(shorten_message(RuntimeError("x" * 100_000))) < 300
    error = torch.onnx.OnnxExporterError("It failed.\n" + "graph(%x : Tensor):\n" * 13_000)
    assert "graph(" not in ExportFailure.from_error(error).text()


EXPORT = Path(failures.__file__).parent


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


@pytest.mark.parametrize("file", sorted(EXPORT.glob("*.py")), ids=lambda file: file.name)
def test_failure_texts_are_only_in_the_table(file):
    """The code of a failure is a key of the table; only the table contains the texts."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("because", "from_code", "failure_texts", "export_error", "_cause"):
                code = node.args[0]
                assert not isinstance(code, ast.JoinedStr), node.lineno
                assert not isinstance(code, ast.Constant) or code.value in FAILURES, node.lineno
            texts = [k.value for k in node.keywords if k.arg in ("cause", "remedy")]
            assert file.name == "failures.py" or not any(
                isinstance(text, ast.JoinedStr) for text in texts
            ), node.lineno
