"""The store: what is deployed under which name, read without a lock and never seen half."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from filelock import Timeout

from gate.deploy.disk import discard, make_folder
from gate.deploy.manifest import EXACT, MANIFEST, Manifest, StoredFile, check_name
from gate.errors import DigestMismatch, EvidenceError, StorageError
from gate.storage.digest import Digest
from gate.storage.files import open_inside
from gate.storage.foreign import RECORD_LIMIT, read_foreign
from gate.storage.lock import private_lock

PATIENCE_S = 600.0
"""How long a deployment waits for another one."""


class Store:
    """A content-addressed store in a folder; see `gate.deploy`.

    Reading needs no more than the permission to read. `keep`: how many earlier releases of a
    name stay, to go back to.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        if keep < 1:
            raise StorageError(
                f"keep is {keep}: without an earlier release nothing can be rolled back, and "
                "whoever reads the live one could lose it under way. Keep at least 1."
            )
        self.root = root
        self.keep = keep

    def names(self) -> tuple[str, ...]:
        """All names under which something serves."""
        folder = self.root / "live"
        if not folder.is_dir():
            return ()
        return tuple(sorted(link.name for link in folder.iterdir() if link.name[0] != "."))

    def live(self, name: str) -> Manifest | None:
        """The release that serves, or None. Raises StorageError where its manifest is damaged."""
        link = self.live_link(name)
        return self._read(link / MANIFEST) if link.is_symlink() else None

    def live_path(self, name: str, slot: str = EXACT) -> Path:
        """The folder in which a slot of whatever serves is found; it changes with the release."""
        return self.live_link(name) / check_name(slot, what="slot")

    def live_link(self, name: str) -> Path:
        """The link that is replaced when another release goes live."""
        return self.root / "live" / check_name(name, what="deployed model")

    def releases(self, name: str) -> dict[int, Path]:
        """Folders of the releases that are there, by number, oldest first."""
        folder = self.root / "releases" / check_name(name, what="deployed model")
        found = folder.iterdir() if folder.is_dir() else iter(())
        numbered = [
            (int(number), path)
            for path in found
            if (number := path.name.partition("-")[0]).isdecimal()
        ]
        return dict(sorted(numbered))

    def release(self, name: str, number: int) -> Manifest:
        """The manifest of a release. Raises StorageError where it is not there, or damaged."""
        folder = self.releases(name).get(number)
        if folder is None:
            raise StorageError(
                f"release {number} of {name} is not in the store {self.root}. It was removed by "
                "hand: deploy what it held."
            )
        return self._read(folder / MANIFEST)

    def content(self, digest: Digest) -> Path:
        """The folder of a model, or of golden vectors."""
        return self.root / "store" / digest.hex

    def file(self, folder: Digest, entry: StoredFile) -> Path:
        """Where a file of the store lies."""
        return self.content(folder) / entry.name

    def open(self, path: Path) -> FileIO:
        """Open a file of the store, through no link but those above the store itself.

        Raises OSError.
        """
        return open_inside(self.root, path.relative_to(self.root).as_posix())

    @property
    def workshop(self) -> Path:
        """Where things are made: on the same file system, seen by nobody."""
        return self.root / "tmp"

    @contextlib.contextmanager
    def alone(self, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Hold the store's lock; the operating system frees it if this process dies.

        Left-overs of whoever died are removed. Raises StorageError where another one holds it for
        longer than `patience_s`, or it is somebody else's.
        """
        for folder in ("store", "releases", "live", "tmp"):
            make_folder(self.root / folder)
        lock = self.root / "locks" / "store.lock"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(private_lock(lock, timeout_s=patience_s))
            except Timeout as error:
                raise StorageError(
                    f"another deployment holds {lock} for over {patience_s:g} s. "
                    "Nothing was changed. Wait until it is done, then repeat."
                ) from error
            try:
                shutil.rmtree(self.workshop, ignore_errors=True)
                self.workshop.mkdir(exist_ok=True)
                yield
            finally:
                shutil.rmtree(self.workshop, ignore_errors=True)

    def prune(self, name: str) -> None:
        """Remove releases of `name` that are neither live nor to go back to, and from the store
        what no release of any name needs. The caller is alone.

        The newest `keep` releases before the live one stay too, for clients that still have an
        older manifest. Releases with a higher number never went live: somebody died in between.
        """
        live = self.live(name)
        if live is None:
            return
        releases = self.releases(name)
        newest = [number for number in releases if number <= live.release][-self.keep - 1 :]
        wanted = {live.release, *(earlier.release for earlier in live.previous), *newest}
        for number, folder in releases.items():
            if number not in wanted:
                discard(folder, into=self.workshop)
        self._sweep()

    def _sweep(self) -> None:
        needed: set[str] = set()
        for folder in (self.root / "releases").iterdir():
            for path in self.releases(folder.name).values():
                try:
                    needed |= self._read(path / MANIFEST).digests
                except StorageError:
                    return  # rather too much than too little
        for content in (self.root / "store").iterdir():
            if content.name not in needed:
                discard(content, into=self.workshop)

    def _read(self, path: Path) -> Manifest:
        try:
            return Manifest.from_foreign(read_foreign(path, limit=RECORD_LIMIT), what=str(path))
        except (EvidenceError, DigestMismatch) as error:
            raise StorageError(
                f"{path} is damaged: {error}. Restore it from a copy, or remove it and deploy."
            ) from error
