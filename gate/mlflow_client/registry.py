"""Implement the registry interface; upload files with unchanged bytes."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate.errors import ArtifactMissing, DigestMismatch, RegistryError, StorageError, TooLarge
from gate.mlflow_client.connection import (
    calling,
    check_database,
    is_gone,
    quiet_process,
    require_workspaces,
)
from gate.onnx_file.release_file import is_release_file
from gate.records.layout import MAX_EXTENT, VersionSize
from gate.registry.interface import Alias, Draft, Tag, Version
from gate.sandbox.limits import limit_folder_size
from gate.storage.arrays import STRING
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import encodable
from gate.storage.safe_text import redacted
from gate.storage.untrusted_files import parse_plain_yaml, read_untrusted
from gate.storage.workspace import (
    DEFAULT,
    VARIABLE,
    check_workspace,
    current_workspace,
    in_workspace,
    split_identity,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


def experiment_id(client: MlflowClient, name: str, *, artifacts: Path | None) -> str:
    """Return the ID of the experiment `name`. Create the experiment if it does not exist.

    `artifacts`: the absolute folder for a new experiment's artifacts. MLflow would put those of a
    local database into the current folder. None: the server chooses it. Raises RegistryError for a
    deleted experiment.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = (artifacts / name).as_uri() if artifacts else None
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another process created it first
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise RegistryError(
            f"the experiment '{name}' is deleted. Restore it (mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}) or name another one."
        )
    return str(experiment.experiment_id)


# Listed first, because a download can't be canceled: MLflow runs it in its own threads.
_DEPTH = 64


def check_extent(source: str, allowed: VersionSize) -> None:
    """List all files that a download of `source` would fetch.

    Raises TooLarge as soon as the list is too large or too deep, and the exceptions of MLflow's
    listing.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(source)
    size, files = 0, 0
    folders: list[str | None] = [None]
    while folders:
        entries = repository.list_artifacts(folders.pop())
        folders += [entry.path for entry in entries if entry.is_dir]
        if any(path and path.count("/") > _DEPTH for path in folders):
            raise TooLarge(f"its folders are more than {_DEPTH} deep")
        size += sum(entry.file_size or 0 for entry in entries)
        files += len(entries)
        allowed.check(size, files)


def fetch(source: str, folder: Path, most_bytes: Mapping[str, int]) -> None:
    """Download these files as far as they exist.

    Raises TooLarge if one is larger than allowed, and the exceptions of MLflow.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository: Any = get_artifact_repository(source)
    for folder_name in sorted({path.rpartition("/")[0] for path in most_bytes}):
        for entry in repository.list_artifacts(folder_name or None):
            limit = most_bytes.get(entry.path)
            if limit is None or entry.is_dir:
                continue
            if (entry.file_size or 0) > limit:
                size = entry.file_size
                raise TooLarge(f"{entry.path} has {size} bytes, at most {limit} are read")
            with limit_folder_size(folder, sum(most_bytes.values())):
                repository.download_artifacts(entry.path, str(folder))


# Every ID is passed explicitly: this code neither uses nor changes an active run, `MLFLOW_RUN_ID`
# or another tracking URI of the process.
_steps = logging.getLogger("gate.steps")

_MLMODEL_LIMIT = 1 << 18
"""Largest MLmodel file in bytes: enough for about 2000 inputs and outputs."""


class MlflowRegistry:
    """A registry at an MLflow tracking URI: `http(s)://…` for a server, or `sqlite:///…`."""

    def __init__(self, tracking_uri: str, *, workspace: str | None = None) -> None:
        """`workspace`: the workspace of the registered models. None: MLFLOW_WORKSPACE, else
        `default`. Raises StorageError for a name that MLflow does not allow."""
        quiet_process()
        if split_identity(redacted(tracking_uri))[1] is not None:
            raise RegistryError(
                f"{redacted(tracking_uri)} is not an MLflow tracking URI. Set the workspace with "
                f"{VARIABLE}."
            )
        self._uri = tracking_uri
        self._workspace = (
            current_workspace() if workspace is None else check_workspace(workspace)
        ) or DEFAULT
        self._opened: MlflowClient | None = None

    @property
    def identity(self) -> str:
        """The tracking URI without user and password, and with the workspace unless it is
        `default`."""
        workspace = None if self._workspace == DEFAULT else self._workspace
        return in_workspace(redacted(self._uri), workspace)

    def in_workspace(self, workspace: str) -> MlflowRegistry:
        """Return the registry of another workspace of the server. Raises StorageError."""
        return MlflowRegistry(self._uri, workspace=workspace)

    def ensure_model(self, name: str) -> None:
        """Create the registered model unless it exists. Another process may create it first."""
        with self._using(f"create the registered model '{name}'") as client:
            if self.has_model(name):
                return
            try:
                client.create_registered_model(name)
            except Exception:
                # Concurrent first creations fail as ALREADY_EXISTS or as a plain BAD_REQUEST.
                if not self.has_model(name):
                    raise

    def has_model(self, name: str) -> bool:
        """Return whether the registered model exists."""
        with self._using(f"look for the registered model '{name}'") as client:
            return _registered_model(client, name) is not None

    def find(self, name: str, sha256: Digest) -> tuple[Version, ...]:
        """Return the versions with this digest in the tag `gate.sha256`, newest first."""
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
        """Log the file with `mlflow.onnx` in the draft's run and create a version from it."""
        with self._using(f"create a version of '{name}'") as client:
            model_id = upload(client, draft)
            created = client.create_model_version(
                name,
                f"models:/{model_id}",
                run_id=draft.run_id,
                tags=dict(draft.tags),
                description=draft.description,
                model_id=model_id,
            )
        return str(created.version)

    def version(self, name: str, number: str) -> Version:
        """Read one version."""
        with self._using(f"read version {number} of '{name}'") as client:
            return _version(client.get_model_version(name, number))

    def download(
        self, name: str, number: str, folder: Path, *, extent: VersionSize = MAX_EXTENT
    ) -> Path:
        """Download a version's artifact, unless it is much larger than `extent`. Return the path of
        its ONNX file."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        problem = f"version {number} of '{name}' has no complete ONNX artifact"
        remedy = "Restore the artifact store. If it is lost, promote the file again."
        with self._using(f"download version {number} of '{name}'") as client:
            try:
                source = client.get_model_version_download_uri(name, number)
                check_extent(source, extent)
                model = download_artifacts(artifact_uri=source, dst_path=str(folder))
            except (FileNotFoundError, MlflowException) as error:
                if not is_gone(error):
                    raise
                raise ArtifactMissing(f"{problem}: {error}. {remedy}") from error
            except TooLarge as error:
                raise DigestMismatch(
                    f"{problem}: {error}. The artifact was replaced. {remedy}"
                ) from error
            if not Path(model, "MLmodel").is_file():
                raise ArtifactMissing(f"{problem}: it has no MLmodel. {remedy}")
            path = _onnx_file(Path(model))
        if path is None:
            raise DigestMismatch(
                f"{problem}: files are missing, or its MLmodel names another file. "
                "Promote the file again."
            )
        return path

    def fetch(self, name: str, number: str, folder: Path, *, most_bytes: Mapping[str, int]) -> None:
        """Download these single files of a version as far as they exist."""
        from mlflow.exceptions import MlflowException

        with self._using(f"read the files of version {number} of '{name}'") as client:
            problem = f"the files of version {number} of '{name}' can't be read"
            try:
                fetch(client.get_model_version_download_uri(name, number), folder, most_bytes)
            except TooLarge as error:
                raise DigestMismatch(
                    f"{problem}: {error}. The artifact was replaced. Promote the file again."
                ) from error
            except (FileNotFoundError, MlflowException) as error:
                if not is_gone(error):
                    raise
                raise ArtifactMissing(f"{problem}: {error}. Restore the artifact store.") from error

    def alias(self, name: str, alias: Alias) -> str | None:
        """Return the version of an alias, or None."""
        with self._using(f"read the alias '{alias}' of '{name}'") as client:
            model = _registered_model(client, name)
            number = None if model is None else model.aliases.get(alias)
            return None if number is None else str(number)

    def set_alias(self, name: str, alias: Alias, number: str) -> None:
        """Point an alias at a version."""
        with self._using(f"set the alias '{alias}' of '{name}'") as client:
            client.set_registered_model_alias(name, alias, number)

    def delete_alias(self, name: str, alias: Alias) -> None:
        """Delete an alias."""
        with self._using(f"delete the alias '{alias}' of '{name}'") as client:
            client.delete_registered_model_alias(name, alias)

    def set_tag(self, name: str, number: str, *, key: str, value: str) -> None:
        """Set a tag on a version."""
        with self._using(f"tag version {number} of '{name}'") as client:
            client.set_model_version_tag(name, number, key, encodable(value))

    def set_description(self, name: str, number: str, text: str) -> None:
        """Replace the description of a version."""
        with self._using(f"describe version {number} of '{name}'") as client:
            client.update_model_version(name, number, description=encodable(text))

    @contextmanager
    def _using(self, action: str) -> Iterator[MlflowClient]:
        _steps.debug(action)
        with calling(self._uri, action, workspace=self._workspace):
            if self._opened is None:
                from mlflow import MlflowClient

                check_database(self._uri)  # otherwise MLflow retries silently for minutes
                if self._workspace != DEFAULT:
                    require_workspaces(self._uri, self._workspace)
                self._opened = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
            yield self._opened


def _registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if not is_gone(error):
            raise
        return None


def _version(stored: ModelVersion) -> Version:
    created_ms = stored.creation_timestamp
    created = None if created_ms is None else datetime.fromtimestamp(created_ms / 1000, tz=UTC)
    return Version(
        number=str(stored.version),
        run_id=stored.run_id or None,
        tags=dict(stored.tags),
        description=stored.description or "",
        created_at=None if created is None else created.isoformat(timespec="milliseconds"),
    )


def _onnx_file(folder: Path) -> Path | None:
    """Return the file that MLmodel names, if it is in the folder and every flavor serves it. For a
    release of several files, its release file, and only if there is no other flavor.

    MLmodel may have been edited, too: `mlflow.pyfunc` reads file and loader from its own entry.
    """
    try:
        data = read_untrusted(folder / "MLmodel", limit=_MLMODEL_LIMIT)
        flavors = parse_plain_yaml(data, label="MLmodel")["flavors"]
        if PARTS_FLAVOR in flavors:
            served = flavors[PARTS_FLAVOR]["data"]
            if flavors != {PARTS_FLAVOR: {"data": served}} or not is_release_file(
                Path(str(served))
            ):
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
    except Exception:  # the file is untrusted and may have any content
        return None


PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")

_PROTO_LIMIT = 2**31
"""Size limit in bytes: protobuf can't serialize more."""

PARTS_FLAVOR = "onnx_parts"
"""Flavor of a release of several files. MLflow itself can't load it."""

_RUNTIMES = ("onnxruntime-gpu", "onnxruntime")


def upload(client: MlflowClient, draft: Draft) -> str:
    """Upload the draft's file and link it with the draft's run; return the ID of the logged model.

    Usually through `mlflow.onnx.log_model`, which serializes the parsed proto again. If this would
    change the bytes (external data, an unusual serialization, over 2 GB), the same MLflow model is
    built from the unchanged file. For a release of several files the MLflow model holds all of
    them.
    """
    from mlflow.entities import LoggedModelOutput

    name = re.sub(r"[^A-Za-z0-9_-]", "-", draft.path.stem)
    logged = client.create_logged_model(
        client.get_run(draft.run_id).info.experiment_id,
        name=name,
        source_run_id=draft.run_id,
        tags={Tag.SHA256: draft.subject.sha256.hex},
    )
    # First, because the version becomes READY with the file.
    for artifact_path, folder in draft.folders.items():
        client.log_model_artifacts(logged.model_id, str(folder), artifact_path)
    _steps.debug("upload %s, %.1f MB", draft.path.name, draft.subject.size_bytes / 1e6)
    proto = _proto_of_same_bytes(draft)
    if proto is None:
        _log_files(client, draft, model_id=logged.model_id)
    else:
        _log_model(proto, draft, name=name, model_id=logged.model_id)
    client.log_outputs(draft.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return str(logged.model_id)


def _proto_of_same_bytes(draft: Draft) -> Any:
    """Return the parsed file if serializing it yields the same bytes, else None."""
    import onnx

    if draft.subject.external_data or draft.subject.size_bytes >= _PROTO_LIMIT:
        return None
    proto = onnx.load(str(draft.path), load_external_data=False)
    serialized = Digest.from_bytes(proto.SerializeToString())
    return proto if serialized == draft.subject.sha256 else None


def _log_model(proto: Any, draft: Draft, *, name: str, model_id: str) -> None:
    """Call `mlflow.onnx.log_model` in a separate thread without an active run.

    In the caller's thread it would add outputs and metrics to the active run.
    """
    import mlflow.onnx

    failures: list[BaseException] = []

    def log() -> None:
        try:
            mlflow.onnx.log_model(
                proto,
                name=name,
                model_id=model_id,
                signature=_signature(draft),
                pip_requirements=_requirements(),
                onnx_execution_providers=list(PROVIDERS),
                save_as_external_data=False,
            )
        except BaseException as error:  # re-raised in the caller's thread below
            failures.append(error)

    # A new thread lacks the context variables, including MLflow's workspace.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(log,), name="gate-log-model")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _log_files(client: MlflowClient, draft: Draft, *, model_id: str) -> None:
    """Log the files as `mlflow.onnx.log_model` does, but with the ONNX file and its data unchanged.

    For a release of several files, log all of them, without a flavor that would load a single file
    as the model.
    """
    import onnx
    from mlflow import pyfunc
    from mlflow.models import Model

    with temporary_folder() as folder:
        model = Model(run_id=draft.run_id, model_id=model_id, signature=_signature(draft))
        data = draft.path.name
        if draft.subject.parts:
            model.add_flavor(PARTS_FLAVOR, data=data)  # the release file lists the files
        else:
            pyfunc.add_to_model(model, loader_module="mlflow.onnx", data=data)
            model.add_flavor(
                "onnx", onnx_version=onnx.__version__, data=data, providers=list(PROVIDERS)
            )
        model.save(str(Path(folder, "MLmodel")))
        Path(folder, "requirements.txt").write_text("\n".join(_requirements()) + "\n")
        client.log_model_artifacts(model_id, str(folder))
    for name in (draft.path.name, *draft.subject.external_data):
        parent = Path(name).parent.as_posix()
        source = str(draft.path.parent / name)
        client.log_model_artifact(model_id, source, None if parent == "." else parent)
    client.finalize_logged_model(model_id, "READY")


def _signature(draft: Draft) -> Any:
    """Return inputs and outputs as MLflow shows them, with -1 for a dynamic axis."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(specs: Any) -> Schema:
        return Schema(
            [
                TensorSpec(
                    np.dtype(str if spec.dtype == STRING else spec.dtype),
                    tuple(-1 if isinstance(axis, str) else axis for axis in spec.shape),
                    spec.name,
                )
                for spec in specs
            ]
        )

    try:
        return ModelSignature(schema(draft.subject.inputs), schema(draft.subject.outputs))
    except TypeError:  # a dtype that numpy lacks, such as bfloat16
        return None


def _requirements() -> list[str]:
    """Return the requirements of the model.

    They are explicit because MLflow would start a process to infer them.
    """
    requirements = [f"onnx=={version('onnx')}", f"numpy=={version('numpy')}"]
    for runtime in _RUNTIMES:
        try:
            return [*requirements, f"{runtime}=={version(runtime)}"]
        except PackageNotFoundError:
            continue
    return requirements
