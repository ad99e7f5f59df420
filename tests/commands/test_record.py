"""gate record: export samples, run them on another device, pack the outputs, check."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import small_project
from tests.commands.running import create_runner
from tests.runtimes import consumer

_, samples = create_runner("samples")
_, record = create_runner("record")
check, checked = create_runner("check")
POLICY = """
task: classification
instruments: {noise_samples: 4, stability_samples: 2, search_inputs: 0, graph: false}
runtimes:
  ort-cpu: {required: always, bounds: {noise_ratio: 1.5, top1_agreement: 1.0}}
"""
ENTRY = """
  phone: {required: always, kind: recorded, bounds: {noise_ratio: 32.0, top1_agreement: 1.0}}
"""


@pytest.fixture
def _project(monkeypatch, tmp_path):
    monkeypatch.chdir(small_project.create_project())
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "strict.yaml").write_text(POLICY + ENTRY)
    (tmp_path / "meta.json").write_text(json.dumps(consumer.META))


@pytest.fixture
def recording(_project, tmp_path, capsys):
    """A recording with probes, as a zip file."""
    sent, outputs = tmp_path / "sent", tmp_path / "outputs"
    reference = ("--reference", "small_models:build", "--policy", str(tmp_path / "strict.yaml"))
    code, printed = samples(
        capsys, "export", "good.onnx", "--inputs", "images.npy", *reference, "-o", str(sent)
    )
    assert (code, printed["header"]["parts"][0]["name"]) == (0, "samples")
    consumer.run(small_project.create_project() / "good.onnx", sent, outputs)
    code, printed = record(
        capsys, "pack", "good.onnx", "--inputs", str(sent), "--outputs", str(outputs),
        "--meta", str(tmp_path / "meta.json"), "-o", str(tmp_path / "phone.zip"),
    )  # fmt: skip
    assert (code, printed["manifest"]["whence"]["runtime"]) == (0, "TensorRT")
    return tmp_path / "phone.zip"


def create_arguments(policy, recorded):
    return (
        "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy",
        "--policy", str(policy), "--recorded", f"phone={recorded}",
    )  # fmt: skip


def test_question_contains_the_probes_of_the_policy(recording, tmp_path, capsys):
    code, printed = checked(
        capsys,
        *create_arguments(tmp_path / "strict.yaml", recording),
        "--report",
        str(tmp_path / "report"),
    )
    assert code == 0, printed
    assert printed["decision"]["runtimes"] == ["ort-cpu", "phone"]
    assert not any(each["verdict"] == "WAIVED" for each in printed["decision"]["checks"])
    assert "phone" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.usefixtures("_project")
def test_recording_of_samples_passes_with_missing_checks_shown(tmp_path, capsys):
    recorded = tmp_path / "recorded"
    np.save(tmp_path / "logits.npy", _logits())
    code, _ = record(
        capsys, "pack", "good.onnx", "--inputs", "images.npy", "--outputs",
        str(tmp_path / "logits.npy"), "--meta", str(tmp_path / "meta.json"), "-o", str(recorded),
    )  # fmt: skip
    assert code == 0
    code, out, _ = check(capsys, *create_arguments(tmp_path / "policy.yaml", recorded), "-v")
    assert code == 0, out
    assert "probes" in out
    assert "WAIVED" in out
    code, printed = checked(capsys, *create_arguments(tmp_path / "strict.yaml", recorded))
    assert (code, printed["verdict"]) == (2, "ERROR")


def _logits():
    import onnxruntime

    session = onnxruntime.InferenceSession("good.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": np.load("images.npy")})
    return logits


@pytest.mark.usefixtures("_project")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--recorded", "Phone=images.npy"), "expected NAME=FOLDER"),
        (("--recorded", "phone"), "expected NAME=FOLDER"),
        (("--recorded", "phone=nowhere"), "does not exist"),
        (("--recorded", "ort-cpu=images.npy"), "computes here, not a recording"),
        (("--recorded", "a=images.npy", "--recorded", "a=images.npy"), "a name is used twice"),
    ],
)
def test_invalid_recording_name_is_refused(given, words, capsys):
    code, _, err = check(
        capsys, "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy", *given
    )
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.usefixtures("_project")
def test_invalid_recording_is_refused(tmp_path, capsys):
    code, printed = checked(capsys, *create_arguments(tmp_path / "policy.yaml", "images.npy"))
    assert (code, printed["verdict"]) == (1, "FAIL")
    assert "can't be read" in json.dumps(printed["decision"])
