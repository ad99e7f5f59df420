"""What the service needs of whoever puts a registered model right.

Events are hints: they say that something may have changed, never what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["guard", "hand_in", "review", "deploy"]


@dataclass(frozen=True)
class Taken:
    """Something that was done. `outcome` is a short word for the metrics: `promoted`, `reverted`,
    `deployed`, `refused`, ..."""

    kind: Kind
    outcome: str
    version: str | None
    reason: str


@dataclass(frozen=True)
class Failed:
    """A step that could not be done now: try again later. It kept no other from its work."""

    kind: Kind | Literal["look"]
    """`look`: none could be begun."""
    error: Exception


class Reconcile(Protocol):
    """Reads a registered model anew and brings it, and what is deployed of it, into the state that
    its evidence allows. Idempotent; two at once for one model wait for each other."""

    def __call__(self, model: str, *, cause: str) -> Sequence[Taken | Failed]:
        """`cause`: for the ledger: `delivery <id>`, `timer`, or who called.

        Raises GateError where no step could be begun now: try again later.
        """
        ...
