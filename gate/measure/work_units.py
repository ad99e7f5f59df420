"""Fixed ranges of whole batches, and the result of measuring one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field, JsonValue

from gate.records.evidence import Environment, FailureCode, WorkerPoolRecord
from gate.records.instruments import ReferenceValidity
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Proof
from gate.storage.record import Count, Measured, Record, Sha256, added_field

# The composition of batches and the order of sums affect the last digits of numbers. Both depend
# only on the number of samples, the batch size and the lead, so that every process that measures a
# unit gets the same numbers, in any order of units.


MAX_UNITS = 256
"""Default maximum number of units, in addition to the lead."""

_MIN_BATCHES = 4
"""Minimum number of batches per unit, which limits the overhead."""


@dataclass(frozen=True)
class WorkUnit:
    """Samples `start` to `stop` (exclusive): whole batches, except at the end of the data."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def split_into_units(
    samples: int, *, batch_size: int, lead: int, most: int = MAX_UNITS, least: int = 1
) -> tuple[WorkUnit, ...]:
    """Return the units of a data set, in order.

    The first unit is the lead: the batches of the first `lead` samples, which define the noise
    floor. `most`: maximum number of further units. `least`: a last unit with fewer samples is
    merged into the previous one.
    """
    first = min(math.ceil(lead / batch_size) * batch_size, samples)
    batches = math.ceil((samples - first) / batch_size)
    step = max(_MIN_BATCHES, math.ceil(batches / most)) * batch_size
    edges = sorted({0, *range(first, max(samples - least + 1, 0), step), samples})
    return tuple(
        WorkUnit(index, start, stop)
        for index, (start, stop) in enumerate(itertools.pairwise(edges))
    )


class RunProof(Record):
    """The fields that must be equal for a runtime in two processes."""

    providers_active: tuple[str, ...] = ()
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    fallback_nodes: tuple[str, ...] = ()
    session_options: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    device: str | None = None
    precision: str | None = None

    @classmethod
    def from_proof(cls, proof: Proof) -> RunProof:
        """Return the fields of a proof that do not depend on the process."""
        return cls(**{name: getattr(proof, name) for name in cls.model_fields})

    def anywhere(self) -> RunProof:
        """Return a copy without the fields that depend on machine and versions."""
        nodes = dict.fromkeys(self.nodes_per_provider, 0)
        return self.model_copy(update={"versions": {}, "device": None, "nodes_per_provider": nodes})


class RuntimeUnitResult(Record):
    """One runtime in one unit: absent, failed, or compared."""

    absent_reason: str | None = None
    failure: str | None = None
    failure_code: FailureCode | None = added_field(None)
    failure_params: dict[str, JsonValue] = added_field({})
    unusable: bool = added_field(False)
    """As `RuntimeEvidence.unusable`."""
    proof: RunProof | None = None
    seconds: tuple[Measured, ...] = ()
    """Times of full batches, without the first batch of the process, which warms up."""
    compared: Any = None
    """The result of `OutputComparison.state`."""


class UnitResult(Record):
    """The results of all runtimes in one unit, with digests of samples and reference outputs."""

    index: Count
    start: Count
    stop: Count
    samples_sha256: Sha256
    """Digest of the samples, in order."""
    labels_sha256: Sha256 | None
    """Digest of the labels, if any."""
    answers_sha256: Sha256
    """Digest of all outputs of the reference, batch by batch."""
    environment: Environment
    reference_seconds: tuple[Measured, ...] = ()
    metrics: Any = added_field(None)
    """The result of `gate.metrics.process.MetricRun.drain`."""
    runtimes: dict[RuntimeName, RuntimeUnitResult]

    @property
    def unit(self) -> WorkUnit:
        """The measured unit."""
        return WorkUnit(self.index, self.start, self.stop)


class FirstUnitState(Record):
    """The state that the first unit passes to all other units."""

    floors: dict[RuntimeName, Any]
    """Serialized `gate.measure.noise_floor.NoiseFloor`, by runtime."""
    samples_sha256: Sha256 | None = None
    """Digest of the measured samples, in order."""
    labels_sha256: Sha256 | None = None
    """Digest of the labels, if any."""
    validity: ReferenceValidity = added_field(ReferenceValidity())
    """Validity of the float64 reference and of random rounding."""


class UnitWorkers(Protocol):
    """Workers that measure units in other processes or on a cluster."""

    @property
    def record(self) -> WorkerPoolRecord:
        """The record of the worker processes."""

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """Start to measure these units, and return immediately with the state that they use."""

    def parts(self) -> Iterator[UnitResult]:
        """Yield the results of all units, in any order and possibly with duplicates.

        Raises the GateError of the first unit, by index, that can't be measured.
        """
