"""A release: a judged file, its twin, the MLflow run; and what came of promoting it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from gate.bounded.limits import ChildLimits
from gate.errors import EvidenceError
from gate.golden.folder import files_of
from gate.ledger.entry import ComparedWith, TwinDigests
from gate.policy.policy import Policy
from gate.records.trend import Trend
from gate.registry.judged import Judged
from gate.registry.port import GOLDEN, Draft, Tag
from gate.registry.twin import digests_of, verify_origin
from gate.storage.digest import Digest
from gate.storage.quota import Extent

Outcome = Literal[
    "promoted", "passed", "handed_in", "unchanged", "refused", "dry_run", "rolled_back"
]


@dataclass(frozen=True, kw_only=True)
class Release(Judged):
    """A judged file, and its quantized twin where the policy names one.

    `description`: Markdown for the registry; the first line is one plain sentence.
    """

    model_name: str
    run_id: str
    description: str
    twin: Judged | None = None
    trend: Trend = field(default_factory=Trend)
    """Of the releases before this one."""
    signers: tuple[str, ...] = ()
    """Ids of the keys that were proven to vouch for the verdict, for the ledger; whoever promotes
    fills them in."""
    measured_by: tuple[str, ...] = ()
    """The same of further keys that signed what was measured."""

    def verify(self, policy: Policy, *, limits: ChildLimits | None = None) -> None:
        """Prove that all of it belongs together, the twin too.

        Raises DigestMismatch and EvidenceError, as `Judged.verify`; EvidenceError for a twin that
        the policy does not name, or names and is not there, or is of another model, and as
        `verify_origin`.
        """
        super().verify(policy, limits=limits)
        if self.twin is None and policy.twin is None:
            return
        if self.twin is None or policy.twin is None:
            there = "no quantized twin" if self.twin is None else "a quantized twin"
            names = "names one" if policy.twin is not None else "names none"
            raise EvidenceError(
                f"the release has {there}, the policy {names} (gate.twin). Give both or neither."
            )
        self.twin.verify(policy.twin, limits=limits)
        verify_origin(self.twin, exact=self, limits=limits)
        ours, its = (
            (source.factory, source.checkpoint_sha256, source.preprocess_sha256)
            for source in (self.evidence.source, self.twin.evidence.source)
        )
        if ours != its:
            raise EvidenceError(
                f"the twin was measured against the model {its[0]} with checkpoint {its[1]} and "
                f"preprocessing {its[2]}, the file against {ours[0]}, {ours[1]}, {ours[2]}. "
                "Measure both against the same model."
            )
        exact, quantized = self.evidence.source.code, self.twin.evidence.source.code
        if exact is not None and quantized is not None and exact != quantized:
            raise EvidenceError(
                "the model's code is not the same in the twin's evidence: "
                f"{', '.join(quantized.changes_since(exact))}. Measure both again."
            )

    @property
    def refusal(self) -> str | None:
        """Why it must not be promoted; None where every decision is a PASS."""
        if self.why_not is not None:
            return self.why_not
        if self.twin is not None and self.twin.why_not is not None:
            return f"the quantized twin: {self.twin.why_not}"
        return None

    def untimely(self, policy: Policy, *, at: datetime) -> str | None:
        """As of what it is made of, the twin too."""
        late = None if self.twin is None else self.twin.untimely(policy, at=at)
        return super().untimely(policy, at=at) or (late and f"the quantized twin: {late}")

    def outdated(self) -> str | None:
        """Look at the model's source files: why the evidence is on other code than there is here;
        None where it is the same, and where the code is not at hand."""
        from gate.model.modules import changed_files

        code = self.evidence.source.code
        changed = () if code is None else changed_files(code)
        if not changed:
            return None
        return (
            f"the model's code changed since it was measured: {', '.join(changed)}. "
            "Measure the file again (make repro, or gate check --report)."
        )

    @property
    def twin_digests(self) -> TwinDigests | None:
        """What the ledger notes of the twin."""
        return None if self.twin is None else digests_of(self.twin)

    @property
    def compared_with(self) -> ComparedWith | None:
        """What the ledger notes of the version that it was compared with."""
        return ComparedWith.of(self.decision)

    @property
    def preprocess_sha256(self) -> Digest | None:
        """Digest of the preprocessing spec that goes with the file."""
        return None if self.preprocessing is None else self.evidence.source.preprocess_sha256

    @property
    def extent(self) -> Extent:
        """How much it is, the twin and the golden vectors included; records are small."""
        parts = [self] if self.twin is None else [self, self.twin]
        golden = [part.golden.golden for part in parts if part.golden is not None]
        subjects = [part.evidence.subject for part in parts]
        return Extent(
            size_bytes=sum(each.size_bytes for each in subjects)
            + sum(each.size_bytes for each in golden),
            files=sum(1 + len(each.external_data) for each in subjects)
            + sum(len(files_of(each)) for each in golden),
        )

    def draft(self) -> Draft:
        """The version that this release becomes."""
        decision = self.decision
        tags = {
            Tag.VERDICT: str(decision.verdict),
            Tag.SHA256: decision.subject_sha256.hex,
            Tag.POLICY: decision.policy_sha256.hex,
            Tag.EVIDENCE: decision.evidence_sha256.hex,
            Tag.RUNTIMES: ",".join(decision.runtimes),
        }
        if decision.waived:
            tags[Tag.WAIVED] = ",".join(check.title for check in decision.waived)
        if self.twin is not None:
            tags[Tag.TWIN] = self.twin.decision.subject_sha256.hex
        if self.preprocess_sha256 is not None:
            tags[Tag.PREPROCESS] = self.preprocess_sha256.hex
        if self.compared_with is not None:
            tags[Tag.COMPARED_WITH] = self.compared_with.record_sha256.hex
        beside = {}
        if self.golden is not None:
            tags[Tag.GOLDEN] = self.golden.sha256.hex
            beside = {GOLDEN: self.golden.path}
        return Draft(
            self.onnx_path, self.evidence.subject, self.run_id, tags, self.description, beside
        )


@dataclass(frozen=True)
class Promotion:
    """What came of it. `version` serves now (refused: what the answer is about, if anything)."""

    outcome: Outcome
    version: str | None
    previous_version: str | None
    reason: str
    signers: tuple[str, ...] = ()
    """Ids of the keys that vouch for the verdict; none: nobody was asked to sign, or nothing was
    tried."""
