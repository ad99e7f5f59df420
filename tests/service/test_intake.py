from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gate.errors import StateUnavailable
from gate.service.inbox import Delivery, Inbox
from gate.service.intake import Intake
from tests.service.deliveries import delivery


class Watched:
    """An inbox whose commits are counted, and can be held up or fail."""

    def __init__(self, folder: Path) -> None:
        self.inbox = Inbox(f"sqlite:///{folder}/inbox.db")
        self.batches: list[int] = []
        self.go_on = threading.Event()
        self.fails = False

    def receive(self, deliveries: Sequence[Delivery]) -> list:
        self.batches.append(len(deliveries))
        self.go_on.wait(10)
        if self.fails:
            raise StateUnavailable("the disk is full")
        return self.inbox.receive(deliveries)


@pytest.fixture
def watched(tmp_path: Path):
    made = Watched(tmp_path)
    yield made
    made.inbox.close()


async def _at_once(watched: Watched, number: int) -> list:
    intake = Intake(watched)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(intake.receive(delivery("0")))]
    while not watched.batches:
        await asyncio.sleep(0.001)
    tasks += [
        asyncio.create_task(intake.receive(delivery(str(name % 250)))) for name in range(number)
    ]
    await asyncio.sleep(0.05)
    watched.go_on.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_what_waits_is_committed_together(watched: Watched) -> None:
    states = asyncio.run(_at_once(watched, 300))
    assert watched.batches == [1, 200, 100]
    assert states.count("new") == 250
    assert states.count("seen") == 51
    assert watched.inbox.depth() == 250


def test_everybody_is_told_of_a_failure_and_the_next_may_succeed(watched: Watched) -> None:
    watched.fails = True
    states = asyncio.run(_at_once(watched, 5))
    assert [type(state) for state in states] == [StateUnavailable] * 6
    watched.fails = False
    assert asyncio.run(Intake(watched).receive(delivery("0"))) == "new"  # type: ignore[arg-type]


def test_a_sender_that_gave_up_harms_no_other(watched: Watched) -> None:
    async def some_give_up() -> list:
        intake = Intake(watched)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(intake.receive(delivery(str(name)))) for name in range(4)]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        await asyncio.sleep(0)
        watched.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    states = asyncio.run(some_give_up())
    assert [states[0], *states[2:]] == ["new"] * 3
    assert isinstance(states[1], asyncio.CancelledError)
    assert watched.inbox.depth() == 4
