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
from gate.registry.version_files import Records
from gate.registry.version_page import with_status
from gate.storage.files import temporary_folder


def create_version(registry: Registry, release: Release, policy: Policy, *, status: str) -> str:
    """Make a version of a release and read its tags back; gives its number. `status`: the first
    line of its description. Its bytes are to be proven by the caller.

    Raises RegistryError where it reads back otherwise, the other RegistryErrors, StorageError.
    """
    name, draft = release.model_name, release.draft()
    draft = replace(draft, description=with_status(draft.description, status))
    with temporary_folder() as folder:
        beside = {**draft.beside, **_lay_out(release, policy, folder)}
        number = registry.create_version(name, replace(draft, beside=beside))
    made = registry.version(name, number)
    if not draft.tags.items() <= made.tags.items() or made.description != draft.description:
        raise RegistryError(
            f"version {number} of {name} reads back with other tags or another description than "
            f"it was made with: {dict(made.tags)}. It was not promoted; repeat."
        )
    return number


def _lay_out(release: Release, policy: Policy, folder: Path) -> dict[str, Path]:
    """Write the folders that are uploaded with the file; return them by their names there."""
    folders = {RECORDS: folder / RECORDS}
    Records(release.evidence, release.decision, release.statements).write(folders[RECORDS])
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
    """Copy a twin into `folder`, in its layout next to the exact file. Raises StorageError."""
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
            "Free space or fix permissions, then repeat."
        ) from error
    Records(twin.evidence, twin.decision, twin.statements).write(folder / RECORDS)
