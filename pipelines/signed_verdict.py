"""The signed verdict of the stage `promote`, or the reason why it is not signed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gate.commands.promote import refuse_release, submit_or_promote, uses_submission
from gate.errors import Untrusted
from gate.ledger.entry import plain
from gate.policy.policy import Policy
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.verdict_signing import MeasuredFile, VerdictSigning
from gate.registry.verify_release import verify_release
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust
from gate.storage import files
from pipelines import paths, signing, twin_files


@dataclass(frozen=True)
class SignedVerdict:
    """A release. It has signed statements if trusted keys signed its measurements."""

    model: RegisteredModel
    release: Release
    policy: Policy
    trust: Trust
    refusal: str | None = None
    """Why nothing was signed."""
    signed_by: str | None = None
    """Name and short id of the signing key."""
    word: str | None = None
    """A sentence about the signature. It says whether the key is the project's own."""

    @classmethod
    def from_release(
        cls, release: Release, policy: Policy, model: RegisteredModel
    ) -> SignedVerdict:
        """Sign the verdict for this model in its registry, and write reports/decision.dsse.json.

        Nothing is signed if trusted keys did not sign the measurements. Raises KeyUnusable,
        StorageError.
        """
        local, who = signing.local_keys(), signing.signatory()
        trust = local.trust()
        resource = resource_uri(plain(model.registry.identity), model.name)
        paths.DECISION_STATEMENT.unlink(missing_ok=True)
        try:
            signed = VerdictSigning(who, trust, resource).sign(
                release,
                policy,
                measured=MeasuredFile(
                    signing.measured_statement(paths.EVIDENCE_STATEMENT), paths.GOLDEN
                ),
                twin=None
                if release.twin is None
                else MeasuredFile(
                    signing.measured_statement(twin_files.STATEMENT), twin_files.VECTORS
                ),
            )
        except Untrusted as error:
            return cls(model, release, policy, trust, refusal=str(error))
        assert signed.statements is not None  # ensured by sign
        files.write_bytes(paths.DECISION_STATEMENT, signed.statements.decision.data)
        key = who.key.public
        word = local.describe_signer(key)
        return cls(model, signed, policy, trust, signed_by=key.label, word=word)

    def promote(self, *, run_id: str, description: str) -> PromotionResult:
        """Promote, submit or reject the release, as the policy requires.

        Raises the exceptions of `gate.commands.promote.submit_or_promote`.
        """
        submits = uses_submission(self.policy, None)
        release = replace(self.release, run_id=run_id, description=description)
        if self.refusal is not None:
            return refuse_release(self.model, release, self.refusal, submits=submits)
        try:
            verified = verify_release(
                release,
                policy=self.policy,
                trust=self.trust,
                registries=self.model.identities(),
            )
        except Untrusted as error:
            return refuse_release(self.model, release, str(error), submits=submits)
        return submit_or_promote(self.model, verified, submits=submits)
