"""Measure how fast the service accepts concurrent deliveries over HTTP until it reconciles.

    python -m benchmarks.webhook_accept [--deliveries 20000] [--concurrent 200] [--json FILE]

The service runs as a separate process with a reconcile that takes a second, as with a slow MLflow.
Each delivery has a unique id; after every hundred, one has a wrong signature or none. Prints
deliveries per second, quantiles of the time from request to answer, the growth of the service's
memory, and the load of the machine. Exits with 1 if a signed delivery was not answered with 202 or
another one not with 401, if the 99th percentile is 1 s or more, or if no reconcile began after the
last delivery.
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
"""One forged delivery follows this many signed ones."""
SLOW_S = 1.0


class Answer(NamedTuple):
    """The outcome of one delivery."""

    status: int
    sent: float
    """Time of the request by the monotonic clock, in seconds."""
    seconds_to_answer: float
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
    """Send all deliveries, wait for a later reconcile, and return the metrics."""
    with run_process(folder, slow=SLOW_S) as service:
        address = service.address
        asyncio.run(_send(address, deliveries=concurrent, concurrent=concurrent))  # warms up
        before = _read_memory_mib(service.popen.pid)
        start = time.perf_counter()
        answers = asyncio.run(_send(address, deliveries=deliveries, concurrent=concurrent))
        seconds = time.perf_counter() - start
        growth = _read_memory_mib(service.popen.pid) - before
        last = max(answer.sent for answer in answers if answer.is_signed)
        wait_until(lambda: any(float(begun) >= last for begun in service.lines("begun-at")))
        reconciles = len(service.lines("begun-at"))
    times = sorted(answer.seconds_to_answer for answer in answers)
    accepted = sum(answer.status == 202 for answer in answers if answer.is_signed)
    forged = [answer.status for answer in answers if not answer.is_signed]
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
        "looks": reconciles,
        "load": round(os.getloadavg()[0], 1),
        "good": accepted == deliveries and refused == len(forged) and quantiles[98] < P99_S,
    }


async def _send(address: str, *, deliveries: int, concurrent: int) -> list[Answer]:
    """Send all deliveries with `concurrent` senders, each on its own connection.

    Uses plain sockets, because a client library's pool costs more with 200 connections than the
    service does.
    """
    raw = json.dumps(event_body()).encode()
    host, _, port = address.rpartition("/")[2].partition(":")
    numbers = iter(range(deliveries + deliveries // FORGED_EVERY))
    answers: list[Answer] = []

    async def sender() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in numbers:
            is_signed = number % (FORGED_EVERY + 1) != FORGED_EVERY
            sent = signed_headers(
                raw, delivery=str(uuid.uuid4()), secret=SECRET if is_signed else "x" * 40
            )
            if not is_signed and number % 2:
                del sent[SIGNATURE_HEADER]
            fields = {"Host": host, "Content-Length": str(len(raw)), **sent}
            header = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            start = time.monotonic()
            writer.write(f"POST {WEBHOOK_PATH} HTTP/1.1\r\n{header}\r\n".encode() + raw)
            status = await asyncio.wait_for(_status(reader), TIMEOUT_S)
            answers.append(Answer(status, start, time.monotonic() - start, is_signed))
            if status >= 400:  # the service closes the connection
                writer.close()
                reader, writer = await asyncio.open_connection(host, int(port))
        writer.close()

    await asyncio.gather(*(sender() for _ in range(concurrent)))
    return answers


async def _status(reader: asyncio.StreamReader) -> int:
    header = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(header.partition("content-length: ")[2].split()[0]))
    return int(header.split()[1])


def _read_memory_mib(pid: int) -> float:
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
