"""A real server, its real webhook, the real service: what happens within five seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

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
def test_what_was_missed_is_made_up_for_at_the_start(whole: Stack) -> None:
    number = whole.hand_in(1).version
    assert number is not None
    assert whole.stop() == 0
    whole.approve(number)
    whole.launch()
    assert until(lambda: whole.deployed() == whole.digest(number), 15)
