"""The spec beside a model's file: in the registry and in what comes from there.

Apart, so that who promotes and who deploys look for it in one place.
"""

from __future__ import annotations

from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError
from gate.preprocess.spec import PreprocessSpec
from gate.storage.digest import Digest
from gate.storage.foreign import read_foreign

PREPROCESSING = "preprocessing"
"""The folder of the spec, beside the ONNX file."""
SPEC = "spec.json"
_LIMIT = 1 << 16
"""Bytes of a spec at most; a whole one has some 400."""


def prove_spec(path: Path, expected: Digest, *, what: str) -> PreprocessSpec:
    """Read the spec that lies beside a file, if it has this digest.

    Raises DigestMismatch, also where it is missing or no spec; StorageError.
    """
    try:
        data = read_foreign(path, limit=_LIMIT)
        return PreprocessSpec.from_foreign(
            data, what=f"the preprocessing spec of {what}", sha256=expected
        )
    except EvidenceError as error:
        raise DigestMismatch(f"{what} has no whole preprocessing spec: {error}") from error


def spec_beside(onnx_path: Path) -> Path:
    """Where the spec of a model lies."""
    return onnx_path.parent / PREPROCESSING / SPEC
