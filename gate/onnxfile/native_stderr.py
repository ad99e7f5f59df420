"""What C++ code says on stderr: apart, because Python's own redirection does not see it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def captured_stderr(lines: list[str] | None = None) -> Iterator[list[str]]:
    """Collect what is written to file descriptor 2; the list of lines is filled at the end, also
    where it ends with an error."""
    lines = [] if lines is None else lines
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            lines += log.read().splitlines()
