"""What C++ code says on stderr: apart, because Python's own redirection does not see it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_ONE = threading.RLock()
"""The descriptor is the whole process's: of two that took it at once, the one that ends last would
leave it on the other's file, which is gone."""


@contextlib.contextmanager
def captured_stderr(lines: list[str] | None = None) -> Iterator[list[str]]:
    """Collect what is written to file descriptor 2, by any thread; the list of lines is filled at
    the end, also where it ends with an error. Another thread that comes here waits."""
    lines = [] if lines is None else lines
    with _ONE, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        _flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            _flush()
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            lines += log.read().splitlines()


def _flush() -> None:
    if sys.stderr is not None:  # as in a process without a console
        sys.stderr.flush()
