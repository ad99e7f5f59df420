"""The release that options name: read from the folders that gate check --report wrote."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gate.errors import EvidenceError, PolicyError, Untrusted
from gate.records.names import DECISION, EVIDENCE, GOLDEN, POLICY

if TYPE_CHECKING:
    from gate.attestation.keys import PublicKey
    from gate.attestation.statements import Statements
    from gate.attestation.trust import Trust
    from gate.decision.decision import Decision
    from gate.policy.policy import Policy, Task
    from gate.registry.judged import GoldenFolder, Judged
    from gate.registry.registered_model import RegisteredModel
    from gate.registry.release import Release
    from gate.registry.signatures import MeasuredFile, VerdictSigning


@dataclass(frozen=True)
class ReportOf:
    """A file, and the folder of the report about it."""

    onnx_path: Path
    folder: Path
    golden: Path | None = None
    """Other vectors than those of the report."""

    def judged(self) -> Judged:
        """With what lies in the folder, of which nothing is proven; without its statements. Raises
        EvidenceError, DigestMismatch, StorageError."""
        from gate.decision.decision import Decision
        from gate.records.evidence import Evidence
        from gate.registry.judged import Judged

        return Judged(
            onnx_path=self.onnx_path,
            evidence=Evidence.load(self.folder / EVIDENCE),
            decision=Decision.load(self.folder / DECISION),
            golden=self._golden(),
        )

    def statements(self) -> Statements:
        """Those in the folder. Raises Untrusted, StorageError."""
        from gate.attestation.statements import Statements

        return Statements.beside(self.folder)

    def measured(self, statements: Statements) -> MeasuredFile:
        """What was signed when it was measured."""
        from gate.registry.signatures import MeasuredFile

        return MeasuredFile(statements.evidence, self.folder / GOLDEN)

    def policy(self, decision: Decision) -> Policy:
        """That of the report, as it was applied, else the built-in one, if the decision was made by
        it. Raises PolicyError."""
        from gate.policy.policy import Policy

        tasks: tuple[Task, ...] = ("auto", "classification", "tensors")
        built_in = [make(task=task) for make in (Policy.default, Policy.reduced) for task in tasks]
        with suppress(EvidenceError, OSError):  # older reports have none
            built_in.insert(0, Policy.from_json((self.folder / POLICY).read_bytes()))
        fitting = [policy for policy in built_in if policy.digest() == decision.policy_sha256]
        if not fitting:
            raise PolicyError(
                f"the decision was made by a policy with digest {decision.policy_sha256.short}, "
                f"which is neither {self.folder / POLICY} nor one of the built-in ones. Name its "
                "file with --policy."
            )
        return fitting[0]

    def _golden(self) -> GoldenFolder | None:
        """Those that were named, else those of the report; older reports have none."""
        from gate.golden.folder import GOLDEN_JSON
        from gate.registry.judged import GoldenFolder

        beside = self.folder / GOLDEN
        if self.golden is None and not (beside / GOLDEN_JSON).exists():
            return None
        return GoldenFolder.open(self.golden or beside)


@dataclass(frozen=True)
class Vouched:
    """Bringing the statements of reports to a release, for the model that it is promoted as."""

    model: RegisteredModel
    trust: Trust
    report: ReportOf
    twin: ReportOf | None = None

    def release(
        self, release: Release, policy: Policy, *, signing: VerdictSigning | None
    ) -> tuple[Release, tuple[PublicKey, ...]]:
        """The release with statements that the trust believes, and who signed the verdict.

        A verdict on this very decision that is signed for another model, for none, or without the
        twin is signed anew, if there is a key whose word counts (`signing`). Raises Untrusted where
        that is not enough.
        """
        from gate.registry.signatures import verify_signatures

        release = replace(release, statements=self.report.statements())
        if release.twin is not None and self.twin is not None:
            statements = self.twin.statements()
            release = replace(release, twin=replace(release.twin, statements=statements))
        names = self.model.identities()
        try:
            return release, verify_signatures(release, trust=self.trust, registries=names)
        except Untrusted:
            self._verify_decisions(release)
            if signing is None or not signing.is_trusted:
                raise
        release = self._signed(release, policy, signing)
        return release, verify_signatures(release, trust=self.trust, registries=names)

    def _verify_decisions(self, release: Release) -> None:
        """That the statements are about these decisions, whatever they are for."""
        from datetime import UTC, datetime

        for judged in (release, release.twin):
            if judged is not None and judged.statements is not None:
                judged.statements.verify(
                    judged.evidence, judged.decision, trust=self.trust, now=datetime.now(UTC)
                )

    def _signed(self, release: Release, policy: Policy, signing: VerdictSigning) -> Release:
        twin = release.twin
        assert release.statements is not None  # by release
        return signing.sign(
            release,
            policy,
            measured=self.report.measured(release.statements),
            twin=self.twin.measured(twin.statements)
            if self.twin is not None and twin is not None and twin.statements is not None
            else None,
        )
