"""One connection. Whoever is waited for is only tolerated: in time, and as long as there is room.

A place is safe while a whole delivery is worked on, and only then. When all places are taken, the
one whose client is waited for the longest makes room, be it for the head of a request, for its
body, or for reading the answer. So a few hundred strangers who do nothing, or little, keep no
delivery out; MLflow sends its deliveries at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_READ = 1 << 14
"""Bytes that are taken from a socket at once, whose buffers are all of what a stranger can fill."""


Awaited = Literal["head", "body", "reading"]


class Connection(H11Protocol):
    """Uvicorn's, which bounds only how long a connection may be silent between two requests."""

    head_timeout_s = 10.0
    """Within which the head of a request must have arrived, from its first silence on."""

    def __init__(
        self, *arguments: Any, places: int, write_timeout_s: float, webhook: str, **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self._places = places
        self._webhook = webhook
        self._write_timeout_s = write_timeout_s
        self._awaited: Awaited | None = None
        self._since = 0.0
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; if there is none, somebody else's, who is waited for."""
        # Any byte that the client does not take pauses the writer: nothing piles up here.
        transport.set_write_buffer_limits(high=0)
        transport.max_size = _READ  # type: ignore[attr-defined]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._look()
        if len(self.connections) > self._places:
            others = [other for other in self.connections if isinstance(other, Connection)]
            lenient = [other for other in others if other is not self and other._makes_room()]
            if lenient:
                min(lenient, key=lambda other: other._since).give_up()
            else:
                self.limit_concurrency = 0  # it is told 503

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._rest()
        self.app_state = {}
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Look whether a request has begun or ended meanwhile."""
        super().handle_events()
        self._look()

    def on_response_complete(self) -> None:
        """The next request is awaited, within its own time."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """The client takes no more: it has its time to."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """It took all there was."""
        super().resume_writing()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """As uvicorn, but where an answer has begun no other can be, and nobody hears the rest."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.give_up()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def stalled_s(self) -> float:
        """For how long the client has read nothing of what it asked for."""
        return self.loop.time() - self._since if self._awaited == "reading" else 0.0

    def give_up(self) -> None:
        """End the connection at once, whatever is under way."""
        self._rest()
        self.connections.discard(self)
        self.transport.abort()

    def _makes_room(self) -> bool:
        return self._awaited is not None or self.scope["path"] != self._webhook

    def _look(self) -> None:
        """Find what is awaited; a wait that is new begins now."""
        awaited = self._what_is_awaited()
        if awaited == self._awaited and self._since:
            return
        self._rest()
        self._awaited, self._since = awaited, self.loop.time()
        limits = {"head": self.head_timeout_s, "reading": self._write_timeout_s}
        # A body's time is the application's, which answers 408.
        if awaited in limits and not self.transport.is_closing():
            self._overdue = self.loop.call_later(limits[awaited], self.give_up)

    def _what_is_awaited(self) -> Awaited | None:
        if self.flow.write_paused:
            return "reading"
        if self.cycle is None or self.cycle.response_complete:
            return "head"
        return "body" if self.cycle.more_body else None

    def _rest(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
