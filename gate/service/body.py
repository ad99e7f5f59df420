"""Reading a request's body, no more of it than is allowed and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from starlette.requests import ClientDisconnect, Request


@dataclass(frozen=True)
class UnreadBody:
    """Why there is no body, and what the sender is told."""

    outcome: Literal["too_large", "slow", "gone"]
    status: int


async def read_body(request: Request, *, cap: int, timeout_s: float) -> bytes | UnreadBody:
    """The body, or why not. Never holds more than `cap` bytes and one chunk of the server's."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > cap:
        return UnreadBody("too_large", 413)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > cap:
                    return UnreadBody("too_large", 413)
    except TimeoutError:
        return UnreadBody("slow", 408)
    except ClientDisconnect:
        return UnreadBody("gone", 400)
    return bytes(body)
