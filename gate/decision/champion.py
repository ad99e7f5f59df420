"""The serving version: verified file and records."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gate.decision.decide import Decision
from gate.policy.policy import Policy
from gate.records.champion_comparison import ChampionComparison, IncumbentState, Trend, TrendRow
from gate.records.evidence import Evidence
from gate.storage.digest import Digest

ChampionState = Literal["proven", "first", "unvouched", "unrecorded", "unavailable"]
"""`first`: no version serves; `unvouched`: neither a line of the ledger says that the gate passed
what serves, nor a statement that is believed here; `unrecorded`: it has no evidence; `unavailable`:
the registry does not give it now."""


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
    incumbent: ChampionComparison | None = None
    """What came of running it beside the new file; None: nobody did."""

    def compared_by(self, policy: Policy) -> ChampionComparison | None:
        """What a decision by this policy takes of it: nothing where nobody here can say what
        serves, and the service, which can, is going to compare."""
        if self.state == "unvouched" and policy.promotion == "by_service":
            return None
        return self.incumbent

    @property
    def incomparable(self) -> IncumbentState:
        """The state of a comparison that nobody can make: what the registry does not give is no
        comparison."""
        if self.state in ("first", "unvouched", "unrecorded"):
            return self.state
        return "incomparable"

    def fields_beside(self, evidence: Evidence) -> dict[str, Any]:
        """Of an `Incumbent`: what the records of both say, whether they are compared or not.
        `evidence`: on the new file."""
        fields: dict[str, Any] = {
            "version": self.version,
            "sha256": self.sha256,
            "subject_sha256": evidence.subject.sha256,
            "data_sha256": evidence.dataset.sha256,
            "noise_ratio": TrendRow.of(evidence).noise_ratio,
        }
        if self.evidence is not None:
            fields["evidence_sha256"] = self.evidence.digest()
            fields["champion_noise_ratio"] = TrendRow.of(self.evidence).noise_ratio
        return fields

    @classmethod
    def unavailable(cls, reason: str) -> Champion:
        """Of which nothing can be said now."""
        return cls(state="unavailable", absent=reason)
