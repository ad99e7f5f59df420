"""How the versions of a model are read: within which limits, and what is remembered of it.

In one place, because a service keeps it over all looks, and a command for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gate.bounded.limits import ChildLimits
from gate.registry.doubts import Doubts
from gate.registry.history import Histories


@dataclass(frozen=True)
class Reading:
    """Of one command; of a service it is the same in each look."""

    limits: ChildLimits = field(default_factory=ChildLimits.of_service)
    """Within which a child process reads and runs the files of versions."""
    doubts: Doubts = field(default_factory=Doubts)
    """Downloads that were not what they should be, and that nothing confirmed yet."""
    histories: Histories = field(default_factory=Histories)
    """Of whoever looks again and again."""
