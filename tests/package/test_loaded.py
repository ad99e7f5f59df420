"""An installed package that can't be imported is named, and no file is blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gate import installation
from gate.errors import PackageBroken, PackageMissing
from tests.golden_vectors import vectors
from tests.hidden import CALLER_CODE, ROOT

LIBRARY = "libgomp.so.1: cannot open shared object file"
BROKEN = {
    "a library is missing": f"raise ImportError({LIBRARY!r})",
    "loaded by ctypes": f"raise OSError({LIBRARY!r})",
    "half of it was removed": "from onnxruntime.capi import _pybind_state",
    "nothing is left in it": "",
    "loads and is not whole": "__version__ = '1.0'",
    "loads late": f"__version__ = '1.0'\ndef __getattr__(name):\n    raise ImportError({LIBRARY!r})",
}


def _write_package(folder: Path, package: str, text: str) -> None:
    (folder / "path" / package).mkdir(parents=True)
    (folder / "path" / package / "__init__.py").write_text(text)


def _run_lines(folder: Path, lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run command lines in a process that finds the packages of `folder` first; return their
    outputs."""
    custom = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "GATE_", "COV_"))}
    custom["PYTHONPATH"] = os.pathsep.join((str(folder / "path"), str(ROOT)))
    completed = subprocess.run(
        [sys.executable, "-c", CALLER_CODE, json.dumps(lines)],
        cwd=folder, env=custom, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return [tuple(each) for each in json.loads(completed.stdout.splitlines()[-1])[0]]


@pytest.mark.further
@pytest.mark.rows(4)
@pytest.mark.parametrize("how", BROKEN)
def test_broken_onnx_runtime_rejects_no_release(tmp_path: Path, how: str) -> None:
    vectors.write_model_and_vectors(tmp_path)
    _write_package(tmp_path, "onnxruntime", BROKEN[how])
    ((code, out, err),) = _run_lines(
        tmp_path, [["verify-release", "model.onnx", "--golden", "golden"]]
    )
    assert (code, out) == (2, "")
    lead = "error: gate verify-release needs ONNX Runtime, and the one that is installed does not"
    assert err.splitlines()[-1].startswith(lead)  # earlier lines show progress
    assert "pip install --force-reinstall onnxruntime" in err
    assert "gate doctor" in err


def test_broken_pytorch_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef build(): ...\n")
    _write_package(tmp_path, "torch", BROKEN["loaded by ctypes"])
    ((code, out, err),) = _run_lines(tmp_path, [["lint", "mine:build"]])
    assert (code, out) == (2, "")
    lead = "error: gate lint needs PyTorch, and the one that is installed does not"
    assert err.splitlines()[-1].startswith(lead)
    assert LIBRARY in err


def test_loadable_package_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.find_broken("verify-release") is None
    assert installation.find_broken("keys") is None
    assert installation.onnx_runtime().InferenceSession
    monkeypatch.setattr(installation, "is_installed", lambda _: False)
    # not installed, which is another error
    assert installation.find_broken("verify-release") is None
    with pytest.raises(PackageMissing) as raised:
        installation.onnx_runtime()
    assert not isinstance(raised.value, PackageBroken)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os.kill(os.getpid(), 7)", "importing it kills the process by SIGBUS"),
        ("raise ImportError('it says so itself')", ""),
    ],
)
def test_crashing_import_is_tried_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, how: str
) -> None:
    _write_package(tmp_path, "deadlypackage", text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    assert installation._import_crash("deadlypackage") == how
    installation._import_crash.cache_clear()
