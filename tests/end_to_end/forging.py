"""A model that serves what CI handed in, and ways to change what is handed in next."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gate.policy.policy import Policy
from gate.records.layout import DECISION_STATEMENT, EVIDENCE_STATEMENT, RECORDS
from gate.registry.release import GoldenFolder, Release
from tests import builders
from tests.end_to_end.hands import Hands
from tests.end_to_end.signed import SignedStack
from tests.golden_vectors import vectors
from tests.registry import test_preprocessing_beside as pictures
from tests.registry.releases import (
    evidence,
    onnx_file,
    onnx_file_with_data,
    release,
    twin_file,
    twin_of,
    twin_policy,
)

PLAIN = builders.policy()
TWINNED = builders.policy(twin=twin_policy())
FORGED, RIGHT = 7, 9
"""Seeds of what is forged, and of what is handed in afterwards."""
STATEMENTS = (f"{RECORDS}/{EVIDENCE_STATEMENT}", f"{RECORDS}/{DECISION_STATEMENT}")
Make = Callable[[Path, int], Release]


@dataclass(frozen=True)
class Victim:
    """A model whose first version serves, or its second."""

    name: str
    hands: Hands
    stack: SignedStack
    make: Make

    @property
    def policy(self) -> Policy:
        return self.stack.policy

    def release(self, seed: int, **signing: Any) -> Release:
        """What CI measured and signed; other bytes for another seed."""
        return self.signed(self.make(self.fresh(), seed), **signing)

    def signed(self, made: Release, *, policy: Policy | None = None, **signing: Any) -> Release:
        return self.hands.signed(made, policy or self.policy, name=self.name, **signing)

    def folder_of(self, made: Release) -> Path:
        return self.hands.laid_out(made, self.policy)

    def put(self, made: Release, *changes: Callable[[Path], object]) -> str:
        """Hand it in, with these changes of its files; gives the number of the version."""
        folder = self.folder_of(made)
        for change in changes:
            change(folder)
        return self.hands.put(folder, made)

    def tag(self, number: str, key: str, value: str) -> None:
        self.hands.client.set_model_version_tag(self.name, number, key, value)

    def point(self, alias: str, number: str) -> None:
        self.hands.client.set_registered_model_alias(self.name, alias, number)

    def alias(self, alias: str) -> str | None:
        aliases = self.hands.client.get_registered_model(self.name).aliases
        return str(aliases[alias]) if alias in aliases else None

    def tags(self, number: str) -> dict[str, str]:
        return dict(self.hands.client.get_model_version(self.name, number).tags)

    def fresh(self) -> Path:
        """A folder for one file."""
        return Path(tempfile.mkdtemp(dir=self.hands.folder))


Forge = Callable[[Victim], str]
"""Gives the number of the version that must never serve."""


def plain_release(folder: Path, seed: int) -> Release:
    path = onnx_file(folder / "model.onnx", seed=seed)
    return release(path, evidence=evidence(path, measured_at=at()), policy=PLAIN)


def with_golden(folder: Path, seed: int) -> Release:
    made = plain_release(folder, seed)
    origin = vectors.origin().model_copy(update={"policy_sha256": PLAIN.digest()})
    vectors.golden_of(folder / "vectors", made.onnx_path, origin=origin)
    return replace(made, golden=GoldenFolder.open(folder / "vectors"))


def with_spec(folder: Path, seed: int) -> Release:
    made = pictures.made(folder, seed)
    path = made.onnx_path.rename(folder / "model.onnx")
    return replace(made, onnx_path=path)


def with_data(folder: Path, seed: int) -> Release:
    path = onnx_file_with_data(folder / "model.onnx", seed=seed)
    return release(path, policy=PLAIN)


def with_twin(folder: Path, seed: int) -> Release:
    made = plain_release(folder, seed)
    assert TWINNED.twin is not None
    small = twin_file(folder / "small" / "model.onnx", of=made.onnx_path, seed=seed + 100)
    return replace(made, twin=twin_of(small, policy=TWINNED.twin))


def at(*, days: float = 0.0) -> str:
    """So many days ago."""
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Forgery:
    """How it is made, and what the service says of it."""

    forge: Forge
    problem: str
    make: Make = plain_release
    action: str = "refused"
    before: Callable[[Victim], None] | None = None
    """What becomes of a second version that served before."""
    policy: Policy = field(default=PLAIN)
