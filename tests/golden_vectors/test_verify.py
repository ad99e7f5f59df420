"""A file passes its golden vectors only if it is the same file with the same outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gate import cli
from gate.errors import DigestMismatch, EvidenceError, StorageError
from gate.golden.folder import ExpectedOutput, read_golden
from gate.golden.manifest import GoldenResult
from gate.golden.verify import compare, verify_golden
from gate.storage.digest import Digest
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.releases import onnx_file, onnx_file_with_data

REPOSITORY = Path(__file__).parents[2]


def test_released_file_passes(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    result = verify_golden(path, folder)
    assert result.passed
    assert result.problems == ()
    assert result.providers == ("CPUExecutionProvider",)
    assert result.samples == vectors.SAMPLES
    (output,) = result.outputs
    assert output.max_abs_diff is not None
    assert 0.0 <= output.max_abs_diff <= output.tolerance == vectors.TOLERANCE
    assert output.top1_agreement == 1.0


def test_renamed_file_passes(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    assert verify_golden(path.rename(tmp_path / "other.name"), folder).passed


@pytest.mark.parametrize(
    "tamper", [lambda data: data + b"\0", lambda data: data[:-1], lambda _: b""]
)
def test_other_bytes_are_refused_without_execution(tmp_path: Path, tamper) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    path.write_bytes(tamper(path.read_bytes()))
    result = verify_golden(path, folder)
    assert not result.passed
    assert "has digest" in result.problems[0]
    assert result.providers == ()


def test_external_data_is_verified(tmp_path: Path) -> None:
    weights = vectors.weights(onnx_file(tmp_path / "single.onnx"))
    path = onnx_file_with_data(tmp_path / "model.onnx")
    arguments = vectors.inputs()
    outputs = {"logits": ExpectedOutput(arguments @ weights, vectors.TOLERANCE, 1.0)}
    folder = tmp_path / "golden"
    vectors.write_model_vectors(folder, path, outputs=outputs)
    assert verify_golden(path, folder).passed
    assert verify_golden(path.rename(tmp_path / "renamed.onnx"), folder).passed
    data = tmp_path / "weights.data"
    original = data.read_bytes()
    data.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert not verify_golden(tmp_path / "renamed.onnx", folder).passed
    data.unlink()
    with pytest.raises(StorageError):
        verify_golden(tmp_path / "renamed.onnx", folder)


def _write_vectors(tmp_path: Path, **fields: Any) -> tuple[Path, Path]:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    vectors.write_model_vectors(tmp_path / "spoiled", path, **fields)
    return path, tmp_path / "spoiled"


def _expect_logits(
    values: np.ndarray, tolerance: float = vectors.TOLERANCE
) -> dict[str, ExpectedOutput]:
    return {"logits": ExpectedOutput(values, tolerance)}


ONES = np.ones((vectors.SAMPLES, 10), np.float32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outputs": _expect_logits(ONES)}, "max_abs_diff"),
        ({"outputs": _expect_logits(ONES, 0.0)}, "max_abs_diff"),
        (
            {"outputs": _expect_logits(ONES[:2])},
            r"is float32 \(4, 10\), expected float32 \(2, 10\)",
        ),
        ({"outputs": _expect_logits(ONES.astype(np.float64))}, "expected float64"),
        ({"outputs": _expect_logits(np.full_like(ONES, np.inf))}, "infinite on one side"),
        ({"outputs": {"other": ExpectedOutput(ONES, 1.0)}}, r"has the outputs \['logits'\]"),
        (
            {"outputs": {**_expect_logits(ONES), "other": ExpectedOutput(ONES, 1.0)}},
            "has the outputs",
        ),
        ({"inputs": {"image": vectors.inputs()}}, r"has the inputs \['input'\]"),
        ({"inputs": {"input": vectors.inputs()[:, :2]}}, "ONNX Runtime can't compute it"),
        ({"inputs": {"input": vectors.inputs().astype(np.float64)}}, "can't compute it"),
    ],
)
def test_other_outputs_are_refused(tmp_path: Path, fields, message) -> None:
    result = verify_golden(*_write_vectors(tmp_path, **fields))
    assert not result.passed
    assert re.search(message, " ".join(result.problems)), result.problems


def test_an_extra_output_is_refused(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    model = onnx.load(str(path))
    model.graph.node.append(helper.make_node("Relu", ["logits"], ["more"]))
    model.graph.output.append(
        helper.make_tensor_value_info("more", TensorProto.FLOAT, ["batch", 10])
    )
    onnx.save(model, str(path))
    vectors.write_model_vectors(tmp_path / "golden", path)
    result = verify_golden(path, tmp_path / "golden")
    assert not result.passed
    assert "'more'" in result.problems[0]


def test_a_file_that_does_not_load_is_refused(tmp_path: Path) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    arguments = read_golden(tmp_path / "golden")
    path.write_bytes(b"no model")
    vectors.write_vectors(
        tmp_path / "golden",
        model=arguments.golden.model.model_copy(
            update={"sha256": builders.Digest.from_bytes(b"no model")}
        ),
        inputs=arguments.inputs,
        outputs={"logits": ExpectedOutput(arguments.outputs["logits"], 1.0)},
        origin=vectors.origin(),
    )
    result = verify_golden(path, tmp_path / "golden")
    assert not result.passed
    assert "can't compute it" in result.problems[0]


def test_other_top1_class_within_the_tolerance_is_refused(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    logits = read_golden(folder).outputs["logits"].copy()
    logits[2, logits[2].argmin()] = logits.max() + 1
    vectors.write_model_vectors(
        folder, path, outputs={"logits": ExpectedOutput(logits, 100.0, 1.0)}
    )
    result = verify_golden(path, folder)
    assert not result.passed
    assert "top-1 agreement 0.75 is below 1" in result.problems[0]
    vectors.write_model_vectors(
        folder, path, outputs={"logits": ExpectedOutput(logits, 100.0, 0.75)}
    )
    assert verify_golden(path, folder).passed


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (None, "is missing"),
        ([1.0], "is missing"),
        (np.full((4, 10), np.nan, np.float32), "NaN"),
        (np.full((4, 10), np.inf, np.float32), "infinite"),
        (np.full((4, 10), 3e38, np.float32), "max_abs_diff"),
        (np.zeros((4, 10), np.float16), "float16"),
        (np.zeros((4, 1, 10), np.float32), "expected float32"),
        (np.zeros((0, 10), np.float32), "expected float32"),
    ],
)
def test_special_values_are_compared_strictly(tmp_path: Path, got, message) -> None:
    _, folder = vectors.write_model_and_vectors(tmp_path)
    computed = {} if got is None else {"logits": got}
    (result,) = compare(read_golden(folder), computed)
    assert message in str(result.problem)


def test_single_nan_is_refused(tmp_path: Path) -> None:
    _, folder = vectors.write_model_and_vectors(tmp_path)
    read = read_golden(folder)
    logits = read.outputs["logits"].copy()
    assert compare(read, {"logits": logits})[0].problem is None
    logits[3, 9] = np.nan
    assert "1 NaN" in str(compare(read, {"logits": logits})[0].problem)


@pytest.mark.parametrize(
    ("want", "got", "equal"),
    [
        (np.array([[np.inf, -np.inf]]), np.array([[np.inf, -np.inf]]), True),
        (np.array([[np.inf, 1.0]]), np.array([[-np.inf, 1.0]]), False),
        (np.array([[1e308, 1.0]]), np.array([[-1e308, 1.0]]), False),
        (np.array([[2**63 - 1]]), np.array([[2**63 - 2]]), False),
        (np.array([[True]]), np.array([[False]]), False),
        (np.array([[3]]), np.array([[3]]), True),
    ],
)
def test_differences_of_all_dtypes(tmp_path: Path, want, got, equal) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    fields = {
        "inputs": {"input": vectors.inputs()[:1]},
        "outputs": {"y": ExpectedOutput(want, 0.5)},
    }
    vectors.write_model_vectors(tmp_path / "golden", path, **fields)
    (result,) = compare(read_golden(tmp_path / "golden"), {"y": got})
    assert (result.problem is None) is equal


@pytest.mark.parametrize(
    "tamper",
    [
        {"outputs": ()},
        {"providers": ()},
        {"samples": 0},
        {"problems": ("something",)},
    ],
)
def test_empty_result_does_not_pass(tmp_path: Path, tamper) -> None:
    result = verify_golden(*vectors.write_model_and_vectors(tmp_path))
    with pytest.raises(EvidenceError, match="passed without a complete"):
        GoldenResult.from_json(json.dumps(result.to_plain() | tamper))


def test_damaged_vectors_are_an_error(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    array = folder / read_golden(folder).golden.inputs[0].file
    array.write_bytes(bytes(array.stat().st_size))
    with pytest.raises(DigestMismatch):
        verify_golden(path, folder)


# Tests of the command.

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, Blocker())
"""
CALL = """
import sys
from gate import cli

code = cli.main(sys.argv[1:])
assert not {"torch", "torchvision", "mlflow"} & set(sys.modules)
sys.exit(code)
"""


def _without_torch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    blocked = tmp_path / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(BLOCKER)
    return subprocess.run(
        [sys.executable, "-c", CALL, *arguments], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{blocked}{os.pathsep}{REPOSITORY}"}, check=False,
    )  # fmt: skip


def test_import_blocker_works(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKER)
    completed = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "blocked")},
    )  # fmt: skip
    assert "torch is not installed here" in completed.stderr


@pytest.mark.proof
def test_command_needs_no_torch(tmp_path: Path) -> None:
    vectors.write_model_and_vectors(tmp_path)
    command = ("verify-release", "model.onnx", "--golden", "golden")
    passed = _without_torch(tmp_path, *command, "--json")
    assert passed.returncode == 0, passed.stderr
    plain = json.loads(passed.stdout)
    assert (plain["verdict"], plain["passed"], plain["exit_code"]) == ("PASS", True, 0)
    assert plain["providers"] == ["CPUExecutionProvider"]
    onnx_file(tmp_path / "model.onnx", seed=1)
    refused = _without_torch(tmp_path, *command)
    assert refused.returncode == 1, refused.stderr
    assert "has digest" in refused.stdout
    assert refused.stdout.splitlines()[0] == "FAIL"


def test_command_reports_the_comparison(tmp_path: Path, monkeypatch, capsys) -> None:
    vectors.write_model_and_vectors(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify-release", "model.onnx", "--golden", "golden"]) == 0
    captured = capsys.readouterr().out
    assert "CPUExecutionProvider" in captured
    assert "logits" in captured
    assert captured.splitlines()[0] == "PASS"


@pytest.mark.further
def test_command_verifies_the_digest_of_the_vectors(tmp_path: Path, monkeypatch, capsys) -> None:
    path, golden = vectors.write_model_and_vectors(tmp_path)
    monkeypatch.chdir(tmp_path)
    digests = (Digest.from_file(path).hex, Digest.from_file(golden / "golden.json").hex)
    command = ["verify-release", "model.onnx", "--golden", "golden"]
    with_digests = [*command, "--sha256", digests[0], "--golden-sha256", digests[1]]
    assert cli.main(with_digests) == 0
    capsys.readouterr()
    for option, label in (("--sha256", "file"), ("--golden-sha256", "golden vectors")):
        assert cli.main([*with_digests, option, "0" * 64]) == 1
        captured = capsys.readouterr().out
        assert f"the digest of the {label} is" in captured
        assert captured.splitlines()[0] == "FAIL"
    assert cli.main([*command, "--sha256", "no digest"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [["no.onnx", "--golden", "golden"], ["model.onnx", "--golden", "."], ["model.onnx"]],
)
def test_command_exits_with_2_on_unreadable_input(tmp_path, monkeypatch, capsys, arguments) -> None:
    vectors.write_model_and_vectors(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify-release", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: ") for line in errors)  # possibly after progress lines


@pytest.mark.rows(4)
@pytest.mark.parametrize("kind", ["/dev/zero", "link out", "link in", "pipe", "loop", "folder"])
def test_forged_data_paths_are_not_read(tmp_path: Path, kind: str, capsys) -> None:
    """Hashing /dev/zero or reading a pipe would never end."""
    path, folder = vectors.write_model_and_vectors(tmp_path)
    data = path.parent / "w.bin"
    if kind == "pipe":
        os.mkfifo(data)
    elif kind == "folder":
        data.mkdir()
    elif kind == "link in":
        os.mkfifo(path.parent / "pipe")
        data.symlink_to("pipe")
    elif kind != "/dev/zero":
        data.symlink_to({"link out": "/dev/zero", "loop": "w.bin"}[kind])
    plain = json.loads((folder / "golden.json").read_text())
    plain["model"]["external_data"] = ["/dev/zero" if kind == "/dev/zero" else "w.bin"]
    (folder / "golden.json").write_text(json.dumps(plain))
    assert cli.main(["verify-release", str(path), "--golden", str(folder)]) == 2
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith("error: ")  # possibly after progress lines
    assert "unexpected" not in errors


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_model_must_be_a_regular_file(tmp_path: Path, kind: str, capsys) -> None:
    _, folder = vectors.write_model_and_vectors(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = str(pipe) if kind == "pipe" else kind
    assert cli.main(["verify-release", arguments, "--golden", str(folder)]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_help_has_examples(capsys) -> None:
    assert cli.main(["verify-release", "--help"]) == 0
    assert "gate verify-release model.onnx --golden golden" in capsys.readouterr().out
