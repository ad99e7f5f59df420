"""Connections that wait for nobody: silent ones are closed, and make room when it is needed.

Uvicorn bounds how long a connection may be silent between two requests only, so a few hundred
that never say anything would take every place that there is.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """One connection; while it owes us the head of a request it is only tolerated."""

    head_timeout_s = 10.0
    """Within which the head of a request must have arrived, from its first silence on."""

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; the one that has been silent the longest loses its own if all are taken."""
        super().connection_made(transport)
        self._watch()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = [other for other in self.connections if isinstance(other, Connection)]
            silent = [other for other in others if other is not self and other._overdue]
            if silent:
                min(silent, key=Connection._deadline)._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is owed any more."""
        self._rest()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Look whether a request has begun or ended meanwhile."""
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        elif self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(self.head_timeout_s, self._give_up)

    def on_response_complete(self) -> None:
        """The next request is awaited, within its own time."""
        super().on_response_complete()
        self._watch()

    def _deadline(self) -> float:
        return self._overdue.when() if self._overdue is not None else 0.0

    def _rest(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._rest()
        self.connections.discard(self)
        self.transport.abort()
