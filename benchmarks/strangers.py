"""What strangers can do to MLflow's deliveries, and to the memory of the service.

    python -m benchmarks.strangers [--deliveries 20000] [--concurrent 200] [--json FILE]

Runs the real `gate serve` with a model of 64 MiB deployed, and 500 strangers who come again
whenever they are turned away: heads and bodies that come by a byte a second, downloads that nobody
reads or that are aborted, chunks that are none, bodies that are too large. Then sends deliveries as
`benchmarks.webhook_accept` does. Ends with 1 if one of them is not answered 202 or not in the inbox
afterwards, p99 is 2 s or more, or the memory grew beyond its bound (`docs/production.md`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
from pathlib import Path

from benchmarks.webhook_accept import SLOW_S, _send
from gate.service.inbox import Inbox
from gate.service.settings import ServiceSettings
from tests.deploy.forged import store_of
from tests.service.processes import process
from tests.service.strangers import crowd

P99_S = 2.0
STRANGERS = {"head": 150, "body": 150, "unread": 100, "abort": 80, "chunk": 10, "large": 10}
_MODEL_SIZE = 64 << 20
_MIB = 1 << 20


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(
            Path(folder), deliveries=arguments.deliveries, concurrent=arguments.concurrent
        )
    for name, value in row.items():
        print(f"{name:<16} {value}")
    print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    raise SystemExit(0 if row["good"] else 1)


def bound_mib() -> float:
    """By how much the service may grow at most, with the default settings."""
    defaults = ServiceSettings.of(models=["digits"], tracking_uri="http://127.0.0.1:1")
    connection = defaults.body_cap + (96 << 10)  # the body, what was read beyond it, the objects
    download = 3 * (128 << 10)  # a part that is read, written, and not taken yet
    return (defaults.connections * connection + defaults.downloads * download) / _MIB


def measure(
    folder: Path, *, deliveries: int, concurrent: int
) -> dict[str, float | int | str | bool]:
    """One run: strangers come, then all deliveries are sent."""
    url = f"sqlite:///{folder}/inbox.db"
    store_of(folder / "store", bytes(_MODEL_SIZE))
    with process(folder, "--store", str(folder / "store"), slow=SLOW_S, url=url) as service:
        pid = service.popen.pid
        # Its threads and caches are there after some deliveries.
        asyncio.run(_send(service.address, deliveries=concurrent, concurrent=concurrent))
        before, read_before = _status_mib(pid, "VmHWM"), _read_mib(pid)
        with crowd(service.address, **STRANGERS) as strangers:
            answers = asyncio.run(
                _send(service.address, deliveries=deliveries, concurrent=concurrent)
            )
            strangers.leave()
        peak, read = _status_mib(pid, "VmHWM"), _read_mib(pid) - read_before
        log = service.log.read_text()
    times = sorted(taken for _status, taken in answers)
    quantiles = statistics.quantiles(times, n=100)
    accepted = sum(status == 202 for status, _taken in answers)
    lost = deliveries + concurrent - _kept(url)
    good = accepted == deliveries and lost == 0 and quantiles[98] < P99_S
    return {
        "deliveries": deliveries,
        "concurrent": concurrent,
        "strangers": sum(STRANGERS.values()),
        "came": strangers.came,
        "p50_ms": round(quantiles[49] * 1e3, 1),
        "p99_ms": round(quantiles[98] * 1e3, 1),
        "max_ms": round(times[-1] * 1e3, 1),
        "accepted": accepted,
        "lost": lost,
        "tracebacks": log.count("Traceback"),
        "before_mib": round(before, 1),
        "growth_mib": round(peak - before, 1),
        "bound_mib": round(bound_mib(), 1),
        "read_mib": round(read, 1),
        "good": good and peak - before < bound_mib() and "Traceback" not in log,
    }


def _kept(url: str) -> int:
    inbox = Inbox(url)
    with inbox._reading() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM gate_inbox").scalar_one()
    inbox.close()
    return int(found)


def _status_mib(pid: int, field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _read_mib(pid: int) -> float:
    """What it read from files and sockets, of the cache too."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1]) / _MIB


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deliveries", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
