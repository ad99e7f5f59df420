"""Detect which runs a live process of this project on this machine is writing.

Each open run holds a file lock that the kernel releases when the process dies, even by kill -9. A
run whose lock is free was abandoned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gate.storage.digest import Digest


class RunWatch:
    """Lock files `<server>-<run id>.lock` in `folder`, one for each open run."""

    def __init__(self, folder: Path, *, uri: str) -> None:
        self._folder = folder
        self._server = Digest.from_bytes(uri.encode()).short

    @contextlib.contextmanager
    def alive(self, run_id: str) -> Iterator[None]:
        """Hold the lock of `run_id`; remove the file when the run has ended normally."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._server}-{run_id}.lock"
        with FileLock(path):
            path.touch()
            yield
            path.unlink(missing_ok=True)

    def end_abandoned(self, end: Callable[[str], None]) -> None:
        """Call `end(run_id)` for each run of this server whose writer has died."""
        for path in sorted(self._folder.glob(f"{self._server}-*.lock")):
            lock = FileLock(path, blocking=False)
            try:
                with lock:
                    end(path.stem.removeprefix(f"{self._server}-"))
                    path.unlink(missing_ok=True)
            except Timeout:
                continue
