"""The champion: the version that serves now, its proven file, and what was recorded of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.incumbent import Incumbent
from gate.records.trend import Trend
from gate.storage.digest import Digest

ChampionState = Literal["proven", "first", "unvouched", "unrecorded", "unavailable"]
"""`first`: no version serves; `unvouched`: no line of the ledger says that the gate passed what
serves; `unrecorded`: it has no evidence; `unavailable`: the registry does not give it now."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """`state`: whether all of it is there; `absent` says why not."""

    state: ChampionState
    absent: str | None = None
    version: str | None = None
    sha256: Digest | None = None
    """Of the file, by the ledger."""
    onnx_path: Path | None = None
    """The file, which has this digest, as long as its folder is there."""
    evidence: Evidence | None = None
    """With the digest that the ledger has."""
    decision: Decision | None = None
    """On that evidence, by the policy that the ledger names, as it lay beside the file: there to
    be looked at. None: there is none."""
    trend: Trend = field(default_factory=Trend)
    """Up to and with this version, as it lay beside the file."""
    incumbent: Incumbent | None = None
    """What came of running it beside the new file; None: nobody did."""

    @classmethod
    def unavailable(cls, reason: str) -> Champion:
        """Of which nothing can be said now."""
        return cls(state="unavailable", absent=reason)
