"""Measure whether a reconcile of the service becomes slower as the ledger grows.

    python -m benchmarks.ledger_look [--few 300] [--many 30000] [--rounds 15] [--json FILE]

Uses a simulated registry, and a real ledger, store and head on disk. All entries are about one
model, six per version. Each round reconciles with a short and a long ledger: one without new
entries, one to which another process added an entry, and one that is read for the first time. Both
ledgers alternate in one process, so that the ratios are valid on machines with varying speed. Exits
with 1 if a reconcile of a running service takes more than three times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gate.deploy.store import ModelStore
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger, StoredHead, insert, sign
from gate.registry.registered_model import Reading
from gate.service.reconciler import HEAD_FILE, Reconciler
from gate.storage.digest import Digest, canonical_json
from tests.registry.releases import NAME
from tests.service.registry_setup import AUTOMATIC, RegistrySetup

RATIO_LIMIT = 3.0
ACTIONS = ("passed", "promoted", "deployed", "unchanged", "refused", "conflict")


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        few, many = (Bench(Path(folder, str(n)), n) for n in (arguments.few, arguments.many))
        row: dict[str, object] = {"few": arguments.few, "many": arguments.many}
        for case in ("nothing_new", "a_line_more", "at_first"):
            seconds = [
                [_measure_seconds(getattr(bench, case)) for bench in (few, many)]
                for _ in range(arguments.rounds)
            ]
            a, b = (statistics.median(times) for times in zip(*seconds, strict=True))
            row[case] = {"few_ms": 1e3 * a, "many_ms": 1e3 * b, "ratio": b / a}
            print(f"{case:<12} {1e3 * a:8.2f} ms {1e3 * b:8.2f} ms  {b / a:6.2f} times")
    print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    raise SystemExit(
        any(row[case]["ratio"] > RATIO_LIMIT for case in ("nothing_new", "a_line_more"))
    )  # type: ignore[index]


class Bench:
    """A deployed model that was promoted at the end of a long ledger."""

    def __init__(self, folder: Path, lines: int) -> None:
        folder.mkdir()
        self.setup = RegistrySetup(folder)
        fill(self.setup.ledger, lines)
        self.setup.promote(1)
        self.store = ModelStore(folder / "store")
        self._reconcile = self._new_reconciler()
        self.nothing_new()

    def nothing_new(self) -> None:
        """Reconcile without new ledger entries, as every minute."""
        self._reconcile(NAME, cause="timer")

    def a_line_more(self) -> None:
        """Reconcile after another process added an entry."""
        self.setup.model().write("conflict", "another line")
        self.nothing_new()

    def at_first(self) -> None:
        """Reconcile with a ledger that is read for the first time, as after a start."""
        self._reconcile = self._new_reconciler()
        self.nothing_new()

    def _new_reconciler(self) -> Reconciler:
        stored = StoredHead(self.store.root / HEAD_FILE, location="the store")
        ledger = Ledger(self.setup.ledger.state, stored_head=stored)
        return Reconciler(
            self.setup.registry, ledger, AUTOMATIC, store=self.store, reading=Reading()
        )


def fill(ledger: Ledger, lines: int) -> None:
    """Write `lines` entries about versions from 1000 on."""
    digest, parent, rows = Digest.from_bytes(b"file"), None, []
    for number in range(lines):
        entry = LedgerEntry.model_validate(
            {
                "action": ACTIONS[number % len(ACTIONS)],
                "registry": "simulator",
                "model": NAME,
                "version": str(1000 + number // len(ACTIONS)),
                "sha256": digest,
                "policy_sha256": digest,
                "evidence_sha256": digest,
                "reason": "PASS on ort-cpu, ort-cpu-optimized",
                "parent": parent,
            }
        )
        line = canonical_json(entry.to_plain())
        parent = Digest.from_bytes(line)
        rows.append(Row(number + 1, line, sign(line, ledger.key)))
    with ledger.state.writing() as connection:
        ledger.state.make_tables(connection)
        insert(connection, rows)


def _measure_seconds(reconcile: Callable[[], None]) -> float:
    start = time.perf_counter()
    reconcile()
    return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=300)
    parser.add_argument("--many", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
