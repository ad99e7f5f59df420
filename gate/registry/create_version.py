"""Upload a release as a new version."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from gate.errors import RegistryError, StorageError
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.layout import GOLDEN, POLICY, PREPROCESSING, QUANTIZED, RECORDS, SPEC, TREND
from gate.registry.interface import Registry
from gate.registry.release import EvaluatedFile, Release
from gate.registry.version_files import write_records
from gate.registry.version_page import with_status
from gate.storage.files import temporary_folder


def create_version(registry: Registry, release: Release, policy: Policy, *, status: str) -> str:
    """Upload a release as a new version and return the version's number.

    status: the first line of the description.
    The caller verifies the uploaded bytes. Raises RegistryError if the registry returns other tags
    or another description, the other RegistryErrors, and StorageError.
    """
    name, draft = release.model_name, release.draft()
    draft = replace(draft, description=with_status(draft.description, status))
    with temporary_folder() as folder:
        folders = {**draft.folders, **_write_folders(release, policy, folder)}
        number = registry.create_version(name, replace(draft, folders=folders))
    created = registry.version(name, number)
    if not draft.tags.items() <= created.tags.items() or created.description != draft.description:
        raise RegistryError(
            f"version {number} of {name}: the registry returned other tags or another description "
            f"than were written: {dict(created.tags)}. The version was not promoted. Retry."
        )
    return number


def _write_folders(release: Release, policy: Policy, folder: Path) -> dict[str, Path]:
    """Write the folders that are uploaded with the file; return them by their artifact names."""
    folders = {RECORDS: folder / RECORDS}
    write_records(release, folders[RECORDS])
    policy.save(folders[RECORDS] / POLICY)
    release.trend.followed_by(release.evidence).save(folders[RECORDS] / TREND)
    if release.preprocessing is not None:
        folders[PREPROCESSING] = folder / PREPROCESSING
        PreprocessSpec.from_file(release.preprocessing).save(folders[PREPROCESSING] / SPEC)
    if release.twin is not None:
        folders[QUANTIZED] = folder / QUANTIZED
        write_twin(release.twin, folders[QUANTIZED])
        if policy.twin is not None:
            policy.twin.save(folders[QUANTIZED] / RECORDS / POLICY)
    return folders


def write_twin(twin: EvaluatedFile, folder: Path) -> None:
    """Copy a quantized twin with its records into `folder`. Raises StorageError."""
    try:
        for name in (twin.onnx_path.name, *twin.evidence.subject.external_data):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(twin.onnx_path.parent / name, target)
        if twin.golden is not None:
            shutil.copytree(twin.golden.path, folder / GOLDEN)
    except OSError as error:
        raise StorageError(
            f"cannot copy the twin {twin.onnx_path} to {folder}: {error.strerror or error}. "
            "Free disk space or fix the permissions, then retry."
        ) from error
    write_records(twin, folder / RECORDS)
