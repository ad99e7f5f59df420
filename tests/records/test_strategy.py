from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gate.errors import PolicyError
from gate.records.export import ExportSettings
from gate.storage.yaml_section import load_section


def test_the_defaults_are_the_documented_export() -> None:
    settings = ExportSettings()
    assert (settings.opset, settings.training, settings.strategy) == (13, "eval", "ladder")
    assert settings.do_constant_folding
    assert settings.export_params
    assert settings.dynamic_batch
    assert ExportSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"opset": 8}, "from 9 to 23"),
        ({"opset": 24}, "from 9 to 23"),
        ({"opset": 21, "strategy": "traced"}, "traced support at most opset 20"),
        ({"opset": 21, "ladder": ("direct", "traced")}, "support at most opset 20"),
        ({"opset": "lowest"}, "expected auto"),
        ({"opset": "13"}, "from 9 to 23"),
        ({"opset": True}, "from 9 to 23"),
        ({"strategy": "onnxruntime"}, "'traced'"),
        ({"ladder": ()}, "at least 1"),
        ({"ladder": ("traced", "direct", "traced")}, "repeats a strategy"),
        ({"dynamic_axes": {"x": {-1: "batch"}}}, "greater than or equal to 0"),
        ({"dynamic_axes": {"x": {0: "the batch"}}}, "pattern"),
        ({"training": "train"}, "'eval'"),
        ({"input_names": ()}, "at least 1"),
        ({"output_names": ("",)}, "pattern"),
        ({"output_names": ("two words",)}, "pattern"),
        ({"input_names": ("x", "x")}, "repeated: x"),
        ({"input_names": ("x",), "output_names": ("y", "x")}, "repeated: x"),
        ({"batch_size": 0}, "greater than or equal to 1"),
        ({"batch_size": 1}, "bakes the batch in"),
        ({"dynamo": True}, "Extra inputs"),
        ({"keep_initializers_as_inputs": True, "export_params": False}, "they are inputs already"),
        ({"custom_opsets": {"mine": 2}}, "silently ignores it; set strategy: direct"),
        (
            {"autograd_inlining": False, "strategy": "dynamo"},
            "autograd_inlining is an option of the",
        ),
        ({"operator_export_type": "ONNX_ATEN", "strategy": "dynamo"}, "silently ignores it"),
        (
            {"export_modules_as_functions": True, "strategy": "dynamo"},
            "works only with strategy direct",
        ),
        ({"custom_opsets": {"": 2}, "strategy": "direct"}, "pattern"),
        ({"custom_opsets": {"a b": 2}, "strategy": "direct"}, "pattern"),
        ({"custom_opsets": {"mine": 0}, "strategy": "direct"}, "greater than or equal to 1"),
        ({"custom_opsets": {"ai.onnx": 15}, "strategy": "direct"}, "set its version with opset"),
        (
            {"export_modules_as_functions": True, "strategy": "traced"},
            "works only with strategy direct",
        ),
        (
            {"export_modules_as_functions": True, "ladder": ("direct", "traced")},
            "only with strategy direct",
        ),
        ({"export_modules_as_functions": True, "strategy": "direct"}, "needs opset 15 or more"),
        ({"export_modules_as_functions": (), "strategy": "direct"}, "at least 1"),
        ({"export_modules_as_functions": ("my block",), "strategy": "direct"}, "pattern"),
        ({"operator_export_type": "ONNX_ATEN", "ladder": ("direct",)}, "which runs each file"),
        ({"operator_export_type": "ATEN", "strategy": "direct"}, "ONNX_FALLTHROUGH"),
    ],
)
def test_refuses_what_the_exporter_cannot_do(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ExportSettings(**wrong)


def test_a_fixed_batch_may_be_one() -> None:
    assert ExportSettings(batch_size=1, dynamic_batch=False).batch_size == 1


def test_reads_from_yaml_with_the_line_of_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("export:\n  opset: 17\n  input_names: [image]\n")
    settings = load_section(ExportSettings, path, "export")
    assert (settings.opset, settings.input_names) == (17, ("image",))
    path.write_text("export:\n  strategy: traced\n  opset: 25\n")
    with pytest.raises(PolicyError, match=r"params.yaml:3: export.opset"):
        load_section(ExportSettings, path, "export")


def test_axes_are_numbers_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("export:\n  opset: auto\n  dynamic_axes: {input: {2: height, 3: width}}\n")
    settings = load_section(ExportSettings, path, "export")
    assert settings.dynamic_axes == {"input": {2: "height", 3: "width"}}
    assert settings.opset == "auto"
    assert ExportSettings.from_json(settings.to_json()) == settings


def test_switches_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "export:\n  strategy: direct\n  opset: auto\n  verbose: true\n"
        "  custom_opsets: {com.microsoft: 1}\n  export_modules_as_functions: [Block, a.B]\n"
    )
    settings = load_section(ExportSettings, path, "export")
    assert settings.export_modules_as_functions == ("Block", "a.B")
    assert settings.custom_opsets == {"com.microsoft": 1}
    assert ExportSettings.from_json(settings.to_json()) == settings
    path.write_text(
        "export:\n  strategy: direct\n  opset: 15\n  export_modules_as_functions: true\n"
    )
    assert load_section(ExportSettings, path, "export").export_modules_as_functions is True


def test_the_rungs_are_the_ladder_or_the_strategy() -> None:
    assert ExportSettings().strategies == ("traced", "direct", "scripted", "dynamo")
    assert ExportSettings(strategy="dynamo").strategies == ("dynamo",)
