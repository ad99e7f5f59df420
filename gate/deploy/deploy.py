"""A slot on its way into the store: fetched, hashed, loaded, its golden vectors computed."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from gate.bounded.limits import ChildLimits
from gate.deploy.disk import settle
from gate.deploy.manifest import Slot, StoredFile, url_of
from gate.deploy.source import GOLDEN, SlotSource, fetched
from gate.deploy.store import Store
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    LimitExceeded,
    OnnxFileError,
    PackageMissing,
    PolicyError,
)
from gate.golden.folder import GOLDEN_JSON, files_of, read_golden
from gate.golden.foreign import loading_problem, verify_within
from gate.onnxfile.foreign import subject_within
from gate.onnxfile.release_file import onnx_files
from gate.preprocess.beside import prove_spec, spec_beside
from gate.records.evidence import Subject
from gate.storage.atomic import sync
from gate.storage.digest import Digest
from gate.storage.quota import TooLarge

_steps = logging.getLogger("gate.steps")


class NotDeployed(Exception):
    """These bytes are not deployed. The message says why."""

    judged = True
    """Whether that is a verdict on them."""


class NotJudged(NotDeployed):
    """Whether these bytes are good could not be found out within the limits."""

    judged = False


@dataclass(frozen=True)
class Staged:
    """A slot whose bytes were proven, in folders that are on the disk."""

    slot: Slot
    model: Path
    """Folder of the model and its data."""
    golden: Path | None


def stage(source: SlotSource, folder: Path) -> Staged:
    """Fetch a slot into `folder`, which is made, and prove it. Raises NotDeployed where the bytes
    are not good, and whatever fetching raises where they could not be had."""
    folder.mkdir()
    try:
        _steps.debug("fetch the file and hash it")
        path = fetched(source, folder / "fetched")
        subject = _subject(path, source, inside=folder / "fetched")
        expected = source.preprocess_sha256
        spec = prove_spec(spec_beside(path), expected, what=path.name) if expected else None
        model, golden = _taken(path, subject, expected=source.golden_sha256, into=folder)
    except LimitExceeded as error:
        raise NotJudged(str(error)) from error
    except (TooLarge, OnnxFileError, DigestMismatch, PolicyError) as error:
        raise NotDeployed(str(error)) from error
    vectors = _computed(model / path.name, source, golden=golden)
    for made in (model, golden):
        if made is not None:
            settle(made)
    digest = subject.sha256
    data = tuple(_stored(model, name, within=digest) for name in subject.external_data)
    by_name = {file.name: file for file in data}
    slot = Slot(
        sha256=digest,
        size_bytes=subject.size_bytes,
        model=_stored(model, path.name, within=digest),
        external_data=data,
        golden=_stored(golden, GOLDEN_JSON, within=vectors) if golden and vectors else None,
        preprocessing=spec,
        parts={name: by_name[part.file] for name, part in subject.parts.items()},
    )
    return Staged(slot, model, golden)


def store_staged(store: Store, staged: Staged) -> None:
    """Put the proven folders into the store, each by one rename."""
    if staged.golden is not None and staged.slot.golden_sha256 is not None:
        _put(store, staged.golden, staged.slot.golden_sha256)
    _put(store, staged.model, staged.slot.sha256)


def prove(store: Store, slot: Slot) -> str | None:
    """What is wrong with a slot's bytes in the store, or None if they are whole.

    Every file is hashed, and none may be a link; nothing is computed.
    """
    try:
        for entry in slot.files:
            with store.open(store.file(slot.sha256, entry)) as stream:
                entry.sha256.verify(Digest.of_stream(stream), what=entry.name)
        if slot.golden_sha256 is not None:
            read_golden(store.content(slot.golden_sha256), sha256=slot.golden_sha256)
    except Exception as error:
        return str(error)
    return None


def compute(store: Store, slot: Slot, limits: ChildLimits | None = None) -> str | None:
    """What is wrong with what a slot of the store computes on this machine, or None."""
    path = store.file(slot.sha256, slot.model)
    golden = None if slot.golden_sha256 is None else store.content(slot.golden_sha256)
    try:
        _run(path, golden, limits)
    except NotDeployed as refusal:
        return str(refusal)
    return None


def _subject(path: Path, source: SlotSource, *, inside: Path) -> Subject:
    """Of a release the list of its parts is read before any digest is compared: at most 64 KiB of
    plain YAML, for the links among them."""
    if path.is_symlink() or not path.resolve().is_relative_to(inside.resolve()):
        raise NotDeployed(f"{path} is a link, or lies outside of the folder that was to be filled")
    linked = [part for part in onnx_files(path).values() if part.is_symlink()]
    if linked:
        raise NotDeployed(f"{linked[0]} is a link, expected the file of a part")
    subject = subject_within(path, source.limits)
    if subject.sha256 != source.sha256:
        raise NotDeployed(f"{path.name} has digest {subject.sha256}, expected {source.sha256}")
    return subject


def _taken(
    path: Path, subject: Subject, *, expected: Digest | None, into: Path
) -> tuple[Path, Path | None]:
    """Move what is needed, and nothing else, into folders of its own."""
    model = into / "model"
    for name in (path.name, *subject.external_data):
        _move(path.parent / name, model / name)
    beside = path.parent / GOLDEN
    if not (beside / GOLDEN_JSON).exists():
        return model, None
    try:
        files = files_of(read_golden(beside, sha256=expected).golden)
    except EvidenceError as error:
        raise NotDeployed(f"the golden vectors are not whole: {error}") from error
    for name in files:
        _move(beside / name, into / GOLDEN / name)
    return model, into / GOLDEN


def _move(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_file():
        raise NotDeployed(f"{source.name} is a link, or no file")
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)


def _computed(path: Path, source: SlotSource, *, golden: Path | None) -> Digest | None:
    """Load the model, compute the vectors; gives their digest."""
    if golden is None and (source.golden_required or source.golden_sha256 is not None):
        raise NotDeployed(
            "no golden vectors came with the model, so nothing proves that it computes the same "
            "here. Promote it anew, or deploy its file by hand"
        )
    _run(path, golden, source.limits)
    return Digest.of_file(golden / GOLDEN_JSON) if golden is not None else None


def _run(path: Path, golden: Path | None, limits: ChildLimits | None) -> None:
    _steps.debug("load it and compute its golden vectors" if golden else "load it")
    try:
        _compute(path, golden, limits)
    except (LimitExceeded, PackageMissing) as error:
        raise NotJudged(str(error)) from error


def _compute(path: Path, golden: Path | None, limits: ChildLimits | None) -> None:
    if golden is not None:
        try:
            result = verify_within(path, golden, limits)
        except (EvidenceError, DigestMismatch) as error:
            raise NotDeployed(f"the golden vectors are not whole: {error}") from error
        if not result.passed:
            raise NotDeployed(f"the golden vectors disagree: {'; '.join(result.problems)}")
        return
    for name, file in onnx_files(path).items():
        problem = loading_problem(file, limits)
        if problem is not None:
            it = f"the part {name}" if name else "it"
            raise NotDeployed(f"ONNX Runtime can't load {it}: {problem}")


def _stored(folder: Path, name: str, *, within: Digest) -> StoredFile:
    path = folder / name
    return StoredFile(
        name=name,
        sha256=Digest.of_file(path),
        size_bytes=path.stat().st_size,
        url=url_of(within, name),
    )


def _put(store: Store, folder: Path, digest: Digest) -> None:
    target = store.content(digest)
    if target.is_symlink():
        target.unlink()  # whoever put it there could exchange what it points at
    if not target.exists():
        folder.rename(target)
        sync(target.parent)
        return
    # There already: whatever is damaged in it is replaced file by file, so that nobody who
    # reads it finds nothing.
    for path in folder.rglob("*"):
        there = target / path.relative_to(folder)
        if path.is_dir():
            if there.is_symlink():
                there.unlink()
            there.mkdir(exist_ok=True)
        elif not _holds(store, there, Digest.of_file(path)):
            path.replace(there)
            sync(there.parent)
    shutil.rmtree(folder, ignore_errors=True)


def _holds(store: Store, path: Path, digest: Digest) -> bool:
    try:
        with store.open(path) as stream:
            return Digest.of_stream(stream) == digest
    except OSError:
        return False
