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

# What a batch holds changes numbers in their last digits, and so does the order of sums. Both are
# fixed here, by the number of samples, the batch size and the lead alone: every process that
# measures a unit, in any order, gets the same numbers.


MOST = 256
"""Units in addition to the lead, unless the caller sets another number."""

_LEAST = 4
"""Batches of a unit, so that what one costs by itself is little."""


@dataclass(frozen=True)
class WorkUnit:
    """Samples `start` to `stop`, whole batches but for the last one of all."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def split_into_units(
    samples: int, *, batch_size: int, lead: int, most: int = MOST, least: int = 1
) -> tuple[WorkUnit, ...]:
    """The units of a data set, in order; together they are all samples.

    The first is the lead: the batches of the first `lead` samples, by whose noise floor the others
    are judged. `most`: further units. `least`: a last unit with fewer samples is joined to the
    unit before.
    """
    first = min(math.ceil(lead / batch_size) * batch_size, samples)
    batches = math.ceil((samples - first) / batch_size)
    step = max(_LEAST, math.ceil(batches / most)) * batch_size
    edges = sorted({0, *range(first, max(samples - least + 1, 0), step), samples})
    return tuple(
        WorkUnit(index, start, stop)
        for index, (start, stop) in enumerate(itertools.pairwise(edges))
    )


class RunProof(Record):
    """The fields that show that a runtime ran alike in two processes."""

    providers_active: tuple[str, ...] = ()
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    fallback_nodes: tuple[str, ...] = ()
    session_options: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    device: str | None = None
    precision: str | None = None

    @classmethod
    def of(cls, proof: Proof) -> RunProof:
        """Return the fields of a proof that do not differ by process, as memory does."""
        return cls(**{name: getattr(proof, name) for name in cls.model_fields})

    def anywhere(self) -> RunProof:
        """Return a copy without what depends on machine and versions.

        Providers and options stay.
        """
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
    """Of its full batches, without the first one of a process, which warms up."""
    compared: Any = None
    """As `OutputComparison.state` gives it."""


class UnitResult(Record):
    """All runtimes in one unit, and digests that show whether model and samples are the same."""

    index: Count
    start: Count
    stop: Count
    samples_sha256: Sha256
    """Of these samples, in this order."""
    labels_sha256: Sha256 | None
    """Of their labels; None: there are none."""
    answers_sha256: Sha256
    """Of all outputs of the reference, batch by batch, to the last bit."""
    environment: Environment
    reference_seconds: tuple[Measured, ...] = ()
    metrics: Any = added_field(None)
    """As `gate.metrics.process.MetricRun.drain` gives it."""
    runtimes: dict[RuntimeName, RuntimeUnitResult]

    @property
    def unit(self) -> WorkUnit:
        """The measured unit."""
        return WorkUnit(self.index, self.start, self.stop)


class FirstUnitState(Record):
    """The state that the first unit passes to all other units."""

    floors: dict[RuntimeName, Any]
    """By runtime, packed: `gate.measure.noise_floor.NoiseFloor`."""
    samples_sha256: Sha256 | None = None
    """Of the samples that it was measured on, in their order."""
    labels_sha256: Sha256 | None = None
    """Of their labels; None: there are none."""
    validity: ReferenceValidity = added_field(ReferenceValidity())
    """Of the float64 reference and of random rounding."""


class UnitWorkers(Protocol):
    """Those who measure units elsewhere: in processes, on a cluster."""

    @property
    def record(self) -> WorkerPoolRecord:
        """The record of the processes that measure the units."""

    def begin(self, lead: FirstUnitState, units: Sequence[WorkUnit]) -> FirstUnitState:
        """Have these units measured. Returns at once, with the lead by which they are judged."""

    def parts(self) -> Iterator[UnitResult]:
        """Yield the results of the units, in any order, some perhaps twice, until all are there.

        Raises the GateError of the first unit, by index, that can't be measured.
        """
