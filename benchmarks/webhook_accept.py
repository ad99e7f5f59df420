"""Measure how fast the service accepts concurrent deliveries over HTTP until it reconciles.

    python -m benchmarks.webhook_accept [--deliveries 20000] [--concurrent 200] [--json FILE]

The service runs as a separate process with a Reconcile that takes a second, as if MLflow answered
slowly. Each delivery has a unique id; after every hundred, one has a wrong signature or none.
Prints deliveries per second, quantiles of the time from request to answer, the growth of the
service's memory, and the load of the machine. Exits with 1 if a signed delivery was not answered
202, another one not 401, the 99th percentile is 1 s or more, or no reconcile began after the last
delivery.
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
from typing import NamedTuple

from gate.service.app import SIGNATURE_HEADER, WEBHOOK_PATH
from tests.service.deliveries import SECRET, event_body, signed_headers, wait_until
from tests.service.processes import run_process

TIMEOUT_S = 30.0
P99_S = 1.0
FORGED_EVERY = 100
"""After so many deliveries comes one that is not MLflow's."""
SLOW_S = 1.0


class Answer(NamedTuple):
    """What came of one delivery."""

    status: int
    sent: float
    """By the machine's monotonic clock, in seconds."""
    taken: float
    """Seconds until the answer."""
    is_signed: bool


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(
            Path(folder), deliveries=arguments.deliveries, concurrent=arguments.concurrent
        )
    print(f"{row['deliveries']} deliveries, {row['concurrent']} at once")
    for name in ("per_second", "p50_ms", "p99_ms", "max_ms", "growth_mib", "accepted", "forged",
                 "refused", "looks", "load"):  # fmt: skip
        print(f"{name:<12} {row[name]:>10}")
    print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    raise SystemExit(0 if row["good"] else 1)


def measure(
    folder: Path, *, deliveries: int, concurrent: int
) -> dict[str, float | int | str | bool]:
    """One run: sends all, waits for a look that began after the last one."""
    with run_process(folder, slow=SLOW_S) as service:
        address = service.address
        asyncio.run(_send(address, deliveries=concurrent, concurrent=concurrent))  # warms up
        before = _memory_mib(service.popen.pid)
        start = time.perf_counter()
        answers = asyncio.run(_send(address, deliveries=deliveries, concurrent=concurrent))
        seconds = time.perf_counter() - start
        growth = _memory_mib(service.popen.pid) - before
        last = max(each.sent for each in answers if each.is_signed)
        wait_until(lambda: any(float(begun) >= last for begun in service.lines("begun-at")))
        looks = len(service.lines("begun-at"))
    times = sorted(each.taken for each in answers)
    accepted = sum(each.status == 202 for each in answers if each.is_signed)
    forged = [each.status for each in answers if not each.is_signed]
    refused = sum(status == 401 for status in forged)
    quantiles = statistics.quantiles(times, n=100)
    return {
        "deliveries": deliveries,
        "concurrent": concurrent,
        "per_second": round(deliveries / seconds),
        "p50_ms": round(quantiles[49] * 1e3, 1),
        "p99_ms": round(quantiles[98] * 1e3, 1),
        "max_ms": round(times[-1] * 1e3, 1),
        "growth_mib": round(growth, 1),
        "accepted": accepted,
        "forged": len(forged),
        "refused": refused,
        "looks": looks,
        "load": round(os.getloadavg()[0], 1),
        "good": accepted == deliveries and refused == len(forged) and quantiles[98] < P99_S,
    }


async def _send(address: str, *, deliveries: int, concurrent: int) -> list[Answer]:
    """Send all by `concurrent` senders that keep a connection each.

    By hand: a client library's pool costs more with 200 connections than the service does.
    """
    raw = json.dumps(event_body()).encode()
    host, _, port = address.rpartition("/")[2].partition(":")
    left = iter(range(deliveries + deliveries // FORGED_EVERY))
    answers: list[Answer] = []

    async def sender() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in left:
            is_signed = number % (FORGED_EVERY + 1) != FORGED_EVERY
            sent = signed_headers(
                raw, delivery=str(uuid.uuid4()), secret=SECRET if is_signed else "x" * 40
            )
            if not is_signed and number % 2:
                del sent[SIGNATURE_HEADER]
            fields = {"Host": host, "Content-Length": str(len(raw)), **sent}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            start = time.monotonic()
            writer.write(f"POST {WEBHOOK_PATH} HTTP/1.1\r\n{head}\r\n".encode() + raw)
            status = await asyncio.wait_for(_status(reader), TIMEOUT_S)
            answers.append(Answer(status, start, time.monotonic() - start, is_signed))
            if status >= 400:  # the service closes the connection
                writer.close()
                reader, writer = await asyncio.open_connection(host, int(port))
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
    parser.add_argument("--deliveries", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
