"""Parts of a check that was broken off, from which the next one goes on.

They lie in the user's cache, bound to the assignment with its digests, the gate's code, machine and
libraries, and the noise floor. A model is more than weights and code (a threshold that its factory
reads from a file): so the reference computes each unit again, and must answer the same to the last
bit. What does not fit is measured again. Keeping is help: what goes wrong here is no error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gate.distributed.plan import UnitFile
from gate.distributed.worker import JobSpec
from gate.errors import GateError
from gate.measure.job import EvaluationData
from gate.measure.work_units import FirstUnitState, ReferenceDigests, UnitResult, WorkUnit
from gate.policy.policy import Policy
from gate.records.evidence import Environment
from gate.reference.environment import describe_environment, deterministic
from gate.runtimes.selection import chosen_of
from gate.storage.digest import Digest
from gate.storage.files import private_lock
from gate.storage.record import Count, Record, Sha256

_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_OLDEST_S = 7 * 24 * 3600.0
"""Of parts that nobody went on from."""


class KeptPlan(Record):
    """What decides the numbers of all units, but for the samples themselves."""

    schema_version: Literal[1] = 1
    assignment: JobSpec
    environment: Environment
    samples: Count
    labels_sha256: Sha256 | None
    libraries: dict[str, dict[str, str]]
    """Versions of each runtime's own, by its name."""

    @classmethod
    def of(cls, assignment: JobSpec, data: EvaluationData) -> KeptPlan:
        """Of this process, with the threads that it has now."""
        with deterministic(assignment.policy.determinism) as switches:
            environment = describe_environment(switches)
        return cls(
            assignment=assignment,
            environment=environment,
            samples=len(data.samples),
            labels_sha256=data.labels_sha256,
            libraries=dict(_libraries(assignment.policy)),
        )


@dataclass
class KeptParts:
    """What is there of one check. As `gate.distributed.plan.UnitTable` it says what fits."""

    sha256: Digest
    """Of its `KeptPlan`."""
    environment: Environment
    anywhere: bool
    """Whether the policy takes other environments."""
    _lead: FirstUnitState = field(default_factory=lambda: FirstUnitState(floors={}))
    _units: dict[int, WorkUnit] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, plan: KeptPlan) -> Iterator[KeptParts | None]:
        """None where another process measures the same, or nothing can be kept here."""
        sha256 = plan.digest()
        with contextlib.ExitStack() as held:
            policy = plan.assignment.policy
            anywhere = policy.precision != "exact" or policy.environments == "any"
            kept: KeptParts | None = cls(sha256, plan.environment, anywhere)
            try:
                _sweep()
                lock = _cache() / "locks" / f"{sha256.hex}.lock"
                held.enter_context(private_lock(lock, timeout_s=0))
            except (GateError, OSError):  # filelock's Timeout is an OSError
                kept = None
            yield kept

    def digest(self) -> Digest:
        """Of what the parts belong to."""
        return self.sha256

    def unit(self, index: int) -> WorkUnit:
        """One of them, by its number."""
        return self._units[index]

    def verify(self, index: int, *, samples: Digest | None, labels: Digest | None) -> None:
        """Nothing: of a kept part the reference is asked again, on the samples as they are."""

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> set[int]:
        """Units that were measured by this lead, by their numbers."""
        self._lead, self._units = lead, {unit.index: unit for unit in units}
        if not self._is_private():
            return set()
        return {unit.index for unit in units if self._found(unit.index) is not None}

    def part(self, answers: ReferenceDigests) -> UnitResult | None:
        """The part of a unit to which the reference answers this; None: of another model, of other
        samples or labels, or it is gone."""
        part = self._found(answers.index)
        return part if part is not None and part.answers == answers else None

    def keep(self, part: UnitResult) -> None:
        """For the next check; a part in which a runtime failed is not kept, but tried again."""
        if any(track.failure is not None for track in part.runtimes.values()):
            return
        with contextlib.suppress(GateError, OSError):  # such as a full disk
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            UnitFile.of_unit(self, self._lead, part).save(self._path(part.index))

    def remove(self) -> None:
        """All of them: they were taken, or must not be used again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _found(self, index: int) -> UnitResult | None:
        path = self._path(index)
        if not path.exists():
            return None
        try:
            file = UnitFile.open(path, plan=self)
        except (GateError, KeyError):
            return None
        fits = file.unit == index and file.lead_sha256 == self._lead.digest()
        return file.part if fits and self._is_like_here(file.part) else None

    def _is_private(self) -> bool:
        """Nobody else could write there."""
        try:
            found = self._folder.stat()
        except OSError:
            return False
        return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & _OTHERS

    def _is_like_here(self, part: UnitResult) -> bool:
        """One of another machine would be refused, or is one that the policy takes."""
        return self.anywhere or part.environment == self.environment

    @property
    def _folder(self) -> Path:
        return _cache() / "parts" / self.sha256.hex

    def _path(self, index: int) -> Path:
        return self._folder / f"part-{index}.json"


def _libraries(policy: Policy) -> Iterator[tuple[str, dict[str, str]]]:
    """What a runtime can't say now, it will say as its own failure when it is measured."""
    for runtime in chosen_of(policy):
        with contextlib.suppress(Exception), contextlib.closing(runtime):
            yield runtime.name, runtime.versions()


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "parity-gate"


def _sweep() -> None:
    """Remove what nobody went on from."""
    for path in (*(_cache() / "parts").glob("*"), *(_cache() / "locks").glob("*")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLDEST_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
