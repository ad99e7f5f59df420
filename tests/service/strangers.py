"""Strangers who keep a service busy, in a process of their own: they sign nothing.

    python -m tests.service.strangers ADDRESS KIND=NUMBER ...

Whoever is turned away comes again after a second. Writes how often each kind was, when it ends.

head    says most of a long head, and a byte of the rest in a second
body    claims a delivery with a body, sends most of it, and a byte of the rest in a second
unread  asks for the deployed model and reads nothing
abort   asks for it, reads a little and goes away, again and again
chunk   sends a body in chunks that are none
large   claims a delivery with a body of a megabyte, and sends it
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.service.deliveries import headers

_AGAIN_S = 1.0
_GET = b"GET /models/digits/model.onnx HTTP/1.1\r\nHost: x\r\n\r\n"
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _post(**more: str) -> bytes:
    """As MLflow's, with a signature of nobody's."""
    sent = {"Host": "x", **headers(b"", secret="a secret of nobody's"), **more}
    fields = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"POST /webhooks/mlflow HTTP/1.1\r\n{fields}\r\n".encode()


@asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[Peer]:
    opened = socket.socket()
    # Small, so that what is not read stays with the service.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.setblocking(False)
    await asyncio.get_running_loop().sock_connect(opened, (host, port))
    reader, writer = await asyncio.open_connection(sock=opened, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _dribble(peer: Peer, begin: bytes) -> None:
    reader, writer = peer
    writer.write(begin)
    gone = asyncio.ensure_future(reader.read(1))
    while not gone.done():
        writer.write(b"x")
        await asyncio.wait({gone}, timeout=1)
    await gone


async def _unread(peer: Peer) -> None:
    reader, writer = peer
    writer.write(_GET)
    await reader.readexactly(100)
    while not writer.is_closing():
        writer.write(b"\r\n")  # to notice the end, although nothing is read
        await asyncio.sleep(1)


async def _abort(peer: Peer) -> None:
    reader, writer = peer
    writer.write(_GET)
    await reader.readexactly(2000)


async def _say(peer: Peer, said: bytes) -> None:
    reader, writer = peer
    writer.write(said)
    await writer.drain()
    await reader.read(1)


async def _stranger(kind: str, host: str, port: int, counts: Counter[str]) -> None:
    acts = {
        "head": lambda peer: _dribble(
            peer, b"POST /webhooks/mlflow HTTP/1.1\r\nX: " + b"x" * 15_000
        ),
        "body": lambda peer: _dribble(peer, _post(**{"Content-Length": "65000"}) + bytes(64_000)),
        "unread": _unread,
        "abort": _abort,
        "chunk": lambda peer: _say(peer, _post(**{"Transfer-Encoding": "chunked"}) + b"zz\r\n" * 9),
        "large": lambda peer: _say(
            peer, _post(**{"Transfer-Encoding": "chunked"}) + b"f4240\r\n" + bytes(1_000_000)
        ),
    }
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with _connected(host, port) as peer:
                counts[kind] += 1
                await acts[kind](peer)
        await asyncio.sleep(_AGAIN_S)


async def _all(address: str, wanted: list[str]) -> None:
    host, _, port = address.rpartition("/")[2].partition(":")
    counts: Counter[str] = Counter()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    tasks = [
        asyncio.create_task(_stranger(kind, host, int(port), counts))
        for kind, number in (one.split("=") for one in wanted)
        for _ in range(int(number))
    ]
    kinds = {one.partition("=")[0] for one in wanted}
    while counts.total() < len(tasks) or kinds - counts.keys():
        await asyncio.sleep(0.05)
    print("all came", flush=True)
    await over.wait()
    print(" ".join(f"{kind}={number}" for kind, number in sorted(counts.items())), flush=True)
    for task in tasks:
        task.cancel()


class Crowd:
    """Strangers that are there; `told` is how often each kind came, when they are gone."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self.came = ""

    def leave(self) -> None:
        self._popen.send_signal(signal.SIGTERM)
        self.came = self._popen.communicate(timeout=30)[0].strip()


@contextmanager
def crowd(address: str, **numbers: int) -> Iterator[Crowd]:
    """Strangers of each kind around a service, all of whom were there once at least."""
    wanted = [f"{kind}={number}" for kind, number in numbers.items()]
    command = [sys.executable, "-m", "tests.service.strangers", address, *wanted]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        begun = time.monotonic()
        assert popen.stdout.readline() == "all came\n", "the strangers could not connect"
        assert time.monotonic() - begun < 60
        yield Crowd(popen)
    finally:
        popen.kill()
        popen.communicate()


if __name__ == "__main__":
    asyncio.run(_all(sys.argv[1], sys.argv[2:]))
