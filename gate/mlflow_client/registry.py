"""The MLflow model registry behind `gate.registry.port.Registry`; nothing else talks to it.

Every id is passed explicitly: an active run, `MLFLOW_RUN_ID` or another tracking URI of the same
process neither matter here nor are changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate.errors import ArtifactMissing, DigestMismatch, StorageError
from gate.onnxfile.release_file import is_release
from gate.registry.mlflow.database import usable
from gate.registry.mlflow.errors import is_gone, translated
from gate.registry.mlflow.listing import check_extent, fetch
from gate.registry.mlflow.preflight import preflight
from gate.registry.mlflow.process import lent, quiet_process
from gate.registry.mlflow.upload import PARTS_FLAVOR, upload
from gate.registry.port import Alias, Draft, Tag, Version
from gate.storage.digest import Digest
from gate.storage.foreign import plain_yaml, read_foreign
from gate.storage.quota import MAX_EXTENT, Extent, TooLarge
from gate.storage.record import encodable
from gate.storage.redaction import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

__all__ = ["MlflowRegistry", "preflight"]

_steps = logging.getLogger("gate.steps")
_MLMODEL_LIMIT = 1 << 18
"""Bytes of an MLmodel at most: some 2000 inputs and outputs."""


class MlflowRegistry:
    """A registry at an MLflow tracking URI: `http(s)://…` of a server, or `sqlite:///…`."""

    def __init__(self, tracking_uri: str) -> None:
        quiet_process()
        self._uri = tracking_uri
        self._opened: MlflowClient | None = None

    @property
    def identity(self) -> str:
        """The tracking URI without user and password."""
        return redacted(self._uri)

    def ensure_model(self, name: str) -> None:
        """Make the registered model if it is not there; another process may make it first."""
        with self._using(f"make the registered model '{name}'") as client:
            if self.has_model(name):
                return
            try:
                client.create_registered_model(name)
            except Exception:
                # Two first creations at once fail as ALREADY_EXISTS or as a plain BAD_REQUEST.
                if not self.has_model(name):
                    raise

    def has_model(self, name: str) -> bool:
        """Whether the registered model is there."""
        with self._using(f"look for the registered model '{name}'") as client:
            return self._found(lambda: client.get_registered_model(name)) is not None

    def find(self, name: str, sha256: Digest) -> tuple[Version, ...]:
        """Versions whose tag `gate.sha256` is this digest, newest first."""
        quote = '"' if "'" in name else "'"
        query = f"name = {quote}{name}{quote} and tags.`{Tag.SHA256}` = '{sha256.hex}'"
        versions: list[ModelVersion] = []
        token = None
        with self._using(f"search the versions of '{name}'") as client:
            while True:
                page = client.search_model_versions(query, page_token=token)
                versions += page
                token = page.token
                if not token:
                    break
        versions.sort(key=lambda version: int(version.version), reverse=True)
        return tuple(_version(version) for version in versions)

    def create_version(self, name: str, draft: Draft) -> str:
        """Log the file with `mlflow.onnx` under the draft's run and make a version of it."""
        with self._using(f"make a version of '{name}'") as client:
            model_id = upload(client, draft)
            made = client.create_model_version(
                name,
                f"models:/{model_id}",
                run_id=draft.run_id,
                tags=dict(draft.tags),
                description=draft.description,
                model_id=model_id,
            )
        return str(made.version)

    def version(self, name: str, number: str) -> Version:
        """Read one version."""
        with self._using(f"read version {number} of '{name}'") as client:
            return _version(client.get_model_version(name, number))

    def download(
        self, name: str, number: str, folder: Path, *, extent: Extent = MAX_EXTENT
    ) -> Path:
        """Download a version's artifact, unless it is far more than `extent`; gives the path of its
        ONNX file."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        gone = f"version {number} of '{name}' has no whole ONNX artifact"
        remedy = "Bring its store back; if it is lost, promote the file anew."
        with self._using(f"download version {number} of '{name}'") as client:
            try:
                source = client.get_model_version_download_uri(name, number)
                check_extent(source, extent)
                model = download_artifacts(artifact_uri=source, dst_path=str(folder))
            except (FileNotFoundError, MlflowException) as error:
                if not is_gone(error):
                    raise
                raise ArtifactMissing(f"{gone}: {error}. {remedy}") from error
            except TooLarge as error:
                raise DigestMismatch(f"{gone}: {error}. It was exchanged: {remedy}") from error
            if not Path(model, "MLmodel").is_file():
                raise ArtifactMissing(f"{gone}: it has no MLmodel. {remedy}")
            path = _onnx_file(Path(model))
        if path is None:
            raise DigestMismatch(
                f"{gone}: files are missing, or its MLmodel would serve another one. "
                "Promote the file anew."
            )
        return path

    def fetch(self, name: str, number: str, folder: Path, *, most_bytes: Mapping[str, int]) -> None:
        """Download single files beside a version's file, those that are there."""
        from mlflow.exceptions import MlflowException

        with self._using(f"read what is beside version {number} of '{name}'") as client:
            what = f"what is beside version {number} of '{name}' can't be read"
            try:
                fetch(client.get_model_version_download_uri(name, number), folder, most_bytes)
            except TooLarge as error:
                raise DigestMismatch(
                    f"{what}: {error}. It was exchanged: promote the file anew."
                ) from error
            except (FileNotFoundError, MlflowException) as error:
                if not is_gone(error):
                    raise
                raise ArtifactMissing(f"{what}: {error}. Bring its store back.") from error

    def alias(self, name: str, alias: Alias) -> str | None:
        """The version that an alias points at, or None."""
        with self._using(f"read the alias '{alias}' of '{name}'") as client:
            model = self._found(lambda: client.get_registered_model(name))
            number = None if model is None else model.aliases.get(alias)
            return None if number is None else str(number)

    def set_alias(self, name: str, alias: Alias, number: str) -> None:
        """Point an alias at a version."""
        with self._using(f"set the alias '{alias}' of '{name}'") as client:
            client.set_registered_model_alias(name, alias, number)

    def delete_alias(self, name: str, alias: Alias) -> None:
        """Take an alias away."""
        with self._using(f"take the alias '{alias}' of '{name}' away") as client:
            client.delete_registered_model_alias(name, alias)

    def set_tag(self, name: str, number: str, *, key: str, value: str) -> None:
        """Set a tag on a version."""
        with self._using(f"tag version {number} of '{name}'") as client:
            client.set_model_version_tag(name, number, key, encodable(value))

    def set_description(self, name: str, number: str, text: str) -> None:
        """Put another text in the place of a version's description."""
        with self._using(f"describe version {number} of '{name}'") as client:
            client.update_model_version(name, number, description=encodable(text))

    @contextmanager
    def _using(self, doing: str) -> Iterator[MlflowClient]:
        _steps.debug(doing)
        with translated(self._uri, doing), lent(self._uri):
            if self._opened is None:
                from mlflow import MlflowClient

                usable(self._uri)  # MLflow tries for minutes, without a word
                self._opened = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
            yield self._opened

    def _found(self, read: Callable[[], Any]) -> Any:
        """What `read` gives, or None where there is no such thing."""
        from mlflow.exceptions import MlflowException

        try:
            return read()
        except MlflowException as error:
            if not is_gone(error):
                raise
            return None


def _version(stored: ModelVersion) -> Version:
    return Version(
        number=str(stored.version),
        run_id=stored.run_id or None,
        tags=dict(stored.tags),
        description=stored.description or "",
        made_at=_time(stored.creation_timestamp),
    )


def _time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    time = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    return time.isoformat(timespec="milliseconds")


def _onnx_file(folder: Path) -> Path | None:
    """The file that MLmodel names, if it is in the folder and what every flavour serves; of a
    release its own file, and there is no other flavour.

    MLmodel may have been edited too: `mlflow.pyfunc` takes file and loader from its own entry.
    """
    try:
        data = read_foreign(folder / "MLmodel", limit=_MLMODEL_LIMIT)
        flavors = plain_yaml(data, what="MLmodel")["flavors"]
        if PARTS_FLAVOR in flavors:
            served = flavors[PARTS_FLAVOR]["data"]
            if flavors != {PARTS_FLAVOR: {"data": served}} or not is_release(Path(str(served))):
                return None
        else:
            served, loader = flavors["onnx"]["data"], flavors["python_function"]
            if (loader["data"], loader["loader_module"]) != (served, "mlflow.onnx"):
                return None
        if any(flavor.get("code") for flavor in flavors.values()):
            return None
        path = (folder / str(served)).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except StorageError:
        raise
    except Exception:  # whatever a stranger wrote there
        return None
