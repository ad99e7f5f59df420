"""A registry with users and passwords, and a CI with the right to edit the registered models, and no
other: neither the service's state nor its settings are within reach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate.ledger.entry import plain
from gate.mlflow_client.connection import lent
from gate.policy.policy import Policy
from gate.records.layout import GOLDEN, POLICY, PREPROCESSING, QUANTIZED, RECORDS, SPEC
from gate.registry.create_version import write_twin
from gate.registry.interface import CANDIDATE
from gate.registry.release import Release
from gate.registry.version_files import Records
from gate.signing.keys import SigningKey
from gate.signing.trust import TrustedKey
from tests.end_to_end.stack import webhooks_allowed
from tests.registry.servers import ADMIN, Server, add_user, let_edit, make_run, serving
from tests.registry.signed import Signing, files_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

User = tuple[str, str]
"""Name and password."""
CI: User = ("ci", "password-of-the-test-ci")
SERVICE: User = ("service", "password-of-the-test-service")
MLMODEL = """flavors:
  onnx:
    data: model.onnx
  python_function:
    data: {data}
    loader_module: mlflow.onnx
"""
"""What MLflow's own has to say, for us."""


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    """MLflow's clients in this process, and processes that it starts, are this user's."""
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, user, strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def guarded_mlflow(folder: Path, models: Iterable[str]) -> Iterator[Server]:
    """A server where CI and the service may edit these models, and this process is CI."""
    folder.mkdir()
    with serving(folder, guarded=True, environment=webhooks_allowed(folder)) as server:
        for name, password in (CI, SERVICE):
            add_user(server.uri, name, password)
        with acting_as(ADMIN), lent(server.uri):
            from mlflow import MlflowClient

            for model in models:
                MlflowClient(server.uri, server.uri).create_registered_model(model)
                for name, _password in (CI, SERVICE):
                    let_edit(server.uri, name, model=model)
        with acting_as(CI), lent(server.uri):
            yield server


class Keys:
    """Keys by their names: `ci` measures, `writer` is the service's, others are as a test says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, SigningKey] = {}

    def __getitem__(self, name: str) -> SigningKey:
        if name not in self._made:
            self._made[name] = SigningKey.make(self.path(name))
        return self._made[name]

    def path(self, name: str) -> Path:
        """Where the private part is."""
        return self._folder / f"{name}.pem"

    def listed(self, *names: str, **more: Any) -> tuple[TrustedKey, ...]:
        """As a trust lists them."""
        return tuple(TrustedKey(**self[name].public.to_plain(), **more) for name in names)


@dataclass
class Hands:
    """What CI does at the registry, and whoever got hold of its password."""

    server: Server
    folder: Path
    keys: Keys

    def __post_init__(self) -> None:
        from mlflow import MlflowClient

        self.folder.mkdir()
        self.client: MlflowClient = MlflowClient(self.server.uri, self.server.uri)
        self.run_id = make_run(self.server.uri)
        self._experiment = self.client.get_run(self.run_id).info.experiment_id
        self._folders = 0

    def signed(self, release: Release, policy: Policy, *, name: str, **signing: Any) -> Release:
        """As a release of this model; signed by CI, for this model of this registry, unless it is
        said otherwise."""
        fields = {"key": self.keys["ci"], "registry": plain(self.server.uri), "model": name}
        release = replace(release, model_name=name, run_id=self.run_id)
        return Signing(**{**fields, **signing}).signed(release, policy)

    def laid_out(self, release: Release, policy: Policy) -> Path:
        """A release as a folder, as it lies in the registry."""
        self._folders += 1
        folder = self.folder / "laid-out" / str(self._folders)
        for name in files_of(release):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(release.onnx_path.parent / name, folder / name)
        (folder / "MLmodel").write_text(MLMODEL.format(data="model.onnx"))
        Records(release.evidence, release.decision, release.statements).write(folder / RECORDS)
        policy.save(folder / RECORDS / POLICY)
        if release.golden is not None:
            shutil.copytree(release.golden.path, folder / GOLDEN)
        if release.preprocessing is not None:
            (folder / PREPROCESSING).mkdir()
            shutil.copyfile(release.preprocessing, folder / PREPROCESSING / SPEC)
        if release.twin is not None:
            write_twin(release.twin, folder / QUANTIZED)
        return folder

    def uploaded(self, folder: Path) -> str:
        """Where the registry has the folder now."""
        made = self.client.create_logged_model(
            self._experiment, name="model", source_run_id=self.run_id
        )
        self.client.log_model_artifacts(made.model_id, str(folder))
        self.client.finalize_logged_model(made.model_id, "READY")
        return f"models:/{made.model_id}"

    def version(self, model: str, source: str, tags: Mapping[str, str]) -> str:
        """A version of what lies there; gives its number."""
        made = self.client.create_model_version(
            model, source, model_id=source.rpartition("/")[2], run_id=self.run_id, tags=dict(tags),
            description="The file computes what the model computes.",
        )  # fmt: skip
        return str(made.version)

    def put(self, folder: Path, release: Release, *, source: str | None = None) -> str:
        """Hand in a folder as the release that it says to be; gives the number of the version."""
        model = release.model_name
        number = self.version(model, source or self.uploaded(folder), release.draft().tags)
        self.client.set_registered_model_alias(model, CANDIDATE, number)
        return number
