"""How fast the service takes deliveries: many senders at once, over real HTTP, until it is on disk.

    python -m benchmarks.webhook_accept [--deliveries 2000] [--concurrent 200] [--json FILE]

The service runs as its own process with the given inbox and a Reconcile that takes a second, as
if MLflow answered slowly. Every delivery is signed and has an id of its own. Told are deliveries
a second, quantiles of the time from sending to the answer, and how much the service grew. Ends
with 1 if one was not answered 202, was not worked on afterwards, or took 30 s: MLflow's timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from gate.service.app import WEBHOOK_PATH
from gate.service.inbox import Inbox
from tests.service.deliveries import body, headers
from tests.service.processes import process

TIMEOUT_S = 30.0
SLOW_S = 1.0


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.inbox or f"sqlite:///{folder}/inbox.db"
        row = measure(
            Path(folder), url, deliveries=arguments.deliveries, concurrent=arguments.concurrent
        )
    print(f"{row['deliveries']} deliveries, {row['concurrent']} at once, inbox: {row['inbox']}")
    for name in ("per_second", "p50_ms", "p99_ms", "max_ms", "growth_mib", "accepted", "looks"):
        print(f"{name:<12} {row[name]:>10}")
    print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    raise SystemExit(0 if row["good"] else 1)


def measure(
    folder: Path, url: str, *, deliveries: int, concurrent: int
) -> dict[str, float | int | str | bool]:
    """One run: sends all, waits until all were worked on."""
    with process(folder, slow=SLOW_S, url=url) as service:
        address = service.address
        asyncio.run(_send(address, deliveries=concurrent, concurrent=concurrent))  # warms up
        before = _memory_mib(service.popen.pid)
        start = time.perf_counter()
        answers = asyncio.run(_send(address, deliveries=deliveries, concurrent=concurrent))
        seconds = time.perf_counter() - start
        growth = _memory_mib(service.popen.pid) - before
        inbox = Inbox(url)
        deadline = time.monotonic() + 60
        while inbox.depth() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = inbox.depth()
        inbox.close()
        looks = len(service.ended())
    times = sorted(taken for _status, taken in answers)
    accepted = sum(status == 202 for status, _taken in answers)
    quantiles = statistics.quantiles(times, n=100)
    return {
        "inbox": url.partition(":")[0],
        "deliveries": deliveries,
        "concurrent": concurrent,
        "per_second": round(deliveries / seconds),
        "p50_ms": round(quantiles[49] * 1e3, 1),
        "p99_ms": round(quantiles[98] * 1e3, 1),
        "max_ms": round(times[-1] * 1e3, 1),
        "growth_mib": round(growth, 1),
        "accepted": accepted,
        "left": left,
        "looks": looks,
        "good": accepted == deliveries and left == 0 and times[-1] < TIMEOUT_S,
    }


async def _send(address: str, *, deliveries: int, concurrent: int) -> list[tuple[int, float]]:
    """Status and seconds of each, by `concurrent` senders that keep a connection each.

    By hand: a client library's pool costs more with 200 connections than the service does.
    """
    raw = json.dumps(body()).encode()
    host, _, port = address.rpartition("/")[2].partition(":")
    left = iter(range(deliveries))
    answers: list[tuple[int, float]] = []

    async def sender() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in left:
            sent = headers(raw, delivery=str(uuid.uuid4()))
            fields = {"Host": host, "Content-Length": str(len(raw)), **sent}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            start = time.perf_counter()
            writer.write(f"POST {WEBHOOK_PATH} HTTP/1.1\r\n{head}\r\n".encode() + raw)
            status = await asyncio.wait_for(_status(reader), TIMEOUT_S)
            answers.append((status, time.perf_counter() - start))
        writer.close()

    await asyncio.gather(*(sender() for _ in range(concurrent)))
    return answers


async def _status(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
    return int(head.split()[1])


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deliveries", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--inbox", help="postgresql://…; default: sqlite in a temporary folder")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
