from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gate import Verdict, check
from gate.errors import ExportError
from gate.export.export import export_model
from gate.export.export_warnings import captured
from gate.export.torchscript_settings import overriding, registered
from gate.export.verify_export import foreign_in
from gate.records.export import ExportSettings
from tests.export import custom_example, failing

ROOT = Path(__file__).parents[2]
SPEC = "tests.export.custom_example:register"
NAME = "example::shifted_swish"
TARGET = torch.ops.example.shifted_swish.default
SAMPLES = torch.linspace(-4, 4, 256).reshape(64, 4)


def export(path: Path, *, strategy: str, table: dict[Any, Any], opset: int = 18) -> Path:
    model = custom_example.build().eval().requires_grad_(False)
    reported: dict[str, Any] = {
        "opset_version": opset,
        "input_names": ["input"],
        "output_names": ["logits"],
        "verbose": False,
    }
    if strategy == "dynamo":
        reported |= {"dynamo": True, "external_data": False, "custom_translation_table": table}
        reported |= {"dynamic_shapes": ({0: "batch"},)}
    else:
        axes = {name: {0: "batch"} for name in ("input", "logits")}
        reported |= {"dynamo": False, "dynamic_axes": axes}
    make: dict[str, Callable[[], Any]] = {
        "traced": lambda: torch.jit.trace(model, (SAMPLES,)),
        "scripted": lambda: torch.jit.script(model),
    }
    with captured():
        module = make.get(strategy, lambda: model)()
        torch.onnx.export(module, (SAMPLES,), str(path), **reported)
    return path


def registry() -> dict[str, Any]:
    from torch.onnx._internal.torchscript_exporter import registration

    return registration.registry._registry


@pytest.mark.rows(3)
@pytest.mark.parametrize("strategy", ["traced", "direct", "scripted", "dynamo"])
def test_custom_operator_example_passes(tmp_path, strategy):
    with registered(SPEC, opset=18) as symbolics:
        path = export(tmp_path / "model.onnx", strategy=strategy, table=symbolics.translations)
    np.save(tmp_path / "samples.npy", SAMPLES.numpy())
    verdicted = check(path, "tests.export.custom_example:build", tmp_path / "samples.npy")
    failed = [item for item in verdicted.decision.checks if item.verdict in ("FAIL", "ERROR")]
    assert verdicted.decision.verdict is Verdict.PASS, failed
    assert foreign_in(path) == ()


def test_wrong_symbolic_function_fails(tmp_path):
    def wrong(g: Any, x: Any, shift: Any) -> Any:
        return custom_example.symbolic(g, x, g.op("Constant", value_t=torch.tensor(2.4)))

    with overriding(NAME, wrong, opset=18):
        path = export(tmp_path / "model.onnx", strategy="direct", table={})
    np.save(tmp_path / "samples.npy", SAMPLES.numpy())
    verdicted = check(path, "tests.export.custom_example:build", tmp_path / "samples.npy")
    assert verdicted.decision.verdict is Verdict.FAIL


def test_page_contains_the_tested_code():
    page = (ROOT / "docs/custom-operators.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    code = Path(custom_example.__file__).read_text(encoding="utf-8")
    tested = code.partition("from __future__ import annotations\n")[2]
    assert [line for block in blocks for line in block.splitlines() if line] == [
        line for line in tested.splitlines() if line
    ]


def test_registrations_are_removed(tmp_path):
    before = dict(registry())
    with pytest.raises(ZeroDivisionError), registered(SPEC, opset=18) as symbolics:
        assert NAME in registry()
        assert symbolics.translations == {TARGET: custom_example.translation}
        raise ZeroDivisionError
    assert registry() == before
    with registered(None, opset=13) as symbolics:
        assert (symbolics.symbolics, symbolics.translations) == ({}, {})
    with pytest.raises(torch.onnx.OnnxExporterError, match="unrecognized namespace example::"):
        export(tmp_path / "model.onnx", strategy="direct", table={})


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Return a function that writes a module to the current folder and returns its `register`."""

    def write(code: str) -> str:
        (tmp_path / "custom_operators_under_test.py").write_text(
            "import torch\n" + textwrap.dedent(code)
        )
        return "custom_operators_under_test:register"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "custom_operators_under_test", raising=False)
    return write


@pytest.mark.parametrize(("spec", "says"), [
    ("register", "expected package.module:function, for example"),
    ("mypackage:", "expected package.module:function"),
    ("my package:register", "expected package.module:function"),
    ("no_such_module_anywhere:register", "no module named 'no_such_module_anywhere' for export"),
    ("tests.export.custom_example:nope", "nope is not there, expected a function in"),
    ("tests.export.custom_example:__doc__", "__doc__ is not callable"),
])  # fmt: skip
def test_invalid_setting_is_refused(spec, says):
    with pytest.raises(ExportError, match=re.escape(says)), registered(spec, opset=13):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("1 / 0", " raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", " raised SystemExit"),
        ("pass", " registered nothing"),
        (
            "s.legacy('swish', abs)",
            "not the name of an operator: 'swish'. Expected namespace::name",
        ),
        ("s.legacy(3, abs)", "not the name of an operator: 3"),
        ("s.legacy('aten::add.Tensor', abs)", "without an overload"),
        ("s.legacy('example::swish', abs)", "torch has no operator example::swish. Check the"),
        (f"s.legacy('{NAME}', 'swish')", "is 'swish', expected a function"),
        ("s.dynamo(torch.ops.aten.relu, abs)", "expected one overload of it: aten.relu.default"),
        (f"s.dynamo('{NAME}', abs)", f"dynamo() got '{NAME}', expected an operator such as"),
        ("s.dynamo(torch.ops.aten.relu.default, None)", "aten.relu.default is None, expected"),
    ],
)
def test_invalid_registration_function_is_refused(
    module_of: Callable[[str], str], body: str, says: str
) -> None:
    spec = module_of(f"def register(s):\n    {body}\n")
    before = dict(registry())
    with (
        pytest.raises(ExportError, match=f"custom_symbolics: {spec}.*{re.escape(says)}"),
        registered(spec, opset=13),
    ):
        pass
    assert registry() == before


def test_operator_of_unknown_domain_is_found(tmp_path):
    def not_lowered(g: Any, x: Any, shift: Any) -> Any:
        return g.op("mydomain::ShiftedSwish", x, shift).setType(x.type())

    with overriding(NAME, not_lowered, opset=18):
        path = export(tmp_path / "model.onnx", strategy="direct", table={})
    assert foreign_in(path) == ("mydomain::ShiftedSwish at /1/ShiftedSwish",)


def test_file_with_unknown_operators_is_refused(tmp_path):
    with pytest.raises(ExportError, match="does not have: mydomain::ShiftedSwish"):
        export_model(
            failing.ShiftedSwish(),
            {"x": np.random.default_rng(0).random((4, 4, 4), dtype=np.float32)},
            settings=ExportSettings(
                strategy="direct", custom_symbolics="tests.export.failing:register_without_lowering"
            ),
            output=tmp_path / "model.onnx",
        )
    assert not (tmp_path / "model.onnx").exists()
