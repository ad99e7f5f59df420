"""The rules are those of the installed ONNX Runtime, which would ignore other names."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from gate.localize.ort_optimizers import RULES


@pytest.fixture(scope="module")
def library() -> bytes:
    (path,) = (Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*.so")
    return path.read_bytes()


@pytest.mark.parametrize(
    "name", sorted({*RULES, *(rule for set_ in RULES.values() for rule in set_)})
)
def test_the_library_has_the_name(library, name):
    if name in RULES:  # made of its level's number
        name = name.partition("_")[2]
    assert name.encode() in library, (
        f"ONNX Runtime {onnxruntime.__version__} has no {name}: look for its new name"
    )
