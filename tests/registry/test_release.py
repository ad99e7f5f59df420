from __future__ import annotations

import pytest

from gate.errors import DigestMismatch
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.storage.digest import Digest
from tests.registry.releases import onnx_file, onnx_file_with_data


def test_manifest_text_with_the_digest_of_a_model_is_not_accepted_as_model(tmp_path):
    """An attacker with write access could upload such a text in place of the model."""
    from gate.storage.digest import canonical_json

    path = onnx_file_with_data(tmp_path / "model.onnx")
    digests = {
        name: Digest.from_file(path.parent / name).hex for name in (path.name, "weights.data")
    }
    text = tmp_path / "text"
    for form in (digests, {name: f"sha256:{observed}" for name, observed in digests.items()}):
        text.write_bytes(canonical_json(form))
        with pytest.raises(DigestMismatch, match="not an ONNX model"):
            digest_of_model(text, external_data=())


def test_digest_of_model_equals_the_evidence_digest(tmp_path):
    from gate.onnx_file.reading import read_subject

    for path in (onnx_file(tmp_path / "a" / "one.onnx"), onnx_file_with_data(tmp_path / "b.onnx")):
        subject = read_subject(path)
        assert digest_of_model(path, external_data=subject.external_data) == subject.sha256
