"""What all runtimes have in common: they compute a batch, and prove where they computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gate.parity.statistics.output import Array

Batch = Mapping[str, Array]
"""Arrays by the names of the samples, shape (batch, ...)."""


@dataclass(frozen=True)
class Proof:
    """Where a runtime ran and with which options; fields as in
    `gate.records.evidence.RuntimeEvidence`."""

    providers_active: tuple[str, ...] = ()
    nodes_per_provider: dict[str, int] = field(default_factory=dict)
    fallback_nodes: tuple[str, ...] = ()
    session_options: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """One runtime with a model in it."""

    def run(self, batch: Batch) -> list[Array]:
        """Compute all outputs, on the host, in the file's order. May raise anything."""
        ...

    def proof(self) -> Proof:
        """What is known after the runs."""
        ...
