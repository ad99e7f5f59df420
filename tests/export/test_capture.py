"""Output and warnings of the exporters are captured."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

from gate.export.export_warnings import captured, hazards


def print_to_all_streams() -> None:
    print("from python")
    print("from python's stderr", file=sys.stderr)
    ctypes.CDLL(None).puts(b"from C")
    os.write(1, b"from the descriptor\n")
    os.write(2, b"from the second descriptor\n")
    os.write(1, b"\xff\xfe no utf-8\n")


def test_all_output_is_captured(capfd):
    print("before")
    with captured() as capture:
        print_to_all_streams()
    print("after")
    for line in ("python", "python's stderr", "C", "the descriptor", "the second descriptor"):
        assert f"from {line}\n" in capture.text
    assert " no utf-8" in capture.text
    output = capfd.readouterr()
    assert (output.out, output.err) == ("before\nafter\n", "")


def test_streams_are_restored_after_an_error(capfd):
    out, err = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt), captured() as capture:
        print_to_all_streams()
        raise KeyboardInterrupt
    assert "from C" in capture.text
    assert (sys.stdout, sys.stderr) == (out, err)
    ctypes.CDLL(None).puts(b"heard again")
    ctypes.CDLL(None).fflush(None)
    assert "heard again" in capfd.readouterr().out


def test_no_descriptor_stays_open():
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        with captured():
            os.write(1, b"heard")
    assert len(os.listdir("/dev/fd")) < before + 20


def test_warnings_are_collected_when_they_are_errors():
    with captured() as capture:
        for _ in range(2):
            warnings.warn("look", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in capture.warnings] == ["look", "look"]
    with pytest.raises(UserWarning, match="again an error"):
        warnings.warn("again an error", UserWarning, stacklevel=1)


TORCH = Path(torch.__file__).parent


def warning(message: str, category: type[Warning], file: Path | str) -> warnings.WarningMessage:
    return warnings.WarningMessage(message, category, str(file), 5)


def test_hazards_are_warnings_of_the_exporter():
    exporter = TORCH / "onnx" / "utils.py"
    observed = [
        warning("dropout is set to train=True", UserWarning, exporter),
        warning("no signature found for x", UserWarning, exporter),
        warning("You are using the legacy exporter", DeprecationWarning, exporter),
        warning("my own", UserWarning, Path(__file__)),
    ]
    assert hazards(observed) == ("dropout is set to train=True",)
