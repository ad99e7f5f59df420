"""A failed export prints at most 40 lines, and the last line contains the remedy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from gate import cli
from gate.errors import ExportError
from gate.export.export import export_model
from gate.records.export import ExportSettings
from tests.exhaustive import exhaustive
from tests.export import failing

MAX_LINES = 40
SAMPLES = np.random.default_rng(0).random((4, 4, 4), dtype=np.float32)
EXAMPLE, STRUCTURED = {"x": SAMPLES}, {"x": SAMPLES, "scale": SAMPLES}
ADVICE = (
    "Set export.",
    "Replace ",
    "Register ",
    "Change ",
    "Use ",
    "Return ",
    "Give ",
    "Call ",
    "Write ",
    "Annotate ",
    "Check ",
    "Take ",
)


def failure_text(model: nn.Module, folder: Path, **settings: Any) -> str:
    """Export `model`, which must fail, and return the error message."""
    requested = {"input_names": None, "output_names": None, **settings}
    output = folder / "model.onnx"
    with pytest.raises(ExportError) as error:
        example = STRUCTURED if isinstance(model, failing.Structured) else EXAMPLE
        export_model(model, example, settings=ExportSettings(**requested), output=output)
    assert not output.exists()
    return str(error.value)


def assert_short(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert all(len(line) < 4000 for line in lines)
    assert lines[-1].startswith(ADVICE), lines[-1]
    assert "graph(" not in text
    assert "\x1b" not in text


UNEXPORTABLE = st.sampled_from(
    [failing.Eigenvalues, failing.GridSample, failing.ShiftedSwish, failing.NeedsShape]
)
EXPORTABLE = st.sampled_from([nn.ReLU, lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)])
NETS = st.recursive(
    st.one_of(UNEXPORTABLE, EXPORTABLE).map(lambda make: make()),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(lambda parts: nn.Sequential(*parts)),
    max_leaves=12,
)


@exhaustive
@pytest.mark.proof
@hypothesis_settings(max_examples=12)
@given(
    net=NETS,
    broken=st.sampled_from([failing.Eigenvalues, failing.ShiftedSwish]),
    strategy=st.sampled_from(["traced", "direct", "scripted"]),
)
def test_failure_of_any_net_is_short(net, broken, strategy):
    with tempfile.TemporaryDirectory() as folder:
        text = failure_text(nn.Sequential(net, broken()), Path(folder), strategy=strategy)
    assert_short(text)


@pytest.mark.further
@pytest.mark.rows(4)
@pytest.mark.parametrize(("kind", "settings", "says"), [
    (failing.Several, {"strategy": "ladder"}, "aten::linalg_eigvals"),
    (failing.Several, {"strategy": "dynamo", "opset": 18}, "aten::linalg_eig"),
    (failing.Branch, {"strategy": "dynamo", "opset": 18}, "the values of a tensor"),
    (failing.WithoutFake, {"strategy": "dynamo", "opset": 18}, "the shape of its result"),
    (failing.WithoutFake, {"strategy": "ladder"}, "parity_gate_tests::without_fake"),
    (failing.SortedByLambda, {"strategy": "scripted"}, "Lambda"),
    (failing.DictOutput, {"strategy": "direct", "output_names": ("a", "b")}, "returns 1"),
    (failing.TextOutput, {"strategy": "ladder"}, "str"),
    (failing.DictInput, {"strategy": "ladder"}, "does not accept the example"),
    (failing.ShiftedSwish, {"custom_symbolics": "nowhere:register"}, "no module named"),
])  # fmt: skip
def test_failure_is_short_and_ends_with_advice(tmp_path, capfd, kind, settings, says):
    text = failure_text(kind(), tmp_path, **settings)
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert any(advice.lower() in lines[-1].lower() for advice in ADVICE), lines[-1]
    assert says in text
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "strategy", ["traced", "direct", pytest.param("dynamo", marks=pytest.mark.proof)]
)
@pytest.mark.parametrize(
    ("kind", "place"), [(failing.Structured, "block"), (failing.Several, "left.1.1")]
)
def test_each_strategy_names_module_and_line(tmp_path, kind, place, strategy):
    text = failure_text(kind(), tmp_path, strategy=strategy, opset=18)
    (line,) = [line for line in text.splitlines() if line.startswith("  aten::linalg_eig")]
    assert f"{place} (tests/export/failing.py:" in line


@exhaustive
@pytest.mark.proof
def test_graph_is_written_to_the_log(tmp_path):
    text = failure_text(failing.Several(blocks=40), tmp_path, strategy="direct")
    assert_short(text)
    log = tmp_path / "model.onnx.export.log"
    assert f"The exporter's log is {log}." in text
    assert len(log.read_text().splitlines()) > 5 * MAX_LINES


def test_file_with_unknown_operators_is_refused(tmp_path):
    text = failure_text(
        failing.ShiftedSwish(),
        tmp_path,
        strategy="direct",
        custom_symbolics="tests.export.failing:register_without_lowering",
    )
    assert "operators that ONNX Runtime does not have: mydomain::ShiftedSwish" in text
    assert_short(text)


@pytest.mark.proof
def test_export_command_prints_at_most_forty_lines(tmp_path, capfd):
    np.save(tmp_path / "samples.npy", SAMPLES)
    command = ["export", "tests.export.failing:Several", "--strategy", "ladder"]
    command += ["--example-input", str(tmp_path / "samples.npy")]
    command += ["--output", str(tmp_path / "model.onnx")]
    assert cli.main(command) == 2
    captured = capfd.readouterr()
    lines = (captured.out + captured.err).splitlines()
    assert len(lines) <= MAX_LINES
    assert "example::shifted_swish at right.odd" in captured.err
    assert lines[-1].startswith(ADVICE), lines[-1]
    assert (tmp_path / "model.onnx.export.log").exists()
