"""What one unit gave, so that it goes from whoever measured it to whoever folds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pydantic import Field

from gate.parity.units.unit import Unit
from gate.records.crew import CrewRecord
from gate.records.environment import Environment
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Proof
from gate.storage.record import Count, Measured, Record, Sha256, later


class RunProof(Record):
    """What shows that a runtime ran in one process as it did in another."""

    providers_active: tuple[str, ...] = ()
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    fallback_nodes: tuple[str, ...] = ()
    session_options: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    device: str | None = None
    precision: str | None = None

    @classmethod
    def of(cls, proof: Proof) -> RunProof:
        """Without what differs by process: memory."""
        return cls(**{name: getattr(proof, name) for name in cls.model_fields})

    def anywhere(self) -> RunProof:
        """Without what another machine or version may have otherwise: that it ran by these
        providers, with these options."""
        nodes = dict.fromkeys(self.nodes_per_provider, 0)
        return self.model_copy(update={"versions": {}, "device": None, "nodes_per_provider": nodes})


class TrackPart(Record):
    """One runtime in one unit: absent, failed, or compared."""

    absent_reason: str | None = None
    failure: str | None = None
    unusable: bool = later(False)
    """As `RuntimeEvidence.unusable`."""
    proof: RunProof | None = None
    seconds: tuple[Measured, ...] = ()
    """Of its full batches, without the first one of a process, which warms up."""
    compared: Any = None
    """As `OutputComparison.state` gives it."""


class UnitAnswers(Record):
    """What the reference answered to one unit: it tells whether model and samples are the same."""

    index: Count
    start: Count
    stop: Count
    samples_sha256: Sha256
    """Of these samples, in this order."""
    labels_sha256: Sha256 | None
    """Of their labels; None: there are none."""
    answers_sha256: Sha256
    """Of all outputs of the reference, batch by batch, to the last bit."""


class UnitPart(UnitAnswers):
    """All runtimes in one unit."""

    answers_sha256: Sha256
    """Of what the reference answered: who goes on from a part proves that it still does."""
    environment: Environment
    reference_seconds: tuple[Measured, ...] = ()
    runtimes: dict[RuntimeName, TrackPart]

    @property
    def unit(self) -> Unit:
        """Which one it is."""
        return Unit(self.index, self.start, self.stop)

    @property
    def answers(self) -> UnitAnswers:
        """What the reference answered."""
        return UnitAnswers(**{name: getattr(self, name) for name in UnitAnswers.model_fields})


class LeadState(Record):
    """What the first unit gives to all others."""

    floors: dict[RuntimeName, Any]
    """By runtime, packed: `gate.parity.float64.runtime_floor.RuntimeFloor`."""
    samples_sha256: Sha256 | None = None
    """Of the samples that it was measured on, in their order."""
    labels_sha256: Sha256 | None = None
    """Of their labels; None: there are none."""


class Crew(Protocol):
    """Those who measure units elsewhere: in processes, on a cluster."""

    @property
    def record(self) -> CrewRecord:
        """Who they are."""

    def begin(self, lead: LeadState, units: Sequence[Unit]) -> LeadState:
        """Have these units measured. Returns at once, with the lead by which they are judged."""

    def parts(self) -> Iterator[UnitPart]:
        """What they gave, in any order, perhaps twice, until all are there.

        Raises the GateError of the first unit, by index, that can't be measured.
        """
