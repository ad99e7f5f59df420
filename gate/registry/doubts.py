"""Doubts: downloads that were not what they should be, until a second one says the same.

One wrong answer of a store is weather. The same wrong bytes again, in a fresh download after a
pause, are somebody's doing. What differs each time, or is no file of ours at all but a page that
tells of an error, is never confirmed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

from gate.storage.digest import Digest

PAUSE_S = 5.0
"""How long a command waits before it downloads once more."""

Key = tuple[str, str, Hashable]
"""Model with its workspace, version, and what was expected of it."""

_PAUSES = 3
"""For how many mismatches one command waits: others wait for its lock, and not for ever."""

_LONG_S = 600.0
"""After which trouble with one version is told as something that does not mend itself."""


@dataclass(frozen=True)
class _Doubt:
    since: float
    """When the first of an unbroken row of mismatches came."""
    digest: Digest | None
    """Of all that came then; None: an answer of the store, which is nobody's version."""
    at: float
    """When this came first."""


class MismatchMemory:
    """Mismatches that nothing confirmed yet, by what was downloaded. A process forgets them with
    its end, and its next one looks twice again."""

    def __init__(
        self,
        pause_s: float | None = None,
        *,
        wait: Callable[[float], None] | None = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait`: None for who comes again by itself, and does not hold a lock meanwhile."""
        self._pause_s = PAUSE_S if pause_s is None else pause_s
        self._wait = wait
        self._clock = clock
        self._waits_left = _PAUSES
        self._first: dict[Key, _Doubt] = {}

    def confirms(self, key: Key, digest: Digest | None) -> bool:
        """Keep a mismatch; True if it is that of an earlier download, at least a pause ago."""
        now, before = self._clock(), self._first.get(key)
        if before is None or digest is None or before.digest != digest:
            since = now if before is None else before.since
            self._first[key] = _Doubt(since, digest, now)
            return False
        return now - before.at >= self._pause_s

    def forget(self, key: Key) -> None:
        """What came was right."""
        self._first.pop(key, None)

    def waits(self) -> bool:
        """Wait for the pause, if that is to be done here; False: come again."""
        if self._wait is None or self._waits_left == 0:
            return False
        self._waits_left -= 1
        self._wait(self._pause_s)
        return True

    def about(self, model: str) -> frozenset[str]:
        """The versions of a model that are in doubt."""
        return frozenset(version for name, version, _ in self._first if name == model)

    def duration(self, key: Key) -> str:
        """For how long this has been so, where that is long; else nothing."""
        seconds = self._clock() - self._first[key].since
        if seconds < _LONG_S:
            return ""
        return f" It has been so for {seconds / 60:.0f} minutes: look at the artifact store."


def digest_of_folder(folder: Path) -> Digest:
    """Digest of all plain files below a folder, with their names, whatever those are.

    Raises StorageError where one can't be read.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=os.fsencode):
        plain = path.is_file() and not path.is_symlink()
        content = Digest.of_file(path).hex if plain else "none"
        total.update(os.fsencode(path.relative_to(folder)) + b"\0" + content.encode() + b"\0")
    return Digest(total.hexdigest())
