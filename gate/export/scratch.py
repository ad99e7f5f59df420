"""A folder for half-finished work beside the file that it will become."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gate.storage.atomic import writer_lives


@contextlib.contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """Yield an empty folder beside `output`, so that a file in it can be moved there atomically.

    It is removed at the end, and so are those that killed processes left. Raises OSError.
    """
    for stale in output.parent.glob(f".{output.name}.*.scratch"):
        if not writer_lives(stale):
            shutil.rmtree(stale, ignore_errors=True)
    room = output.with_name(f".{output.name}.{os.getpid()}.scratch")
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
