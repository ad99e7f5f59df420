"""Who measured, where it was not one process alone: apart, because no number depends on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gate.records.environment import Environment
from gate.storage.record import Count, Record, later


class CrewRecord(Record):
    """How the samples were shared out. The numbers do not depend on it."""

    engine: Literal["processes", "parts", "ray"]
    workers: Annotated[int, Field(ge=1)]
    """Processes that were asked for; of parts, those that were merged."""
    earlier: Count = later(0)
    """Units that an earlier check had measured, which was broken off: the reference answered the
    same again, to the last bit."""
    environments: tuple[Environment, ...] = ()
    """Machines and libraries of workers, where they are not those of the evidence."""
