"""A real server, its real webhook, the real service: what happens within five seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.mlflow_client.connection import lent
from tests.end_to_end.stack import Stack, until
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.slow


def served(whole: Stack, seed: int = 1) -> str:
    """A version that was approved and is deployed."""
    number = whole.hand_in(seed).version
    assert number is not None
    whole.approve(number)
    assert until(lambda: whole.deployed() == whole.digest(number))
    return number


@exhaustive
@pytest.mark.proof
def test_approval_promotes_and_deploys(whole: Stack) -> None:
    number = whole.hand_in(1).version
    assert number is not None
    assert whole.waits() == number
    assert whole.serves() is None
    assert whole.deployed() is None
    whole.approve(number)
    assert until(lambda: whole.deployed() == whole.digest(number))
    assert whole.serves() == number
    # The last is written after it serves.
    done = [("passed", number), ("promoted", number), ("deployed", number)]
    assert until(lambda: whole.lines() == done), whole.lines()
    assert all(e.cause and e.cause in ("webhook", "timer") for e in whole.entries()[1:])
    assert whole.service is not None
    loaded = Path(f"/proc/{whole.service.pid}/maps").read_text()
    assert "onnxruntime" not in loaded  # which children of the service load
    assert "libtorch" not in loaded  # it needs no PyTorch


@exhaustive
@pytest.mark.proof
def test_champion_on_a_refused_version_is_taken_back(whole: Stack) -> None:
    good = served(whole)
    refused = whole.hand_in(2).version
    assert refused is not None
    whole.registry.set_tag(whole.model, refused, key="gate.review", value="rejected")
    assert until(lambda: ("rejected", refused) in whole.lines())
    whole.point(refused)
    assert until(lambda: ("reverted", good) in whole.lines())
    assert whole.serves() == good
    assert whole.deployed() == whole.digest(good)
    assert ("deployed", refused) not in whole.lines()


@exhaustive
@pytest.mark.proof
def test_an_artifact_that_is_overwritten_after_the_promotion_is_never_deployed(
    whole: Stack,
) -> None:
    good = served(whole)
    number = whole.hand_in(2).version
    assert number is not None
    artifacts = [
        path for path in whole.server.artifacts.rglob("model.onnx")
        if whole.digest(number) in _digest(path)
    ]  # fmt: skip
    assert artifacts
    for path in artifacts:
        path.write_bytes(path.read_bytes() + b"\0")
    whole.approve(number)
    assert until(lambda: ("refused", number) in whole.lines())
    assert whole.serves() == good
    assert whole.deployed() == whole.digest(good)


@exhaustive
@pytest.mark.proof
def test_a_deleted_version_that_waited_keeps_no_other_from_service(whole: Stack) -> None:
    gone, good = whole.hand_in(1).version, whole.hand_in(2).version
    assert gone is not None
    assert good is not None
    with lent(whole.server.uri):
        client = MlflowClient(whole.server.uri, whole.server.uri)
        client.delete_model_version(whole.model, gone)
    whole.approve(good)
    assert until(lambda: whole.deployed() == whole.digest(good))
    assert whole.serves() == good
    assert ("refused", gone) in whole.lines()


@exhaustive
@pytest.mark.proof
def test_while_no_fallback_can_be_had_nothing_serves(whole: Stack) -> None:
    good, bad = served(whole), whole.hand_in(2).version
    assert bad is not None
    away = whole.server.artifacts.rename(whole.server.artifacts.with_name("away"))
    try:
        whole.point(bad)
        assert until(lambda: ("reverted", None) in whole.lines())
        assert whole.serves() is None
        assert whole.deployed() == whole.digest(good)
    finally:
        away.rename(whole.server.artifacts)
    assert whole.stop() == 0
    whole.launch(interval=1)
    assert until(lambda: whole.serves() == good, 15)
    assert whole.deployed() == whole.digest(good)


@exhaustive
@pytest.mark.proof
def test_what_was_missed_is_made_up_for_at_the_start(whole: Stack) -> None:
    number = whole.hand_in(1).version
    assert number is not None
    assert whole.stop() == 0
    whole.approve(number)
    whole.launch()
    assert until(lambda: whole.deployed() == whole.digest(number), 15)


def _digest(path: object) -> str:
    import hashlib
    from pathlib import Path

    return hashlib.sha256(Path(str(path)).read_bytes()).hexdigest()
