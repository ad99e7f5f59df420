"""A foreign file runs within limits; what can't be judged within them is no verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import EvidenceError, LimitExceeded
from gate.golden.verify import loading_problem, verify_golden, verify_golden_in_sandbox
from gate.storage.digest import Digest
from tests.golden_vectors import vectors
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, ROOMY, TIGHT
from tests.sandbox.peak import bounded_growth


@pytest.mark.parametrize("seed", [0, 1], ids=["good", "of another file"])
def test_the_child_says_the_same(tmp_path: Path, seed: int) -> None:
    path, _ = vectors.made(tmp_path)
    _, folder = vectors.made(tmp_path / "other", seed=seed)
    here = verify_golden(path, folder)
    assert (
        verify_golden_in_sandbox(path, folder, ROOMY)
        == here
        == verify_golden_in_sandbox(path, folder, None)
    )
    assert here.passed == (seed == 0)
    named = verify_golden_in_sandbox(path, folder, ROOMY, sha256=Digest("0" * 64))
    assert not named.passed


def test_vectors_that_are_not_whole(tmp_path: Path) -> None:
    path, folder = vectors.made(tmp_path)
    (folder / "golden.json").write_text("{}")
    with pytest.raises(EvidenceError, match="not a valid Golden.* record"):
        verify_golden_in_sandbox(path, folder, ROOMY)


@pytest.mark.rows(2)
@pytest.mark.rows(4)
@pytest.mark.parametrize(
    "make", (hostile.RUN | hostile.LOADED).values(), ids=hostile.RUN | hostile.LOADED
)
def test_running_has_an_end(tmp_path: Path, make) -> None:
    path = make(tmp_path / "model.onnx")
    folder = vectors.impossible(tmp_path / "golden", path)
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded, match="^running model.onnx"):
        verify_golden_in_sandbox(path, folder, TIGHT)


@pytest.mark.parametrize("make", hostile.LOADED.values(), ids=hostile.LOADED)
def test_loading_has_an_end(tmp_path: Path, make) -> None:
    path = make(tmp_path / "model.onnx")
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded, match="^loading model.onnx"):
        loading_problem(path, TIGHT)


def test_what_can_not_be_loaded_is_said(tmp_path: Path) -> None:
    path, _ = vectors.made(tmp_path)
    assert loading_problem(path, ROOMY) is None
    path.write_bytes(b"\xff" * 100)
    problem = loading_problem(path, ROOMY)
    assert problem == loading_problem(path, None)
    assert problem is not None
    assert "Protobuf" in problem


def test_a_constant_that_does_not_fit_is_no_verdict_in_this_process_either(tmp_path: Path) -> None:
    path = hostile.large_constant(tmp_path / "model.onnx", exponent=50)
    folder = vectors.impossible(tmp_path / "golden", path)
    with pytest.raises(LimitExceeded, match="needs more memory than available"):
        verify_golden(path, folder)
