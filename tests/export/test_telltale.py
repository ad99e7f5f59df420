from __future__ import annotations

import warnings
from pathlib import Path

import torch

from gate.export.export_warnings import hazards, tracer_warnings

TORCH = Path(torch.__file__).parent


def warning(message: str, category: type[Warning], file: Path | str) -> warnings.WarningMessage:
    return warnings.WarningMessage(message, category, str(file), 5)


def test_tracer_warnings_are_told_once_with_their_place() -> None:
    kind = torch.jit.TracerWarning
    seen = [
        warning("to a\nPython boolean", kind, Path(__file__)),
        warning("to a\nPython boolean", kind, Path(__file__)),
        warning("own library", kind, TORCH / "nn" / "functional.py"),
        warning("outputs differ", kind, TORCH / "jit" / "_trace.py"),
        warning("something else", UserWarning, Path(__file__)),
    ]
    assert tracer_warnings(seen) == (
        "tests/export/test_telltale.py:5: to a Python boolean",
        "torch/jit/_trace.py:5: outputs differ",
    )


def test_hazards_are_what_the_exporter_says_of_the_file() -> None:
    exporter = TORCH / "onnx" / "utils.py"
    seen = [
        warning("dropout is set to train=True", UserWarning, exporter),
        warning("no signature found for x", UserWarning, exporter),
        warning("You are using the legacy exporter", DeprecationWarning, exporter),
        warning("my own", UserWarning, Path(__file__)),
    ]
    assert hazards(seen) == ("dropout is set to train=True",)
