"""Deliveries that come at once are put on disk at once: one commit for all that wait.

A commit costs some milliseconds whatever is in it. Without this, two hundred deliveries at the
same time would wait for two hundred commits, one after another.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import anyio

from gate.service.inbox import Delivery, Inbox

_BATCH = 200


class Intake:
    """Feeds the inbox from an event loop without blocking it; one commit is under way at a time."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: list[tuple[Delivery, asyncio.Future[Literal["new", "seen"]]]] = []
        self._feeding: asyncio.Task[None] | None = None
        self._thread = anyio.CapacityLimiter(1)  # its own: no download can have taken it

    async def receive(self, delivery: Delivery) -> Literal["new", "seen"]:
        """As `Inbox.receive`. Raises StateUnavailable."""
        state = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, state))
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.create_task(self._feed())
        found: Literal["new", "seen"] = await state
        return found

    async def _feed(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            deliveries = [delivery for delivery, _state in batch]
            try:
                states = await anyio.to_thread.run_sync(
                    self._inbox.receive, deliveries, limiter=self._thread
                )
            except Exception as error:
                for _delivery, state in batch:
                    if not state.done():
                        state.set_exception(error)
                continue
            for (_delivery, state), found in zip(batch, states, strict=True):
                if not state.done():
                    state.set_result(found)
