"""A cell: one model under one setting in one runtime. A job: cells that share a reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.cuda.device import Role
from benchmarks.cuda.setting import CORPUS, SETTINGS, Setting
from gate.storage.digest import Digest

Part = Literal["matrix", "corpus", "tests"]
TESTS = "tests/gpu"
"""The name of the only cell that is no measurement."""


@dataclass(frozen=True)
class Cell:
    """What is measured, kept and shown by itself."""

    part: Part
    subject: str
    """A model of the matrix, or an entry of the corpus."""
    setting: str
    role: Role

    @property
    def name(self) -> str:
        """`matrix/resnet50/tf32/ort-cuda`, `corpus/fault/sign/…/ort-cuda`."""
        setting = [] if self.part == "corpus" else [self.setting]
        return "/".join([self.part, self.subject, *setting, self.role])


@dataclass(frozen=True)
class Job:
    """Some subjects under one setting: each is measured once for all of the roles."""

    part: Part
    subjects: tuple[str, ...]
    setting: str
    roles: tuple[Role, ...]

    def cells(self, subject: str | None = None) -> list[Cell]:
        """All of them, or those of one subject."""
        return [
            Cell(self.part, one, self.setting, role)
            for one in self.subjects
            if subject in (None, one)
            for role in self.roles
        ]

    def without(self, done: Sequence[Cell]) -> list[Job]:
        """What is left: jobs of the subjects that lack the same roles."""
        left: dict[tuple[Role, ...], list[str]] = {}
        for subject in self.subjects:
            roles = tuple(one.role for one in self.cells(subject) if one not in done)
            if roles:
                left.setdefault(roles, []).append(subject)
        return [
            replace(self, subjects=tuple(subjects), roles=roles) for roles, subjects in left.items()
        ]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Job:
        """The law: `Job.from_plain(json of job.plain()) == job`."""
        return cls(plain["part"], tuple(plain["subjects"]), plain["setting"], tuple(plain["roles"]))


def setting_of(part: Part, name: str) -> Setting:
    """The setting of this name."""
    return CORPUS if part == "corpus" else SETTINGS[name]


def key_of(name: str, setting: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Under which name of a file a cell is kept: another model, setting, version, device or code
    has another one."""
    whole = {"cell": name, "setting": setting, "identity": identity}
    return Digest.from_bytes(json.dumps(whole, sort_keys=True).encode()).hex[:32]
