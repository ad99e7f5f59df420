"""A version of a multi-file release is invalid if its MLmodel has unexpected flavors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gate.mlflow_client.registry import _onnx_file
from tests.registry import parts

PARTS = {"data": "release.yaml"}
PYFUNC = {"data": "encoder.onnx", "loader_module": "mlflow.onnx"}
ONNX = {"data": "encoder.onnx"}


def write_mlmodel(folder: Path, flavors: dict[str, Any]) -> None:
    (folder / "MLmodel").write_text(json.dumps({"flavors": flavors}))


def test_multi_file_version_resolves_to_its_release_file(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    write_mlmodel(tmp_path, {"onnx_parts": PARTS})
    assert _onnx_file(tmp_path) == path


@pytest.mark.parametrize(
    "flavors",
    [
        {"onnx_parts": PARTS, "python_function": PYFUNC},
        {"onnx_parts": PARTS, "onnx": ONNX, "python_function": PYFUNC},
        {"onnx_parts": {"data": "encoder.onnx"}},
        {"onnx_parts": {"data": "../release.yaml"}},
        {"onnx_parts": {"data": "other.yaml"}},
        {"onnx_parts": PARTS | {"code": "code"}},
        {"onnx_parts": PARTS | {"parts": {"encoder": "head.onnx", "head": "encoder.onnx"}}},
        {"onnx_parts": {}},
        {"onnx_parts": None},
    ],
)
def test_unexpected_flavors_make_the_version_invalid(
    tmp_path: Path, flavors: dict[str, Any]
) -> None:
    folder = tmp_path / "version"
    parts.write_release(folder)
    parts.write_release(tmp_path)
    write_mlmodel(folder, flavors)
    assert _onnx_file(folder) is None
