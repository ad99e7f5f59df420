"""What is sent was proven: of which files of a store the bytes are those of their digest.

A file is hashed when it is first asked for, once for all who ask meanwhile, and again when it is
not the same any more: other size, place on the disk or times, of which nobody can set the change
time. It is read from the descriptor that was compared, and compared again after every part.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from anyio import CapacityLimiter, to_thread

from gate.deploy.store import Store
from gate.errors import DigestMismatch
from gate.storage.digest import Digest

_TICK_NS = 50_000_000
"""The change time of a file system is as coarse as the tick of its clock, 10 ms at most."""
_MOST = 4096
"""Files that are remembered; those of a few releases are some hundred."""
_LINKS = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_log = logging.getLogger(__name__)


class Changed(DigestMismatch):
    """A file is not, or not any more, what was proven."""


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stream: FileIO) -> _Identity:
        found = os.fstat(stream.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class _Proof:
    identity: _Identity
    good: bool


class OpenFile:
    """An open file, as it was when it was opened."""

    def __init__(self, stream: FileIO, threads: CapacityLimiter) -> None:
        self._stream = stream
        self._threads = threads
        self.identity = _Identity.of(stream)

    @property
    def size(self) -> int:
        """Of the file in bytes."""
        return self.identity.size

    async def read(self, size: int, place: int) -> bytes:
        """`size` bytes from `place` on. Raises Changed where the file is not what it was."""
        return await to_thread.run_sync(self._read, size, place, limiter=self._threads)

    def _read(self, size: int, place: int) -> bytes:
        data = os.pread(self._stream.fileno(), size, place)
        if len(data) < size or _Identity.of(self._stream) != self.identity:
            raise Changed(f"the file changed before byte {place + size} of it was sent")
        return data

    def close(self) -> None:
        """Close it."""
        self._stream.close()


class Proofs:
    """Opens files of a store. `damaged` is called with what was asked for, once for a damage.

    `threads`: for opening and reading; hashing has its own, so that it holds up no other file.
    """

    def __init__(
        self, store: Store, *, threads: CapacityLimiter, damaged: Callable[[str], None]
    ) -> None:
        self._store = store
        self._threads = threads
        self._hashing = CapacityLimiter(2)
        self._damaged = damaged
        self._proofs: dict[tuple[Path, Digest], _Proof] = {}
        self._running: dict[tuple[Path, Digest], asyncio.Task[None]] = {}
        self._reported: set[Path] = set()

    async def open(self, path: Path, digest: Digest, *, name: str, prove: bool = True) -> OpenFile:
        """The file, proven; with `prove=False` only not known to be another, and never hashed.

        Raises Changed where its bytes are others, or a link is on the way to it; OSError.
        """
        try:
            stream = await to_thread.run_sync(self._store.open, path, limiter=self._threads)
        except OSError as error:
            if error.errno in _LINKS:
                raise self._refused(path, name, f"is no plain file: {error.strerror}") from error
            raise
        opened = OpenFile(stream, self._threads)
        try:
            proof = self._proofs.get((path, digest))
            if prove and (proof is None or proof.identity != opened.identity):
                await self._proven(path, digest)
                proof = self._proofs.get((path, digest))
            if not prove and (proof is None or proof.identity != opened.identity):
                return opened
            if proof is None:  # forgotten at once, among thousands
                raise Changed(f"{path} was not proven in time")
            if proof.identity != opened.identity:
                raise Changed(f"{path} was exchanged meanwhile")
            if not proof.good:
                raise self._refused(path, name, f"has other bytes than {digest}")
        except BaseException:
            opened.close()
            raise
        self._reported.discard(path)
        return opened

    async def _proven(self, path: Path, digest: Digest) -> None:
        key = path, digest
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._prove(path, digest))
            running.add_done_callback(lambda _task: self._running.pop(key))
        await asyncio.shield(running)

    async def _prove(self, path: Path, digest: Digest) -> None:
        proof = await to_thread.run_sync(self._hashed, path, digest, limiter=self._hashing)
        if len(self._proofs) >= _MOST:
            self._proofs.clear()
        self._proofs[path, digest] = proof

    def _hashed(self, path: Path, digest: Digest) -> _Proof:
        with self._store.open(path) as stream:
            identity = _Identity.of(stream)
            if abs(time.time_ns() - identity.changed_ns) < _TICK_NS:
                time.sleep(_TICK_NS / 1e9)  # or a change within the same tick could not be seen
            good = Digest.of_stream(stream) == digest
            return _Proof(identity, good and _Identity.of(stream) == identity)

    def _refused(self, path: Path, name: str, why: str) -> Changed:
        message = (
            f"{path} {why}: it is not served. The next look at {name} puts right what is live; "
            "find out who can write to the store."
        )
        if path not in self._reported:
            self._reported.add(path)
            _log.error("%s", message)
            self._damaged(name)
        return Changed(message)
