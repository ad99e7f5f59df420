"""An untrusted file runs within limits, and exceeding a limit is not a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import Digest, verify_golden
from gate.errors import EvidenceError, LimitExceeded
from gate.golden.verify import loading_problem, verify_golden_in_sandbox
from tests.golden_vectors import vectors
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, TIGHT_LIMITS, WIDE_LIMITS
from tests.sandbox.peak import bounded_growth


@pytest.mark.further
@pytest.mark.parametrize("seed", [0, 1], ids=["good", "of another file"])
def test_sandboxed_result_equals_the_local_result(tmp_path: Path, seed: int) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    _, folder = vectors.write_model_and_vectors(tmp_path / "other", seed=seed)
    local = verify_golden(path, folder)
    assert (
        verify_golden_in_sandbox(path, folder, WIDE_LIMITS)
        == local
        == verify_golden_in_sandbox(path, folder, None)
    )
    assert local.passed == (seed == 0)
    other_digest = verify_golden_in_sandbox(path, folder, WIDE_LIMITS, sha256=Digest("0" * 64))
    assert not other_digest.passed


def test_incomplete_vectors_are_refused(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    (folder / "golden.json").write_text("{}")
    with pytest.raises(EvidenceError, match="not a valid Golden.* record"):
        verify_golden_in_sandbox(path, folder, WIDE_LIMITS)


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.rows(4)
@pytest.mark.parametrize(
    "make",
    (hostile.EXPENSIVE_TO_RUN | hostile.EXPENSIVE_TO_LOAD).values(),
    ids=hostile.EXPENSIVE_TO_RUN | hostile.EXPENSIVE_TO_LOAD,
)
def test_endless_run_exceeds_the_limit(tmp_path: Path, make) -> None:
    path = make(tmp_path / "model.onnx")
    folder = vectors.write_uncomputable_vectors(tmp_path / "golden", path)
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded, match="^running model.onnx"):
        verify_golden_in_sandbox(path, folder, TIGHT_LIMITS)


@pytest.mark.further
@pytest.mark.parametrize("make", hostile.EXPENSIVE_TO_LOAD.values(), ids=hostile.EXPENSIVE_TO_LOAD)
def test_endless_load_exceeds_the_limit(tmp_path: Path, make) -> None:
    path = make(tmp_path / "model.onnx")
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded, match="^loading model.onnx"):
        loading_problem(path, TIGHT_LIMITS)


@pytest.mark.further
def test_load_failure_is_reported(tmp_path: Path) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    assert loading_problem(path, WIDE_LIMITS) is None
    path.write_bytes(b"\xff" * 100)
    problem = loading_problem(path, WIDE_LIMITS)
    assert problem == loading_problem(path, None)
    assert problem is not None
    assert "Protobuf" in problem


def test_memory_error_is_not_a_verdict(tmp_path: Path) -> None:
    path = hostile.large_constant(tmp_path / "model.onnx", exponent=50)
    folder = vectors.write_uncomputable_vectors(tmp_path / "golden", path)
    with pytest.raises(LimitExceeded, match="needs more memory than available"):
        verify_golden(path, folder)
