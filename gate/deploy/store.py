"""Content-addressed store with a manifest and one live link."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import quote

from pydantic import Field, model_validator

from gate.errors import DigestMismatch, EvidenceError, StorageError
from gate.preprocess.spec import PreprocessSpec
from gate.storage.digest import Digest
from gate.storage.files import make_folders, open_inside, private_lock, sync
from gate.storage.record import Record, Sha256, added_field
from gate.storage.safe_text import check_name
from gate.storage.untrusted_files import RECORD_LIMIT, read_untrusted
from gate.storage.workspace import check_workspace


def fsync_tree(folder: Path) -> None:
    """Make all files in a folder read-only, and everything durable, the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink():
            continue
        path.chmod(0o755 if path.is_dir() else 0o444)
        sync(path)
    folder.chmod(0o755)
    sync(folder)


def make_folder(path: Path) -> None:
    """Create a folder with its parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folders(path)
    for folder in missing:
        sync(folder.parent)


def discard(path: Path, *, into: Path) -> None:
    """Remove a folder. It is renamed first, so that readers never see part of it."""
    trash = into / f"discarded-{uuid.uuid4().hex}"
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def point_link(link: Path, target: str) -> None:
    """Point a symbolic link at `target`, atomically and durably."""
    new = link.with_name(f".{link.name}.next")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
    sync(link.parent)


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn OSError into StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the store {root} can't be used: {error}. The previous release still serves. "
            "Free space or fix permissions, then retry."
        ) from error


MANIFEST = "manifest.json"

EXACT = "exact"
"""The slot of the exact model, which `model.onnx` serves."""

QUANTIZED = "quantized"
"""The slot of the quantized twin, if the release has one."""

Size = Annotated[int, Field(ge=0)]

Number = Annotated[int, Field(ge=1)]


class ReleaseDamaged(StorageError):
    """The manifest or a file of a release is missing or changed. The next deployment replaces the
    release."""


class StoredFile(Record):
    """A file of the store."""

    name: str
    """Path relative to the model's folder."""
    sha256: Sha256
    """Digest of the file."""
    size_bytes: Size
    url: str
    """URL relative to the manifest's. It contains the digest, so that its content never changes."""


class Slot(Record):
    """One model of a release."""

    sha256: Sha256
    """Digest of the file, or of the manifest of all files with external data."""
    size_bytes: Size
    model: StoredFile
    external_data: tuple[StoredFile, ...] = ()
    golden: StoredFile | None = None
    """golden.json. Its folder in the store is named after its digest."""
    preprocessing: PreprocessSpec | None = added_field(None)
    """The preprocessing of pictures to model inputs."""
    parts: dict[str, StoredFile] = added_field({})
    """The ONNX files of a multi-file release, by part; then `model` is the release file. Empty:
    `model` is the only ONNX file."""

    @model_validator(mode="after")
    def _has_part_files(self) -> Self:
        missing = [name for name, file in self.parts.items() if file not in self.external_data]
        if missing:
            raise ValueError(f"the file of the part {missing[0]} is not in external_data")
        return self

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Return the file of the model or release, and the files that it names."""
        return (self.model, *self.external_data)

    @property
    def golden_sha256(self) -> Digest | None:
        """Return the digest of the golden vectors, or None."""
        return None if self.golden is None else self.golden.sha256


class Earlier(Record):
    """An earlier release that a rollback can restore."""

    release: Number
    slots: dict[str, Sha256]


class Manifest(Record):
    """`manifest.json`: one release."""

    schema_version: Literal[1] = 1
    name: str
    release: Number
    """The release number, which increases with every deployment and rollback."""
    slots: dict[str, Slot]
    rolled_back_to: Number | None = None
    """The earlier release that this one restores; None for a new deployment."""
    deployed_at: str
    """UTC, ISO 8601."""
    previous: tuple[Earlier, ...] = ()
    """Newest first."""

    @model_validator(mode="after")
    def _has_exact(self) -> Self:
        if EXACT not in self.slots:
            raise ValueError(f"the slot '{EXACT}' is missing")
        return self

    def earlier(self) -> Earlier:
        """Return this release as an entry of `previous`."""
        slots = {slot: entry.sha256 for slot, entry in self.slots.items()}
        return Earlier(release=self.release, slots=slots)

    @property
    def digests(self) -> frozenset[str]:
        """Return the names of all folders of the store that this release needs."""
        slots = self.slots.values()
        needed = (digest for slot in slots for digest in (slot.sha256, slot.golden_sha256))
        return frozenset(digest.hex for digest in needed if digest is not None)


def check_deployed_name(name: str) -> str:
    """Return `name` if it is valid: a model's name, or `WORKSPACE:NAME`. Raises StorageError."""
    workspace, mark, rest = name.rpartition(":")
    if mark:
        check_workspace(workspace)
    check_name(rest, kind="deployed model")
    return name


def url_of(folder: Digest, name: str) -> str:
    """Return the URL of a file in the store, relative to the manifest's."""
    return f"sha256/{folder.hex}/{quote(name)}"


LOCK_TIMEOUT_S = 600.0
"""Seconds that a deployment waits for another one."""


class ModelStore:
    """A content-addressed store in a folder.

    Reading needs read permission only. `keep`: number of earlier releases of a name that are kept
    for rollbacks.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        if keep < 1:
            raise StorageError(
                f"keep is {keep}, expected at least 1: a rollback needs an earlier release, and so "
                "do clients that are still reading it."
            )
        self.root = root
        self.keep = keep

    def names(self) -> tuple[str, ...]:
        """Return all names with a live release."""
        folder = self.root / "live"
        if not folder.is_dir():
            return ()
        return tuple(sorted(link.name for link in folder.iterdir() if link.name[0] != "."))

    def live(self, name: str) -> Manifest | None:
        """Return the live release, or None. Raises ReleaseDamaged if its manifest can't be read."""
        link = self.live_link(name)
        return self._read(link / MANIFEST) if os.path.lexists(link) else None

    def last_release(self, name: str) -> int | None:
        """Return the number of the release that the live link names, damaged or not, or None."""
        try:
            number = self.live_link(name).readlink().name.partition("-")[0]
        except OSError:
            return None
        return int(number) if number.isascii() and number.isdecimal() else None

    def damage(self, name: str) -> str | None:
        """Return why the live release is damaged, as far as visible without hashing, or None."""
        try:
            live = self.live(name)
            for slot in live.slots.values() if live is not None else ():
                files = [(slot.sha256, file) for file in slot.files]
                files += [(slot.golden.sha256, slot.golden)] if slot.golden is not None else []
                for folder, entry in files:
                    with self.open(self.file(folder, entry)) as stream:
                        size = os.fstat(stream.fileno()).st_size
                    if size != entry.size_bytes:
                        return f"{entry.name} has {size} bytes, expected {entry.size_bytes}"
        except (StorageError, OSError) as error:
            return str(error)
        return None

    def live_link(self, name: str) -> Path:
        """Return the symbolic link to the live release."""
        return self.root / "live" / check_deployed_name(name)

    def releases(self, name: str) -> dict[int, Path]:
        """Return the folders of the releases by number, oldest first."""
        folder = self.root / "releases" / check_deployed_name(name)
        paths = folder.iterdir() if folder.is_dir() else iter(())
        numbered = [
            (int(number), path)
            for path in paths
            if (number := path.name.partition("-")[0]).isdecimal()
        ]
        return dict(sorted(numbered))

    def release(self, name: str, number: int) -> Manifest:
        """Return the manifest of a release. Raises StorageError if there is no such release,
        ReleaseDamaged if the manifest can't be read."""
        folder = self.releases(name).get(number)
        if folder is None:
            raise StorageError(
                f"release {number} of {name} is missing from the store {self.root}. It was removed "
                "by hand: deploy its files again."
            )
        return self._read(folder / MANIFEST)

    def content(self, digest: Digest) -> Path:
        """Return the folder of a model or of golden vectors."""
        return self.root / "store" / digest.hex

    def file(self, folder: Digest, entry: StoredFile) -> Path:
        """Return the path of a file in the store."""
        return self.content(folder) / entry.name

    def open(self, path: Path) -> FileIO:
        """Open a file of the store without following links in the store. Raises OSError."""
        return open_inside(self.root, path.relative_to(self.root).as_posix())

    @property
    def staging_folder(self) -> Path:
        """Return the staging folder, on the same file system and not visible to readers."""
        return self.root / "tmp"

    @contextlib.contextmanager
    def locked(self, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold the store's lock. The operating system releases it if this process dies.

        Removes files left by a process that died. Raises StorageError if another process holds the
        lock for longer than `timeout_s`, or if it belongs to another user.
        """
        for folder in ("store", "releases", "live", "tmp"):
            make_folder(self.root / folder)
        lock = self.root / "locks" / "store.lock"
        busy = StorageError(
            f"another deployment has held {lock} for more than {timeout_s:g} s. "
            "Nothing was changed. Wait until it is done, then retry."
        )
        with private_lock(lock, timeout_s=timeout_s, busy=busy):
            try:
                shutil.rmtree(self.staging_folder, ignore_errors=True)
                self.staging_folder.mkdir(exist_ok=True)
                yield
            finally:
                shutil.rmtree(self.staging_folder, ignore_errors=True)

    def prune(self, name: str) -> None:
        """Remove old releases of `name`, and stored files that no release of any name needs.

        Keeps the live release, those in `previous`, and the newest `keep` releases before the live
        one, for clients with an older manifest. Releases with a higher number never went live,
        because their process died. The caller must hold the lock.
        """
        try:
            live = self.live(name)
        except ReleaseDamaged:
            return  # Prune after the next deployment, which has a readable manifest.
        if live is None:
            return
        releases = self.releases(name)
        newest = [number for number in releases if number <= live.release][-self.keep - 1 :]
        needed = {live.release, *(earlier.release for earlier in live.previous), *newest}
        for number, folder in releases.items():
            if number not in needed:
                discard(folder, into=self.staging_folder)
        self._sweep()

    def _sweep(self) -> None:
        needed: set[str] = set()
        for folder in (self.root / "releases").iterdir():
            for path in self.releases(folder.name).values():
                try:
                    needed |= self._read(path / MANIFEST).digests
                except StorageError:
                    return  # Unknown which files it needs: keep all.
        for content in (self.root / "store").iterdir():
            if content.name not in needed:
                discard(content, into=self.staging_folder)

    def _read(self, path: Path) -> Manifest:
        try:
            data = read_untrusted(path, limit=RECORD_LIMIT)
            return Manifest.from_untrusted(data, label=str(path))
        except (EvidenceError, DigestMismatch) as error:
            raise ReleaseDamaged(
                f"{path} is damaged: {error}. Deploy the file again: gate deploy, or gate "
                "reconcile for a registered model."
            ) from error
