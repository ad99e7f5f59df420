"""Output and warnings of the exporters are captured."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from gate.export.export_warnings import captured, hazards, tracer_warnings, warning_location

ROOT = Path(__file__).parents[2]


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


BUFFERED_CODE = """
import ctypes
from gate.export.export_warnings import captured
libc = ctypes.CDLL(None)
libc.puts(b"C before")
with captured() as capture:
    libc.puts(b"C within")
libc.puts(b"C after")
libc.fflush(None)
print("captured:", capture.text)
"""


@pytest.mark.proof
def test_buffered_c_output_is_separated():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", BUFFERED_CODE]
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert completed.stdout.split("\n") == ["C before", "C after", "captured: C within", "", ""]


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


def test_closed_standard_stream_is_supported():
    spare = os.dup(1)
    os.close(1)
    try:
        with captured() as capture:
            os.write(2, b"still heard")
    finally:
        os.dup2(spare, 1)
        os.close(spare)
    assert "still heard" in capture.text


def test_warning_location_has_no_absolute_path(tmp_path):
    with captured() as capture:
        warnings.warn("here", UserWarning, stacklevel=1)
        warnings.warn_explicit("there", UserWarning, str(tmp_path / "net.py"), 7)
        warnings.warn_explicit("in a package", UserWarning, pytest.__file__, 3)
    first_location, second_location, package_location = (
        warning_location(warning) for warning in capture.warnings
    )
    assert first_location.startswith("tests/export/test_capture.py:")
    assert second_location == "net.py:7"
    assert package_location == "pytest/__init__.py:3"


TORCH = Path(torch.__file__).parent


def warning(message: str, category: type[Warning], file: Path | str) -> warnings.WarningMessage:
    return warnings.WarningMessage(message, category, str(file), 5)


def test_tracer_warnings_are_unique_with_location():
    kind = torch.jit.TracerWarning
    observed = [
        warning("to a\nPython boolean", kind, Path(__file__)),
        warning("to a\nPython boolean", kind, Path(__file__)),
        warning("own library", kind, TORCH / "nn" / "functional.py"),
        warning("outputs differ", kind, TORCH / "jit" / "_trace.py"),
        warning("something else", UserWarning, Path(__file__)),
    ]
    assert tracer_warnings(observed) == (
        "tests/export/test_capture.py:5: to a Python boolean",
        "torch/jit/_trace.py:5: outputs differ",
    )


def test_hazards_are_warnings_of_the_exporter():
    exporter = TORCH / "onnx" / "utils.py"
    observed = [
        warning("dropout is set to train=True", UserWarning, exporter),
        warning("no signature found for x", UserWarning, exporter),
        warning("You are using the legacy exporter", DeprecationWarning, exporter),
        warning("my own", UserWarning, Path(__file__)),
    ]
    assert hazards(observed) == ("dropout is set to train=True",)
