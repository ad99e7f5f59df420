"""Folders that one worker of a test run fills for all workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

VARIABLE = "PARITY_TESTS_FOLDER"
"""The folder of this test run (conftest.py)."""


def once(name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that `fill` filled as its current folder. Only copies of it may be changed."""
    base = Path(os.environ[VARIABLE])
    folder, filled = base / name, base / f"{name}.filled"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with contextlib.chdir(folder):
                fill(folder)
            filled.touch()
    return folder
