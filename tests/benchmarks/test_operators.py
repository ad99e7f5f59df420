"""The error models hold for ONNX Runtime, and an exceeded model is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch

import pytest

from benchmarks.operators.__main__ import cases, main
from gate.reference import error_models

pytestmark = pytest.mark.further
OPERATORS = ("sigmoid", "elu", "cumsum", "lstm", "adaptive_avg_pool2d")


@pytest.fixture(scope="module", autouse=True)
def measured():
    """The operators that have cases. Drawing all inputs takes 5 s and 3 GB: those of OPERATORS are kept."""
    operators, kept = set(), []
    for case in cases():
        operators.add(case.operator)
        if case.operator in OPERATORS:
            kept.append(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "benchmarks.operators.__main__.cases",
            lambda only: (case for case in kept if fnmatch(case.operator, only)),
        )
        yield operators


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_is_within_its_bound(name, tmp_path, capsys):
    assert main(["--only", name, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["operator"] for row in rows} == {name}
    assert all(row["runtime"] >= 0.0 and not row["exceeds"] for row in rows)
    assert name[:12] in capsys.readouterr().out


@pytest.mark.parametrize(("name", "part"), [("sigmoid", "absolute"), ("cumsum", "terms")])
def test_a_model_that_is_too_narrow_is_told(name, part, monkeypatch, capsys):
    narrow = replace(error_models.MODELS[name], **{part: 0.0 if part == "absolute" else None})
    monkeypatch.setitem(error_models.MODELS, name, narrow)
    assert main(["--only", name]) == 1
    assert "!" in capsys.readouterr().out


def test_no_such_operator(capsys):
    assert main(["--only", "aten::*"]) == 2
    assert "names are those of aten" in capsys.readouterr().err


def test_every_row_that_onnx_has_is_measured(measured):
    """Exclude names that are parts of other operators, or differ only in their dimension."""
    rows = [
        (names, model)
        for table in (error_models._FUNCTIONS, error_models._SUMS)
        for names, model in table.items()
    ]
    unmeasured = {
        names.split()[0]
        for names, model in rows
        if model.onnx and not measured & set(names.split())
    }
    assert unmeasured == {"glu", "logit", "cdist", "_fft_r2c"}
