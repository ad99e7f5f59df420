"""Files that are transferred by content arrive unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from gate import EvaluationData, Policy, Reference
from gate.api import build_job
from gate.distributed import worker
from gate.distributed.worker import Delivery, JobSpec
from gate.errors import DigestMismatch
from tests.distributed import test_processes

folder = test_processes.folder


class _Context:
    def get_node_id(self) -> str:
        return "here"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this process as the object store, with small chunks."""
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(put=bytes, get=bytes, get_runtime_context=_Context)
    )
    monkeypatch.setattr(worker, "_CHUNK_BYTES", 100)


@pytest.fixture
def assignment(folder: Path, tmp_path: Path) -> JobSpec:
    """The job of a file with external data and labels."""
    path = tmp_path / "here" / "model.onnx"
    path.parent.mkdir()
    onnx.save(
        onnx.load(folder / "model.onnx"), path, save_as_external_data=True,
        all_tensors_to_one_file=True, location="weights.bin", size_threshold=0,
    )  # fmt: skip
    reference = Reference.from_factory("tests.distributed.tiny:build")
    workload = EvaluationData.open(folder / "x.npy", labels=folder / "labels.npy", batch_size=8)
    case = build_job(path, reference=reference, data=workload, policy=Policy.default())
    return JobSpec.from_job(case, reference, workload)


def test_transferred_files_are_complete(assignment: JobSpec, tmp_path: Path) -> None:
    unpacked = Delivery.from_spec(assignment).unpacked(assignment, tmp_path / "there")
    assert Path(unpacked.onnx).is_relative_to(tmp_path / "there")
    assert (Path(unpacked.onnx).parent / "weights.bin").is_file()
    assert unpacked.labels is not None
    assert np.array_equal(np.load(unpacked.labels), np.load(str(assignment.labels)))
    case = unpacked.to_job()  # to_job verifies the digests
    assert case.candidate.subject.sha256 == assignment.subject_sha256


def test_changed_transfer_is_detected(assignment: JobSpec, tmp_path: Path) -> None:
    unpacked = Delivery.from_spec(assignment).unpacked(assignment, tmp_path / "there")
    data = Path(unpacked.onnx).parent / "weights.bin"
    flipped = bytearray(data.read_bytes())
    flipped[7] ^= 1
    data.write_bytes(flipped)
    with pytest.raises(DigestMismatch, match="for a worker"):
        unpacked.to_job()
