from __future__ import annotations

import io

import pytest
import torch

from gate.export.export_warnings import captured
from gate.export.failures import MAX_LINES, ExportFailure, explain_error, unsupported
from gate.records.export import Strategy
from tests.export import failing

X = (torch.rand(2, 4, 4),)
TEXT = (torch.rand(2, 4, 4), "double")
DICT = ({"image": torch.rand(2, 4, 4)},)
LEGACY: tuple[Strategy, ...] = ("traced", "direct", "scripted")
FAILING_FILE = "tests/export/failing.py"


def find_line(code: str) -> str:
    """Return `tests/export/failing.py:N` for the first line N with this code."""
    with open(failing.__file__, encoding="utf-8") as source:  # noqa: PTH123
        numbers = [i for i, line in enumerate(source, 1) if code in line]
    return f"{FAILING_FILE}:{numbers[0]}"


EIGVALS_LINE = find_line("torch.linalg.eigvals")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def export_failure(model, strategy, *, opset=13, arguments=X):
    """Export as the strategies do. Return the failure, or None."""
    model = model.eval().requires_grad_(False)
    keywords = {"dynamo": strategy == "dynamo", "opset_version": opset}
    module, error = model, None
    with captured():
        try:
            if strategy == "traced":
                module = torch.jit.trace(model, arguments, check_trace=False)
            if strategy == "scripted":
                module = torch.jit.script(model)
            torch.onnx.export(module, arguments, io.BytesIO(), **keywords)
        except Exception as caught:
            error = caught
    if error is None:
        return None
    return explain_error(error, model, arguments, strategy=strategy, exporter_keywords=keywords)


def operator_locations(refusal: ExportFailure) -> set[tuple[str, str | None]]:
    return {(operator.name, operator.path) for operator in refusal.operators}


@pytest.mark.parametrize("strategy", LEGACY)
def test_each_unsupported_operator_has_its_module(strategy):
    refusal = export_failure(failing.Several(), strategy)
    assert refusal is not None
    assert EIGVALS_LINE in {operator.source for operator in refusal.operators}
    eigenvalues = ("left.0.1", "left.1.1", "right.even.0")
    assert operator_locations(refusal) == {
        *(("aten::linalg_eigvals", location) for location in eigenvalues),
        *(("aten::real", location) for location in eigenvalues),
        ("example::shifted_swish", "right.odd"),
        ("aten::grid_sampler", "head"),
    }


@pytest.mark.proof
def test_dynamo_failure_has_each_operator_with_its_module():
    refusal = export_failure(failing.Several(), "dynamo", opset=18)
    assert refusal is not None
    assert operator_locations(refusal) == {
        *(("aten::linalg_eig", location) for location in ("left.0.1", "left.1.1", "right.even.0")),
        ("example::shifted_swish", "right.odd"),
    }
    assert {item.source for item in refusal.operators if "eig" in item.name} == {EIGVALS_LINE}


def test_operators_in_scripted_loops_and_branches_are_found():
    refusal = export_failure(failing.LoopedEigenvalues(), "scripted")
    assert refusal is not None
    assert ("aten::linalg_eigvals", "") in operator_locations(refusal)


def test_registrations_are_restored():
    from torch.onnx._internal.torchscript_exporter import registration

    before = dict(registration.registry._registry)
    unsupported(failing.Several().eval(), X, strategy="direct", opset=13)
    assert registration.registry._registry == before


FREQUENT = [
    (failing.GridSample, "direct", X, "aten::grid_sampler", "Set export.opset to 16 or more."),
    (failing.Antialias, "traced", X, "_upsample_bilinear2d_aa", "Set export.strategy to dynamo"),
    (failing.Antialias, "scripted", X, "Antialias is not yet supported", "direct or dynamo"),
    (failing.Fourier, "direct", X, "aten::fft_fft2", "Set export.strategy to dynamo"),
    (failing.Attention, "traced", X, "_native_multi_head_attention", "set_fastpath_enabled(False)"),
    (failing.Attention, "scripted", X, "aten::is_autocast_enabled", "strategy to direct or dynamo"),
    (failing.UnevenPool, "direct", X, "output size that are not factor", "Change this call"),
    (failing.Median, "direct", X, "aten::median", "Replace it in the model by operators"),
    (failing.ShiftedSwish, "direct", X, "is not torch's own", "docs/custom-operators.md"),
    (failing.DictInput, "direct", DICT, "without its argument x", "let forward take the tensors"),
    (failing.DictInput, "dynamo", DICT, "without its argument x", "let forward take the tensors"),
    (
        failing.TextInput,
        "traced",
        TEXT,
        "called with Tuple[Tensor, str]",
        "the model's constructor",
    ),
    (failing.DictOutput, "traced", X, "can't return a dict", "strategy to direct or dynamo"),
    (failing.DictOutput, "scripted", X, "prim::DictConstruct", "strategy to direct or dynamo"),
    (failing.TextOutput, "traced", X, "something that is no tensor", "Return the tensors alone"),
    (
        failing.SortedByLambda,
        "scripted",
        X,
        "Lambda aren't supported",
        "strategy to traced or direct",
    ),
    (failing.NormBranch, "scripted", X, "the exporter failed: TypeError: norm()", "Simplify this"),
    (failing.Branch, "dynamo", X, "decides by the values of a tensor", "torch.where or torch.cond"),
    (failing.WithoutFake, "dynamo", X, "has no rule for the shape", "torch.library.register_fake"),
    (failing.Eigenvalues, "dynamo", X, "aten::linalg_eig", "compute it outside of the model"),
]


@pytest.mark.rows(5)
@pytest.mark.parametrize(("kind", "strategy", "arguments", "cause", "remedy"), FREQUENT)
def test_frequent_failures_have_cause_and_remedy(kind, strategy, arguments, cause, remedy):
    refusal = export_failure(kind(), strategy, opset=13, arguments=arguments)
    assert refusal is not None
    lines = refusal.text().splitlines()
    assert cause in refusal.cause
    assert remedy in lines[-1]
    assert len(lines) <= MAX_LINES
    assert not any("\x1b" in line or line.startswith("graph(") for line in lines)


@pytest.mark.parametrize(("kind", "strategy", "code"), [
    (failing.Branch, "dynamo", "if x.sum() > 0:"),
    (failing.SortedByLambda, "scripted", "key=lambda row"),
    (failing.Antialias, "scripted", "antialias=True"),
])  # fmt: skip
def test_failure_names_the_source_line(kind, strategy, code):
    refusal = export_failure(kind(), strategy)
    assert refusal is not None
    assert f" at {find_line(code)}" in refusal.cause


@pytest.mark.rows(4)
@pytest.mark.parametrize(("kind", "strategy", "opset"), [
    (failing.GridSample, "direct", 16),
    (failing.Antialias, "dynamo", 18),
    (failing.Fourier, "dynamo", 18),
    (failing.DictOutput, "direct", 18),
])  # fmt: skip
def test_suggested_setting_exports_the_model(kind, strategy, opset):
    assert export_failure(kind(), strategy, opset=opset) is None
