"""Of which bytes a statement speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import EvidenceError
from gate.signing.subjects import GOLDEN, PREPROCESSING, statement_subjects
from gate.storage.digest import Digest
from tests import builders
from tests.registry.releases import evidence, onnx_file, onnx_file_with_data

VECTORS = builders.digest("golden.json")


def test_a_file_its_vectors_and_its_spec_by_name(tmp_path: Path) -> None:
    path, spec = onnx_file(tmp_path / "model.onnx"), builders.digest("spec")
    plain = evidence(path)
    file = {"model.onnx": Digest.of_file(path)}
    assert statement_subjects(path, plain, golden=None) == file
    source = plain.source.model_copy(update={"preprocess_sha256": spec})
    pictured = plain.model_copy(update={"source": source})
    assert statement_subjects(path, pictured, golden=VECTORS) == {
        **file,
        GOLDEN: VECTORS,
        PREPROCESSING: spec,
    }
    assert statement_subjects(path, pictured, golden=None, preprocessing=False) == file


def test_data_that_leads_elsewhere_is_not_read(tmp_path: Path) -> None:
    path = onnx_file_with_data(tmp_path / "model.onnx")
    of = evidence(path)
    subject = of.subject.model_copy(update={"external_data": ("../secret",)})
    with pytest.raises(EvidenceError, match="inside of the model's folder"):
        statement_subjects(path, of.model_copy(update={"subject": subject}), golden=None)
