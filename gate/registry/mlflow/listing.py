"""How much lies in the store under a version, before any of it is downloaded; and single files of
it.

Listed first, because a download that has begun can't be ended: MLflow has threads of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gate.storage.quota import Extent, TooLarge, limited

_DEPTH = 64


def check_extent(source: str, allowed: Extent) -> None:
    """List all that a download of `source` would bring. Raises TooLarge as soon as it is too much,
    however deep or endless it is, and whatever MLflow's listing raises."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(source)
    size, files = 0, 0
    folders: list[str | None] = [None]
    while folders:
        found = repository.list_artifacts(folders.pop())
        folders += [entry.path for entry in found if entry.is_dir]
        if any(path and path.count("/") > _DEPTH for path in folders):
            raise TooLarge(f"its folders are more than {_DEPTH} deep")
        size += sum(entry.file_size or 0 for entry in found)
        files += len(found)
        allowed.check(size, files)


def fetch(source: str, folder: Path, most_bytes: Mapping[str, int]) -> None:
    """Download those of these files that are there. Raises TooLarge where one is larger than it may
    be, and whatever MLflow raises."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository: Any = get_artifact_repository(source)
    for place in sorted({path.rpartition("/")[0] for path in most_bytes}):
        for entry in repository.list_artifacts(place or None):
            most = most_bytes.get(entry.path)
            if most is None or entry.is_dir:
                continue
            if (entry.file_size or 0) > most:
                raise TooLarge(f"{entry.path} has {entry.file_size} bytes, at most {most} are read")
            with limited(folder, sum(most_bytes.values())):
                repository.download_artifacts(entry.path, str(folder))
