"""The cells that are done, each in a file of its own that appears whole or not at all.

A run that was broken off goes on where it was; what was measured by other versions, or on another
device, has other names and is left alone.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.cuda.cell import TESTS, Cell, key_of, setting_of
from gate.errors import GateError
from gate.records.evidence import Evidence
from gate.storage import files

Status = Literal["measured", "refused", "not exported", "failed"]
"""`refused`: by the gate, before anything was computed. `failed`: neither; it is tried again."""


@dataclass(frozen=True)
class Kept:
    """What came of one cell."""

    name: str
    status: Status
    reason: str = ""
    """Why there is no evidence."""
    seconds: float = 0.0
    """Of the measurement that it shared with other roles."""
    evidence: Evidence | None = None
    """Of this runtime alone."""
    tests: Mapping[str, Any] | None = None
    """Counts, of the tests that need a device."""


class Store:
    """A folder with a file for each cell."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, mark: str) -> None:
        """`mark`: what each file says of a dry run; empty for a real one."""
        self.folder = folder
        self.identity = identity
        self._mark = mark

    def keep(self, kept: Kept, cell: Cell | None = None) -> None:
        """Write the file of a cell; None: of the tests. Raises StorageError."""
        plain = {
            "cell": kept.name,
            "status": kept.status,
            "reason": kept.reason,
            "seconds": round(kept.seconds, 3),
            "identity": self.identity,
            "tests": kept.tests,
            "evidence": kept.evidence.to_plain() if kept.evidence else None,
        }
        marked = {"dry_run": self._mark, **plain} if self._mark else plain
        packed = gzip.compress(json.dumps(marked).encode(), compresslevel=6, mtime=0)
        files.write_bytes(self._path(cell), packed)

    def get(self, cell: Cell | None = None) -> Kept | None:
        """What was kept of it; None: nothing, or what can't be read, which is measured anew."""
        plain = self._plain(cell)
        try:
            evidence = plain["evidence"]
            return Kept(
                plain["cell"],
                plain["status"],
                plain["reason"],
                plain["seconds"],
                None if evidence is None else Evidence.from_json(json.dumps(evidence)),
                plain["tests"],
            )
        except (GateError, KeyError):
            return None

    def done(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that need not be measured again."""
        return [cell for cell in cells if self._is_done(cell)]

    def _is_done(self, cell: Cell) -> bool:
        return self._plain(cell).get("status") not in (None, "failed")

    def _plain(self, cell: Cell | None) -> dict[str, Any]:
        """Empty where there is no file, or none that can be read."""
        try:
            plain = json.loads(gzip.decompress(self._path(cell).read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error):
            return {}
        return plain if isinstance(plain, dict) else {}

    def _path(self, cell: Cell | None) -> Path:
        if cell is None:
            key = key_of(TESTS, {}, self.identity)
        else:
            key = key_of(cell.name, setting_of(cell.part, cell.setting).plain(), self.identity)
        return self.folder / "cells" / f"{key}.json.gz"
