"""The spec beside a model's file: in the registry and in what comes from there.

Apart, so that who promotes and who deploys look for it in one place.
"""

from __future__ import annotations

from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, PolicyError
from gate.preprocess.spec import PreprocessSpec
from gate.storage.digest import Digest

PREPROCESSING = "preprocessing"
"""The folder of the spec, beside the ONNX file."""
SPEC = "spec.json"


def prove_spec(path: Path, expected: Digest, *, what: str) -> PreprocessSpec:
    """Read a spec and compare its digest. Raises DigestMismatch, also where it is no spec."""
    try:
        spec = PreprocessSpec.of_file(path)
    except (EvidenceError, PolicyError) as error:
        raise DigestMismatch(f"{what} has no whole preprocessing spec: {error}") from error
    expected.verify(spec.digest(), what=f"the preprocessing spec of {what}")
    return spec


def spec_beside(onnx_path: Path) -> Path:
    """Where the spec of a model lies."""
    return onnx_path.parent / PREPROCESSING / SPEC
