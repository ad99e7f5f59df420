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
"""`first`: no version serves; `unvouched`: neither a ledger entry nor a trusted statement shows
that the serving file passed the gate; `unrecorded`: it has no evidence; `unavailable`: the registry
can't provide it now."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The serving version. `state`: whether it is complete; `absent`: why not."""

    state: ChampionState
    absent: str | None = None
    version: str | None = None
    sha256: Digest | None = None
    """Digest of the file in the ledger."""
    onnx_path: Path | None = None
    """The file with this digest, while its folder exists."""
    evidence: Evidence | None = None
    """The evidence with the digest in the ledger."""
    decision: Decision | None = None
    """The decision on that evidence by the policy in the ledger, as stored with the file. Only
    displayed. None if there is none."""
    trend: Trend = field(default_factory=Trend)
    """The trend up to this version, as stored with the file."""
    incumbent: ChampionComparison | None = None
    """The result of running both files on the same samples. None if not run."""

    def compared_by(self, policy: Policy) -> ChampionComparison | None:
        """Return the comparison that a decision by this policy uses.

        None if the state is "unvouched" and the service will compare the files itself.
        """
        if self.state == "unvouched" and policy.promotion == "by_service":
            return None
        return self.incumbent

    @property
    def incomparable(self) -> IncumbentState:
        """The state to record if no comparison is possible."""
        if self.state in ("first", "unvouched", "unrecorded"):
            return self.state
        return "incomparable"

    def record_fields(self, evidence: Evidence) -> dict[str, Any]:
        """Return the fields of a `ChampionComparison` that need no comparison of the two files.

        They are read from the records of both. `evidence`: of the new file.
        """
        fields: dict[str, Any] = {
            "version": self.version,
            "sha256": self.sha256,
            "subject_sha256": evidence.subject.sha256,
            "data_sha256": evidence.dataset.sha256,
            "noise_ratio": TrendRow.from_evidence(evidence).noise_ratio,
        }
        if self.evidence is not None:
            fields["evidence_sha256"] = self.evidence.digest()
            fields["champion_noise_ratio"] = TrendRow.from_evidence(self.evidence).noise_ratio
        return fields

    @classmethod
    def unavailable(cls, reason: str) -> Champion:
        """Return a champion that can't be compared now, with the reason."""
        return cls(state="unavailable", absent=reason)
