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

from filelock import Timeout
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
    """Make all files below read-only and everything durable, the folder itself last."""
    for inside in sorted(folder.rglob("*"), reverse=True):
        if inside.is_symlink():
            continue
        inside.chmod(0o755 if inside.is_dir() else 0o444)
        sync(inside)
    folder.chmod(0o755)
    sync(folder)


def make_folder(path: Path) -> None:
    """Make a folder with its parents; their entries are durable afterwards."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folders(path)
    for folder in missing:
        sync(folder.parent)


def discard(path: Path, *, into: Path) -> None:
    """Remove a folder atomically for readers: it is renamed first."""
    grave = into / f"discarded-{uuid.uuid4().hex}"
    path.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def point(link: Path, target: str) -> None:
    """Let `link` point at `target` from one moment to the next. It is there at every moment."""
    fresh = link.with_name(f".{link.name}.next")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    sync(link.parent)


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the store {root} can't be used: {error}. What served before serves still. "
            "Free space or fix permissions, then repeat."
        ) from error


MANIFEST = "manifest.json"

EXACT = "exact"
"""The slot of the model itself; the stable name `model.onnx` is this one's."""

QUANTIZED = "quantized"
"""The slot of its quantized twin, where the release has one."""

Size = Annotated[int, Field(ge=0)]

Number = Annotated[int, Field(ge=1)]


class ReleaseDamaged(StorageError):
    """The manifest or a file of a release is missing, or has other content. The next deployment
    replaces the release."""


class StoredFile(Record):
    """A file of the store."""

    name: str
    """Relative to the model's folder."""
    sha256: Sha256
    """Of the file's bytes."""
    size_bytes: Size
    url: str
    """Relative to the manifest's; it holds the digest, so that what it gives never changes."""


class Slot(Record):
    """One model of a release."""

    sha256: Sha256
    """As evidence counts it: of the file; with external data, of the manifest of all files."""
    size_bytes: Size
    model: StoredFile
    external_data: tuple[StoredFile, ...] = ()
    golden: StoredFile | None = None
    """golden.json, with whose digest its folder in the store is called."""
    preprocessing: PreprocessSpec | None = added_field(None)
    """How a picture becomes the model's input."""
    parts: dict[str, StoredFile] = added_field({})
    """The ONNX file of each part of a release, by name; then `model` is the release file. Empty:
    `model` is the one ONNX file."""

    @model_validator(mode="after")
    def _holds_its_parts(self) -> Self:
        lost = [name for name, file in self.parts.items() if file not in self.external_data]
        if lost:
            raise ValueError(f"the part {lost[0]} is none of the files")
        return self

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The model and its data; of a release its own file, and those of its parts."""
        return (self.model, *self.external_data)

    @property
    def golden_sha256(self) -> Digest | None:
        """Digest of the golden vectors, if there are any."""
        return None if self.golden is None else self.golden.sha256


class Earlier(Record):
    """A release that a rollback can go back to."""

    release: Number
    slots: dict[str, Sha256]


class Manifest(Record):
    """`manifest.json`: one release."""

    schema_version: Literal[1] = 1
    name: str
    release: Number
    """Counts up with every change of what serves, rollbacks included."""
    slots: dict[str, Slot]
    rolled_back_to: Number | None = None
    """The earlier release with the same slots, which this one restores; None: a new deployment."""
    deployed_at: str
    """UTC, ISO 8601."""
    previous: tuple[Earlier, ...] = ()
    """Newest first."""

    @model_validator(mode="after")
    def _has_exact(self) -> Self:
        if EXACT not in self.slots:
            raise ValueError(f"there is no slot '{EXACT}'")
        return self

    def earlier(self) -> Earlier:
        """This release as one to go back to."""
        slots = {slot: entry.sha256 for slot, entry in self.slots.items()}
        return Earlier(release=self.release, slots=slots)

    @property
    def digests(self) -> frozenset[str]:
        """Names of all folders of the store that this release needs."""
        slots = self.slots.values()
        needed = (digest for slot in slots for digest in (slot.sha256, slot.golden_sha256))
        return frozenset(digest.hex for digest in needed if digest is not None)


def check_deployed_name(name: str) -> str:
    """`name`, if a file can be deployed under it: that of a model, or `WORKSPACE:NAME`. Raises
    StorageError."""
    workspace, mark, rest = name.rpartition(":")
    if mark:
        check_workspace(workspace)
    check_name(rest, what="deployed model")
    return name


def url_of(folder: Digest, name: str) -> str:
    """The address of a file of the store, relative to the manifest's."""
    return f"sha256/{folder.hex}/{quote(name)}"


PATIENCE_S = 600.0
"""How long a deployment waits for another one."""


class ModelStore:
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
        """The release that serves, or None. Raises ReleaseDamaged where its manifest can't be
        read."""
        link = self.live_link(name)
        return self._read(link / MANIFEST) if os.path.lexists(link) else None

    def last_release(self, name: str) -> int | None:
        """The number of the release that the live link names, whether it is whole or not; None
        where no link names one."""
        try:
            number = self.live_link(name).readlink().name.partition("-")[0]
        except OSError:
            return None
        return int(number) if number.isascii() and number.isdecimal() else None

    def damage(self, name: str) -> str | None:
        """Return why what serves is not whole, as far as that can be seen without hashing, or
        None."""
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
        """The link that is replaced when another release goes live."""
        return self.root / "live" / check_deployed_name(name)

    def releases(self, name: str) -> dict[int, Path]:
        """Folders of the releases that are there, by number, oldest first."""
        folder = self.root / "releases" / check_deployed_name(name)
        found = folder.iterdir() if folder.is_dir() else iter(())
        numbered = [
            (int(number), path)
            for path in found
            if (number := path.name.partition("-")[0]).isdecimal()
        ]
        return dict(sorted(numbered))

    def release(self, name: str, number: int) -> Manifest:
        """The manifest of a release. Raises StorageError where it is not there, ReleaseDamaged
        where it is not whole."""
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
        """Return the path of a file in the store."""
        return self.content(folder) / entry.name

    def open(self, path: Path) -> FileIO:
        """Open a file of the store, through no link but those above the store itself.

        Raises OSError.
        """
        return open_inside(self.root, path.relative_to(self.root).as_posix())

    @property
    def staging_folder(self) -> Path:
        """Return the staging folder, on the same file system and not visible to readers."""
        return self.root / "tmp"

    @contextlib.contextmanager
    def alone(self, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Hold the store's lock; the operating system frees it if this process dies.

        Files left by a process that died are removed. Raises StorageError where another process
        holds it for longer than `patience_s`, or where it belongs to another user.
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
                shutil.rmtree(self.staging_folder, ignore_errors=True)
                self.staging_folder.mkdir(exist_ok=True)
                yield
            finally:
                shutil.rmtree(self.staging_folder, ignore_errors=True)

    def prune(self, name: str) -> None:
        """Remove old releases of `name`, and stored files that no release of any name needs.

        The live release and the one to roll back to stay, and the newest `keep` releases before the
        live one, for clients that still have an older manifest. Releases with a higher number never
        went live, because a process died before that. The caller holds the lock.
        """
        try:
            live = self.live(name)
        except ReleaseDamaged:
            return  # the next release says what can go
        if live is None:
            return
        releases = self.releases(name)
        newest = [number for number in releases if number <= live.release][-self.keep - 1 :]
        wanted = {live.release, *(earlier.release for earlier in live.previous), *newest}
        for number, folder in releases.items():
            if number not in wanted:
                discard(folder, into=self.staging_folder)
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
                discard(content, into=self.staging_folder)

    def _read(self, path: Path) -> Manifest:
        try:
            return Manifest.from_untrusted(read_untrusted(path, limit=RECORD_LIMIT), what=str(path))
        except (EvidenceError, DigestMismatch) as error:
            raise ReleaseDamaged(
                f"{path} is damaged: {error}. Deploy the file again (gate deploy); of a registered "
                "model gate reconcile does."
            ) from error
