"""Golden vectors hold outputs of the reference for measured samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate import (
    EvaluationData,
    MeasurementJob,
    Policy,
    Reference,
    SampleSet,
    TestedFile,
    check,
    verify_golden,
)
from gate.errors import EvidenceError, InputMismatch, OutputMismatch
from gate.export.export import export_model
from gate.golden.folder import read_golden
from gate.golden.manifest import GoldenManifest
from gate.measure.artifacts import SAMPLES, write_golden_of
from gate.onnx_file.reading import read_subject
from gate.policy.sections import Instruments
from gate.records.export import ExportSettings
from tests.modules import Function
from tests.small_project import change_one_weight, create_project

POLICY = Policy.default(task="classification").model_copy(
    update={"instruments": Instruments(probes=False, search_inputs=0, stability_samples=2)}
)


@pytest.fixture(scope="module")
def project():
    return create_project()


@pytest.fixture(scope="module")
def checked(project):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(str(project))
        reference = Reference.from_factory("small_models:build")
    workload = EvaluationData.open(project / "images.npy")
    return reference, workload, check(
        project / "good.onnx", reference=reference, data=workload, policy=POLICY
    )  # fmt: skip


def write_golden_vectors(folder: Path, path: Path, checked, **changed) -> GoldenManifest:
    reference, workload, result = checked
    fields = {"model": reference.model, "samples": workload.samples} | changed
    return write_golden_of(
        folder,
        MeasurementJob(
            fields["model"], TestedFile(path, read_subject(path)), fields["samples"], policy=POLICY
        ),
        evidence=result.evidence,
    )


def test_golden_vectors_of_the_reference_match_the_file(tmp_path, project, checked):
    reference, _, verdicted = checked
    assert verdicted.decision.passed
    golden = write_golden_vectors(tmp_path, project / "good.onnx", checked)
    assert golden.samples == SAMPLES
    assert golden.model.sha256 == verdicted.evidence.subject.sha256
    assert golden.origin.policy_sha256 == POLICY.digest()
    assert golden.origin.versions["torch"] == torch.__version__
    read = read_golden(tmp_path)
    images = read.inputs["input"]
    everything = np.load(project / "images.npy")
    assert all((everything == image).all(axis=(1, 2, 3)).any() for image in images)
    with torch.no_grad():
        logits = reference.model.eval()(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(read.outputs["logits"], logits, atol=1e-6)
    (output,) = golden.outputs
    assert output.top1_agreement == 1.0
    assert 0.0 < output.max_abs_diff < 1e-3
    top = np.sort(logits, axis=1)
    assert (top[:, -1] - top[:, -2] > 2 * output.max_abs_diff).all()
    result = verify_golden(project / "good.onnx", tmp_path)
    assert result.passed, result.problems


def test_golden_vectors_fail_for_a_changed_weight(tmp_path, project, checked):
    """Reject the file even if its digest is recorded: outputs differ from the vectors."""
    change_one_weight(project / "good.onnx", tmp_path / "bad.onnx")
    write_golden_vectors(tmp_path / "golden", tmp_path / "bad.onnx", checked)
    result = verify_golden(tmp_path / "bad.onnx", tmp_path / "golden")
    assert not result.passed
    assert "max_abs_diff" in result.problems[0]


def test_samples_without_clear_class_come_last(tmp_path, project, checked):
    """Choose samples with a clear class first, wherever they lie in the data."""
    images = np.load(project / "images.npy")

    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = checked[0].model

        def forward(self, image):
            tie = image.flatten(1)[:, :1] > 0
            return torch.where(tie, torch.zeros(()), self.inner(image))

    write_golden_vectors(tmp_path, project / "good.onnx", checked, model=Undecided())
    chosen = read_golden(tmp_path).inputs["input"]
    assert (images[:, 0, 0, 0] > 0).mean() > 0.3
    assert (chosen[:, 0, 0, 0] <= 0).all()


def test_golden_samples_fill_a_fixed_batch(tmp_path, project, checked):
    path = tmp_path / "fixed.onnx"
    settings = ExportSettings(
        strategy="traced", batch_size=4, input_names=("input",), output_names=("logits",),
        dynamic_batch=False,
    )  # fmt: skip
    images = np.load(project / "images.npy")
    export_model(checked[0].model, {"input": images[:4]}, settings=settings, output=path)
    assert write_golden_vectors(tmp_path / "golden", path, checked).samples == 4
    assert verify_golden(path, tmp_path / "golden").passed


def test_invalid_golden_vectors_are_refused(tmp_path, project, checked):
    path = project / "good.onnx"
    wrong_samples = SampleSet.from_arrays({"input": np.zeros((4, 1, 8, 7), np.float32)})
    with pytest.raises(InputMismatch):
        write_golden_vectors(tmp_path, path, checked, samples=wrong_samples)

    with pytest.raises(OutputMismatch, match="returns 2 outputs"):
        write_golden_vectors(
            tmp_path, path, checked, model=Function(lambda image: (image.flatten(1)[:, :5], image))
        )

    class Nan(nn.Module):
        def forward(self, image):
            return image.flatten(1)[:, :5] * float("nan")

    with pytest.raises(EvidenceError, match="NaN"):
        write_golden_vectors(tmp_path, path, checked, model=Nan())
    assert not list(tmp_path.iterdir())
    assert onnx.load(path)
