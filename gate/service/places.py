"""So many requests in an application at once, so that its clients take nothing from others."""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gate.service.connection import Connection

_RETRY_AFTER_S = 5

_STALLED_S = 1.0
"""Whoever has read nothing for so long makes room for somebody who may."""


class Places:
    """`app` for at most `most` requests at once; more get 503, unless somebody does not read."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app = app
        self._most = most
        self._taken: set[Connection] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        connection: Connection = scope["state"]["connection"]
        if len(self._taken) >= self._most and not self._made_room():
            headers = {"Retry-After": str(_RETRY_AFTER_S), "Cache-Control": "no-store"}
            await PlainTextResponse("busy", 503, headers)(scope, receive, send)
            return
        self._taken.add(connection)
        try:
            await self._app(scope, receive, send)
        finally:
            self._taken.discard(connection)

    def _made_room(self) -> bool:
        stalled = max(self._taken, key=Connection.stalled_s)
        if stalled.stalled_s() < _STALLED_S:
            return False
        self._taken.discard(stalled)
        stalled.give_up()
        return True
