"""A malicious file is refused within the sandbox limits, and the deployed release stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import Digest, cli
from gate.deploy.deploy import SlotSource, deploy
from gate.deploy.store import ModelStore
from gate.errors import LimitExceeded
from tests.deploy import models
from tests.deploy.models import NAME, assert_complete, assert_no_leftovers
from tests.exhaustive import further_as_proofs
from tests.golden_vectors import vectors
from tests.onnx_file import hostile
from tests.onnx_file.hostile import PARENT_BYTES, TIGHT_LIMITS, WIDE_LIMITS
from tests.sandbox.peak import bounded_growth

SMALL_LIMITS = ["--time-limit", "3s", "--memory-limit", "300MB"]


def _fetch_file(path: Path):
    def fetch(folder: Path) -> Path:
        return Path(path.rename(folder / "model.onnx"))

    return fetch


@pytest.fixture(autouse=True)
def read_untrusted_files_in_process() -> None:
    """Override the fixture of conftest.py: these tests use the sandbox."""


@pytest.mark.proof
@pytest.mark.parametrize("make", (hostile.EXPENSIVE_TO_READ | hostile.EXPENSIVE_TO_LOAD).values())
def test_file_that_exceeds_the_limits_is_refused_unevaluated(tmp_path: Path, make) -> None:
    store = ModelStore(tmp_path / "srv")
    assert deploy(store, NAME, {"exact": models.source(tmp_path)}).outcome == "deployed"
    path = make(tmp_path / "hostile.onnx")
    source = SlotSource(
        Digest.from_file(path), _fetch_file(path), golden_required=False, limits=TIGHT_LIMITS
    )
    with bounded_growth(PARENT_BYTES):
        result = deploy(store, NAME, {"exact": source})
    assert (result.outcome, result.judged) == ("refused", False)
    assert "Nothing was decided" in result.reason
    assert assert_complete(store).release == 1
    assert_no_leftovers(store)


@pytest.mark.further
def test_local_file_is_read_in_the_sandbox(tmp_path: Path) -> None:
    path = hostile.empty_nodes(tmp_path / "model.onnx")
    with bounded_growth(PARENT_BYTES), pytest.raises(LimitExceeded):
        SlotSource.local(path, limits=TIGHT_LIMITS)


@pytest.mark.further
def test_good_file_is_deployed_within_limits(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "srv")
    path, golden = vectors.write_model_and_vectors(tmp_path)
    source = SlotSource.local(path, golden=golden, limits=WIDE_LIMITS)
    assert deploy(store, NAME, {"exact": source}).outcome == "deployed"
    assert_complete(store)


@pytest.mark.rows(2)
@pytest.mark.parametrize("make", further_as_proofs([hostile.endless_loop, hostile.empty_nodes], 2))
@pytest.mark.parametrize("command", ["deploy", "verify-release"])
def test_commands_exit_with_2_when_limits_are_exceeded(
    tmp_path, monkeypatch, capsys, make, command
):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path / "model.onnx")
    vectors.write_uncomputable_vectors(tmp_path / "golden", path)
    arguments = ["verify-release", "model.onnx", "--golden", "golden", *SMALL_LIMITS, "--json"]
    if command == "deploy":
        arguments = ["deploy", "digits", "--store", "srv", "--file", "model.onnx"]
        arguments += ["--golden", "golden", *SMALL_LIMITS, "--json"]
    with bounded_growth(PARENT_BYTES):
        assert cli.main(arguments) == 2
    plain = json.loads(capsys.readouterr().out)
    reason = plain["reason"] if "reason" in plain else plain["error"]["message"]
    assert "-limit" in reason
    assert not ModelStore(tmp_path / "srv").names()
