"""Stage, recompute golden vectors, switch the link; roll back."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gate.deploy.store import (
    EXACT,
    MANIFEST,
    Earlier,
    Manifest,
    ModelStore,
    ReleaseDamaged,
    Slot,
    StoredFile,
    check_deployed_name,
    discard,
    fsync_tree,
    make_folder,
    point_link,
    storage_errors,
    url_of,
)
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    LimitExceeded,
    OnnxFileError,
    PackageMissing,
    PolicyError,
    StorageError,
    TooLarge,
    describe_failure,
)
from gate.golden.folder import GOLDEN_JSON, files_of, read_golden
from gate.golden.verify import loading_problem, verify_golden_in_sandbox
from gate.onnx_file.release_file import onnx_files
from gate.onnx_file.sandboxed_reading import read_subject_in_sandbox
from gate.preprocess.spec import PreprocessSpec, spec_path, verify_spec
from gate.records.evidence import Subject
from gate.records.layout import GOLDEN, MAX_BYTES
from gate.sandbox.limits import SandboxLimits, limit_folder_size
from gate.storage.digest import Digest
from gate.storage.files import sync
from gate.storage.safe_text import check_name


@dataclass(frozen=True)
class SlotSource:
    """One slot of a release: the expected digests, and a function that fetches the files."""

    sha256: Digest
    """Digest of the model, as in the evidence."""
    fetch: Callable[[Path], Path]
    """Writes a model into an empty folder; returns the path of its ONNX or release file.

    External data goes next to the model, its golden vectors into `golden/`.
    """
    golden_sha256: Digest | None = None
    """Digest of golden.json. None: any golden vectors."""
    golden_required: bool = True
    """False: a model without golden vectors is only loaded."""
    max_bytes: int = MAX_BYTES
    """Maximum size of all files together."""
    preprocess_sha256: Digest | None = None
    """Digest of the spec in `preprocessing/` next to the model. None: no spec is required."""
    limits: SandboxLimits | None = None
    """Limits of the child process that reads and runs the files. None: the files are trusted, and
    are read and run in this process."""

    @classmethod
    def local(
        cls,
        path: Path,
        *,
        golden: Path | None = None,
        sha256: Digest | None = None,
        preprocessing: Path | None = None,
        max_bytes: int = MAX_BYTES,
        limits: SandboxLimits | None = None,
    ) -> SlotSource:
        """Create a slot from local files: the model, its golden vectors and preprocessing spec.

        `golden`: a folder. Without `sha256` the current digest is expected. Raises OnnxFileError,
        EvidenceError, DigestMismatch, LimitExceeded, PolicyError for an invalid spec.
        """
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing is not None else None
        subject = read_subject_in_sandbox(path, limits)
        vectors = read_golden(golden) if golden is not None else None

        def fetch(folder: Path) -> Path:
            files = {name: path.parent / name for name in (path.name, *subject.external_data)}
            if vectors is not None and golden is not None:
                files |= {f"{GOLDEN}/{name}": golden / name for name in files_of(vectors.golden)}
            for name, file in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / name)
            if spec is not None:
                spec.save(spec_path(folder / path.name))
            return folder / path.name

        return cls(
            sha256=sha256 or subject.sha256,
            fetch=fetch,
            golden_sha256=vectors.sha256 if vectors else None,
            golden_required=vectors is not None,
            max_bytes=max_bytes,
            preprocess_sha256=spec.digest() if spec is not None else None,
            limits=limits,
        )


_steps = logging.getLogger("gate.steps")


class NotDeployed(Exception):
    """The files are not deployed, for the reason in the message."""

    judged = True
    """True if the files are proven to be wrong."""


class NotEvaluated(NotDeployed):
    """The files could not be evaluated within the limits."""

    judged = False


@dataclass(frozen=True)
class StagedSlot:
    """A slot whose files were verified and written durably."""

    slot: Slot
    model: Path
    """Folder of the model and its external data."""
    golden: Path | None


def stage(source: SlotSource, folder: Path) -> StagedSlot:
    """Fetch a slot into `folder`, which is created, and verify it.

    Raises NotDeployed if the files are wrong, and the exceptions of `source.fetch`.
    """
    folder.mkdir()
    try:
        _steps.debug("fetch the file and hash it")
        fetched = folder / "fetched"
        fetched.mkdir()
        with limit_folder_size(fetched, source.max_bytes):
            path = source.fetch(fetched)
        subject = _subject(path, source, inside=fetched)
        expected = source.preprocess_sha256
        spec = verify_spec(spec_path(path), expected, label=path.name) if expected else None
        model, golden = _move_files(path, subject, expected=source.golden_sha256, into=folder)
    except LimitExceeded as error:
        raise NotEvaluated(str(error)) from error
    except (TooLarge, OnnxFileError, DigestMismatch, PolicyError) as error:
        raise NotDeployed(str(error)) from error
    if golden is None and (source.golden_required or source.golden_sha256 is not None):
        raise NotDeployed(
            "the model has no golden vectors, which verify its outputs on this machine. Promote it "
            "again, or deploy its file by hand"
        )
    _run(model / path.name, golden, source.limits)
    vectors = None if golden is None else _describe_file(golden, GOLDEN_JSON)
    for tree in (model, golden):
        if tree is not None:
            fsync_tree(tree)
    digest = subject.sha256
    data = tuple(_describe_file(model, name, within=digest) for name in subject.external_data)
    by_name = {file.name: file for file in data}
    slot = Slot(
        sha256=digest,
        size_bytes=subject.size_bytes,
        model=_describe_file(model, path.name, within=digest),
        external_data=data,
        golden=vectors,
        preprocessing=spec,
        parts={name: by_name[part.file] for name, part in subject.parts.items()},
    )
    return StagedSlot(slot, model, golden)


def verify_slot(store: ModelStore, slot: Slot) -> str | None:
    """Verify the digests of a slot's files in the store; return the problem, or None.

    No file may be a link. No file is run.
    """
    try:
        for entry in slot.files:
            with store.open(store.file(slot.sha256, entry)) as stream:
                entry.sha256.verify(Digest.from_stream(stream), label=entry.name)
        if slot.golden_sha256 is not None:
            read_golden(store.content(slot.golden_sha256), sha256=slot.golden_sha256)
    except Exception as error:
        return describe_failure(error)
    return None


def _subject(path: Path, source: SlotSource, *, inside: Path) -> Subject:
    """Read the subject of a fetched file, and verify its digest. Raises NotDeployed.

    A release file is parsed before its digest is compared, to find links among its parts: it is at
    most 64 KiB of plain YAML.
    """
    if path.is_symlink() or not path.resolve().is_relative_to(inside.resolve()):
        raise NotDeployed(f"{path} is a link, or outside the folder {inside}")
    linked = [part for part in onnx_files(path).values() if part.is_symlink()]
    if linked:
        raise NotDeployed(f"the part {linked[0]} is a link, expected a file")
    subject = read_subject_in_sandbox(path, source.limits)
    if subject.sha256 != source.sha256:
        raise NotDeployed(f"{path.name} has digest {subject.sha256}, expected {source.sha256}")
    return subject


def _move_files(
    path: Path, subject: Subject, *, expected: Digest | None, into: Path
) -> tuple[Path, Path | None]:
    """Move the model's files and its golden vectors, and no other files, into new folders."""
    model = into / "model"
    for name in (path.name, *subject.external_data):
        _move(path.parent / name, model / name)
    golden = path.parent / GOLDEN
    if not (golden / GOLDEN_JSON).exists():
        return model, None
    try:
        files = files_of(read_golden(golden, sha256=expected).golden)
    except EvidenceError as error:
        raise NotDeployed(f"the golden vectors are damaged: {error}") from error
    for name in files:
        _move(golden / name, into / GOLDEN / name)
    return model, into / GOLDEN


def _move(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_file():
        raise NotDeployed(f"{source.name} is not a regular file")
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)


def _run(path: Path, golden: Path | None, limits: SandboxLimits | None) -> None:
    _steps.debug("load it and compute its golden vectors" if golden else "load it")
    try:
        if golden is not None:
            try:
                result = verify_golden_in_sandbox(path, golden, limits)
            except (EvidenceError, DigestMismatch) as error:
                raise NotDeployed(f"the golden vectors are damaged: {error}") from error
            if not result.passed:
                raise NotDeployed(f"the golden vectors disagree: {'; '.join(result.problems)}")
            return
        for name, file in onnx_files(path).items():
            problem = loading_problem(file, limits)
            if problem is not None:
                label = f"the part {name}" if name else "the file"
                raise NotDeployed(f"ONNX Runtime can't load {label}: {problem}")
    except (LimitExceeded, PackageMissing) as error:
        raise NotEvaluated(str(error)) from error


def _describe_file(folder: Path, name: str, *, within: Digest | None = None) -> StoredFile:
    """Return a file of the store's folder `within`; None: the folder is named after the file."""
    path = folder / name
    digest = Digest.from_file(path)
    return StoredFile(
        name=name,
        sha256=digest,
        size_bytes=path.stat().st_size,
        url=url_of(within or digest, name),
    )


def _move_into_store(store: ModelStore, folder: Path, digest: Digest) -> None:
    target = store.content(digest)
    if target.is_symlink():
        target.unlink()  # The target of a link could be replaced later.
    if not target.exists():
        folder.rename(target)
        sync(target.parent)
        return
    # Replace only damaged files, one by one, so that readers always find every file.
    for path in folder.rglob("*"):
        existing = target / path.relative_to(folder)
        if path.is_dir():
            if existing.is_symlink():
                existing.unlink()
            existing.mkdir(exist_ok=True)
            continue
        with contextlib.suppress(OSError), store.open(existing) as stream:
            if Digest.from_stream(stream) == Digest.from_file(path):
                continue
        path.replace(existing)
        sync(existing.parent)
    shutil.rmtree(folder, ignore_errors=True)


Outcome = Literal["deployed", "unchanged", "refused", "rolled_back"]


@dataclass(frozen=True)
class Deployment:
    """The result of a deployment."""

    outcome: Outcome
    name: str
    manifest: Manifest | None
    """Manifest of the release that serves now, or None."""
    reason: str
    judged: bool = True
    """False: refused because the limits were reached before the files could be evaluated."""


def deploy(store: ModelStore, name: str, slots: Mapping[str, SlotSource]) -> Deployment:
    """Deploy these slots as `name`, all or none of them. The slot `exact` is required.

    Fetches each slot within its size limit, verifies its digest, loads it in ONNX Runtime and
    recomputes its golden vectors. Then makes the files durable, renames them into the store, and
    last replaces the live link. `unchanged`: the same intact files serve already. `refused`: a slot
    failed verification; the previous release still serves.

    Concurrent calls wait for each other. If the process is killed at any time, the link points at a
    complete release, and the next call completes the deployment. Raises StorageError, and the
    exceptions of `SlotSource.fetch`.
    """
    check_deployed_name(name)
    for slot in slots:
        check_name(slot, kind="slot")
    if EXACT not in slots:
        raise StorageError(
            f"a release of {name} needs the slot '{EXACT}', but has only {sorted(slots)}. "
            "Add the exact model."
        )
    with storage_errors(store.root), store.locked():
        store.prune(name)  # Releases of a process that died.
        try:
            live = store.live(name)
        except ReleaseDamaged:
            live = None
        if live is not None and is_serving(store, name, slots):
            return Deployment("unchanged", name, live, f"release {live.release} serves it already")
        try:
            staged = {
                slot: stage(source, store.staging_folder / slot) for slot, source in slots.items()
            }
        except NotDeployed as refusal:
            return Deployment("refused", name, live, str(refusal), judged=refusal.judged)
        parts_problem = _parts_problem({slot: entry.slot for slot, entry in staged.items()})
        if parts_problem is not None:
            return Deployment("refused", name, live, parts_problem)
        for entry in staged.values():
            if entry.golden is not None and entry.slot.golden_sha256 is not None:
                _move_into_store(store, entry.golden, entry.slot.golden_sha256)
            _move_into_store(store, entry.model, entry.slot.sha256)
        served = {slot: entry.slot for slot, entry in staged.items()}
        previous = (
            _earlier_releases(store, name) if live is None else (live.earlier(), *live.previous)
        )
        manifest = _go_live(store, name, served, previous=previous)
    return Deployment("deployed", name, manifest, _describe(manifest))


def rollback_deployment(
    store: ModelStore, name: str, *, limits: SandboxLimits | None = None
) -> Deployment:
    """Deploy the previous release again, after the same verification.

    It gets a new release number. A second call restores the release before it. `refused`: there is
    no earlier release, or its files failed verification. `limits`: limits of the child process that
    runs the files; None: run them in this process. Raises StorageError.
    """
    check_deployed_name(name)
    with storage_errors(store.root), store.locked():
        store.prune(name)  # Releases of a process that died.
        live = store.live(name)
        if live is None or not live.previous:
            reason = "there is no earlier release to restore"
            return Deployment("refused", name, live, reason)
        target = live.previous[0]
        slots = store.release(name, target.release).slots
        for label, slot in slots.items():
            problem = verify_slot(store, slot)
            if problem is None:
                path = store.file(slot.sha256, slot.model)
                golden = None if slot.golden_sha256 is None else store.content(slot.golden_sha256)
                try:
                    _run(path, golden, limits)
                except NotDeployed as refusal:
                    problem = str(refusal)
            if problem is not None:
                reason = f"release {target.release} can't serve again: {label}: {problem}"
                return Deployment("refused", name, live, reason)
        manifest = _go_live(store, name, slots, previous=live.previous[1:], restored=target.release)
    return Deployment("rolled_back", name, manifest, _describe(manifest))


def is_serving(
    store: ModelStore, name: str, slots: Mapping[str, SlotSource], *, thoroughly: bool = True
) -> bool:
    """Return whether exactly these slots serve as `name`; False if the manifest is damaged.

    `thoroughly`: also verify the digests of all files.
    """
    try:
        live = store.live(name)
    except ReleaseDamaged:
        return False
    if live is None or live.slots.keys() != slots.keys():
        return False
    if not all(_matches_source(live.slots[slot], source) for slot, source in slots.items()):
        return False
    return not thoroughly or all(verify_slot(store, slot) is None for slot in live.slots.values())


def _earlier_releases(store: ModelStore, name: str) -> tuple[Earlier, ...]:
    """Return the intact earlier releases, newest first, for a live release that is damaged."""
    last = store.last_release(name)
    earlier = []
    for number in sorted(store.releases(name), reverse=True):
        if last is not None and number <= last:  # Higher numbers never went live.
            with contextlib.suppress(StorageError):
                earlier.append(store.release(name, number).earlier())
    return tuple(earlier)


def _parts_problem(slots: Mapping[str, Slot]) -> str | None:
    """Return why the slots do not belong together: a consumer expects the same parts in each."""
    exact = slots[EXACT].parts
    for label, slot in slots.items():
        if slot.parts.keys() != exact.keys():
            names, expected = (", ".join(sorted(parts)) for parts in (slot.parts, exact))
            return (
                f"the slot {label} has {f'the parts {names}' if names else 'one file'}, the slot "
                f"{EXACT} {f'the parts {expected}' if expected else 'one file'}: deploy the twin "
                "of the same release or file"
            )
    return None


def _matches_source(slot: Slot, source: SlotSource) -> bool:
    vectors, spec = slot.golden_sha256, slot.preprocessing
    return (
        slot.sha256 == source.sha256
        and source.golden_sha256 in (None, vectors)
        and (vectors is not None or not source.golden_required)
        and source.preprocess_sha256 == (None if spec is None else spec.digest())
    )


def _go_live(
    store: ModelStore,
    name: str,
    slots: Mapping[str, Slot],
    *,
    previous: Sequence[Earlier],
    restored: int | None = None,
) -> Manifest:
    manifest = Manifest(
        name=name,
        release=1 + max((*store.releases(name), store.last_release(name) or 0)),
        slots=dict(slots),
        rolled_back_to=restored,
        deployed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        previous=tuple(previous[: store.keep]),
    )
    folder = _release_folder(store, manifest)
    link = store.live_link(name)
    if link.is_dir() and not link.is_symlink():  # The store was copied by following links.
        discard(link, into=store.staging_folder)
    point_link(store.live_link(name), f"../releases/{name}/{folder.name}")
    store.prune(name)
    return manifest


def _release_folder(store: ModelStore, manifest: Manifest) -> Path:
    """Create the folder of a release: complete in the staging folder, then renamed."""
    staged = store.staging_folder / "release"
    staged.mkdir()
    manifest.save(staged / MANIFEST)
    for label, slot in manifest.slots.items():
        (staged / label).symlink_to(f"../../../store/{slot.sha256.hex}", target_is_directory=True)
    fsync_tree(staged)
    releases = store.root / "releases" / manifest.name
    make_folder(releases)
    short = manifest.slots[EXACT].sha256.short
    folder = releases / f"{manifest.release}-{short}"
    staged.rename(folder)
    sync(releases)
    return folder


def _describe(manifest: Manifest) -> str:
    slots = ", ".join(f"{label} {slot.sha256.short}" for label, slot in manifest.slots.items())
    without_golden = [label for label, slot in manifest.slots.items() if slot.golden is None]
    warning = f"; without golden vectors: {', '.join(without_golden)}" if without_golden else ""
    return f"release {manifest.release} serves: {slots}{warning}"
