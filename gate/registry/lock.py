"""One promotion or rollback at a time on one machine; whoever comes second is told who is first."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gate.errors import PromotionConflict, StorageError
from gate.registry.ledger import Ledger, now
from gate.storage.atomic import write_text

_PATIENCE, _PAUSE_S = 20, 0.05


@contextlib.contextmanager
def promotion_lock(ledger: Ledger, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock beside the ledger; the operating system frees it if this process dies.

    Raises PromotionConflict where another process holds it (at once, or after `patience_s`), and
    StorageError where the folder can't be written.
    """
    path = ledger.path.with_name(f"{ledger.path.name}.promotion.lock")
    holder = path.with_suffix(".holder")
    lock = FileLock(path, timeout=patience_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise PromotionConflict(
            f"another promotion or rollback is under way: {_describe(holder)} holds {path}. "
            "Nothing was changed. Wait until it is done, then repeat."
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}. Free space or fix permissions."
        ) from error
    try:
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
        write_text(holder, json.dumps(me))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _describe(holder: Path) -> str:
    # The winner writes its name just after it has the lock: give it a moment.
    for _ in range(_PATIENCE):
        try:
            who = json.loads(holder.read_text())
            return f"process {who['pid']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError):
            time.sleep(_PAUSE_S)
    return "a process that does not say its name"
