"""Arguments that name missing files are rejected before heavy imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gate import cli

CHECK = ("check", "model.onnx", "--reference", "mine:build", "--inputs", "x.npy")
PROMOTE = ("promote", "model.onnx", "--name", "m", "--report", "report")
HEAVY = ("torch", "numpy", "onnx", "onnxruntime", "mlflow", "pydantic", "gate.sandbox.process")
"""`gate.sandbox.process` starts the child process."""

MISSING: dict[str, tuple[tuple[str, ...], str, str]] = {
    "file": (("check", "modl.onnx", *CHECK[2:]), "OnnxFileError", "Did you mean model.onnx?"),
    "file is a folder": (("check", "report", *CHECK[2:]), "OnnxFileError", "is a folder"),
    "inputs": ((*CHECK, "--inputs", "far/x.npy"), "DataError", "folder far does not exist"),
    "a data set": ((*CHECK, "--inputs", "nine:data"), "DataError",
                   "--inputs: no module named 'nine'"),
    "fields": ((*CHECK, "--inputs", "x.parquet#inputs=a&inputs=b"), "DataError", "each once"),
    "a file with fields": ((*CHECK, "--inputs", "y.parquet#inputs=a"), "DataError",
                           "y.parquet does not exist"),
    "labels": ((*CHECK, "--labels", "y.npy"), "DataError", "one label per sample"),
    "policy": ((*CHECK, "--policy", "p.yaml"), "PolicyError", "--policy: p.yaml does not exist"),
    "checkpoint": ((*CHECK, "--checkpoint", "w.pt"), "CheckpointError", ".safetensors file"),
    "spec": ((*CHECK, "--preprocessing", "s.yaml"), "PolicyError", "s.yaml does not exist"),
    "pictures": ((*CHECK, "--pictures", "cat.png"), "DataError", "cat.png does not exist"),
    "record": ((*CHECK, "--export-record", "r.json"), "EvidenceError", "as gate export wrote it"),
    "no colon": ((*CHECK, "--reference", "mine"), "ModelError", "Expected package.module:callable"),
    "no package": ((*CHECK, "--reference", "nine:build"), "ModelError", "no module named 'nine'"),
    "role": ((*CHECK, "--role", "y=logit"), "BadParameter", "Did you mean logits?"),
    "tensors": ((*CHECK, "--tensors", "phone"), "DataError", "expected NAME=FILE.npy"),
    "tensors' file": ((*CHECK, "--tensors", "phone=t.npy"), "DataError", "t.npy does not exist"),
    "report on a file": ((*CHECK, "--report", "model.onnx"), "StorageError", "is a file"),
    "report below a file": ((*CHECK, "--report", "x.npy/a/b"), "StorageError", "x.npy is a file"),
    "locate": (("locate", "no.onnx", *CHECK[2:]), "OnnxFileError", "no.onnx does not exist"),
    "locate's policy": (("locate", *CHECK[1:], "--policy", "p"), "PolicyError", "p does not exist"),
    "export": (("export", "mine:build", "--example-input", "e.npy", "--output", "m.onnx"),
               "DataError", "e.npy does not exist"),
    "export onto a folder": (("export", "mine:build", "--example-input", "x.npy", "--output",
                              "report"), "StorageError", "it is a folder. Name a file"),
    "export compare": (("export", "compare", "mine", "--example-input", "x.npy"), "ModelError",
                       "not a factory: 'mine'"),
    "lint": (("lint", "nine:build"), "ModelError", "no module named 'nine'"),
    "quantize": (("quantize", "model.onnx", "--calibration", "c.npy", "--output", "t.onnx"),
                 "DataError", "c.npy does not exist"),
    "promote": ((*PROMOTE, "--policy", "p.yaml"), "PolicyError", "p.yaml does not exist"),
    "promote's report": ((*PROMOTE[:-1], "model.onnx"), "EvidenceError", "is not a folder"),
    "compare": (("preprocess", "compare", "cats"), "DataError", "cats does not exist"),
    "compare's model": (("preprocess", "compare", "report", "--model", "n.onnx"), "OnnxFileError",
                        "n.onnx does not exist"),
    "verify-release": (("verify-release", "model.onnx", "--golden", "g"), "EvidenceError",
                       "with golden.json"),
    "deployed": (("deployed", "--store", "s"), "StorageError", "s does not exist"),
    "deploy": (("deploy", "m", "--store", "s", "--file", "n.onnx"), "OnnxFileError", "n.onnx"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text("raise AssertionError('this was imported')")
    (tmp_path / "model.onnx").touch()
    (tmp_path / "x.npy").touch()
    (tmp_path / "report").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )  # fmt: skip


def test_missing_path_is_reported_and_loads_nothing_heavy(folder: Path) -> None:
    lines = [list(arguments) for arguments, _, _ in MISSING.values()]
    code = (
        "import contextlib, io, json, sys\n"
        "from gate import cli\n"
        f"for line in {lines!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as printed:\n"
        "        code = cli.main([*line, '--json'], child=True)\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print(json.dumps([code, heavy, json.loads(printed.getvalue())['error']]))\n"
    )
    completed = _run(code)
    assert "Traceback" not in completed.stderr
    for line, (arguments, kind, text) in zip(
        completed.stdout.splitlines(), MISSING.values(), strict=True
    ):
        code, heavy, error = json.loads(line)
        assert (code, heavy, error["type"]) == (2, [], kind), arguments
        assert text in error["message"]


def test_invalid_policy_is_reported_without_torch(folder: Path) -> None:
    (folder / "p.yaml").write_text("gate: {runtimes: {}}")
    code = (
        "import sys\n"
        "from gate import cli\n"
        f"code = cli.main({[*CHECK, '--policy', 'p.yaml']!r})\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    completed = _run(code)
    assert completed.stdout == "2 False\n", completed.stderr
    assert "gate.runtimes" in completed.stderr


def test_process_substitution_is_accepted(folder: Path, capsys) -> None:
    os.mkfifo(folder / "policy")
    assert cli.main([*CHECK, "--policy", "policy", "--labels", "none.npy"]) == 2
    assert "none.npy does not exist" in capsys.readouterr().err
