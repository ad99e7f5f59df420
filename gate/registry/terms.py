"""Terms: whoever decides what serves judges the evidence beside a version by its own policy, trust
and clock, and with the comparison that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.attestation.trust import Trust
from gate.decision.decision import Decision, decide
from gate.errors import EvidenceError, Untrusted
from gate.ledger.entry import LedgerEntry, TwinDigests
from gate.ledger.history import History
from gate.policy.policy import Policy
from gate.records.incumbent import Incumbent
from gate.registry.comparison.compared import verify_comparison
from gate.registry.judged import Judged, moment
from gate.registry.records import Records
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED, twin_in
from gate.registry.vouching import named_beside, verify_statements
from gate.storage.digest import Digest
from gate.storage.foreign import mismatch_of

ReadTrust = Callable[[], Trust | None]
"""Whose word counts at this moment; None: no statements are asked for. Raises PolicyError where
nobody can say now."""


def nobody() -> None:
    """No statements are asked for."""


@dataclass(frozen=True)
class Terms:
    """Whoever decides what serves judges by these: its own policy, its own trust, and the moment of
    the promotion, at which evidence and statements had to be young enough."""

    policy: Policy
    at: datetime
    trust: Trust | None = None
    approved: Digest | None = None
    """The decision whose approval reviewers have signed, as whoever judges has found; None: he has
    not looked."""

    @classmethod
    def now(
        cls, policy: Policy, trust: ReadTrust = nobody, *, approved: Digest | None = None
    ) -> Terms:
        """Of a promotion at this moment. Raises as `ReadTrust`."""
        return cls(policy, datetime.now(UTC), trust(), approved)

    @classmethod
    def of(
        cls, policy: Policy, history: History, version: str, *, trust: ReadTrust = nobody
    ) -> Terms | None:
        """Of a version that the ledger says was promoted. None: the service judged and deployed it
        then, and neither age nor another policy or trust takes it out of service. Raises as
        `ReadTrust`, which is asked for no other version."""
        line, present = history.promotion_of(version), datetime.now(UTC)
        if history.was_deployed(version):
            return None
        promoted = moment(line.at) if line is not None else None
        return cls(policy, present if promoted is None else min(promoted, present), trust())


def judge(path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms) -> str | None:
    """Why the evidence beside a proven file does not allow it under these terms, or None. What was
    decided by another policy is decided anew.

    Raises DigestMismatch and EvidenceError where file and records do not belong together, or can't
    be read; LimitExceeded where reading takes too much; StorageError where this machine can't.
    """
    try:
        with mismatch_of(f"version {vouched.version} of {model.name} in the registry"):
            return _judge(path, model, vouched=vouched, terms=terms)
    except Untrusted as error:
        raise EvidenceError(str(error)) from error


def _judge(path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms) -> str | None:
    records = Records.beside(path, evidence=vouched.evidence_sha256)
    assert vouched.sha256 is not None
    records.evidence.subject.sha256.verify(vouched.sha256, what="the file that passed")
    verify_comparison(records.decision, vouched.compared_with)
    if terms.approved is not None:
        terms.approved.verify(records.decision.digest(), what="the decision that was approved")
    release = release_beside(path, records, name=model.name, twin=vouched.twin)
    if terms.trust is not None:
        _verify_word(release, model, vouched=vouched, trust=terms.trust, at=terms.at)
    policy, passed_by = terms.policy, release.decision.policy_sha256
    compared = release.decision.incumbent or vouched.incumbent
    if policy.incumbent is not None and compared is None:
        return (
            "nobody compared it with the version that served when it was promoted, and the policy "
            "in force asks for that (incumbent). Hand it in again, or promote it anew."
        )
    if passed_by != policy.digest() or release.decision.incumbent != compared:
        release = _decided_anew(release, policy, compared)
    release.verify(policy, limits=model.reading.limits)
    if release.refusal is not None and vouched.incumbent is not None:
        return f"compared by the service with what serves, its decision is {release.refusal}"
    if release.refusal is not None and passed_by != policy.digest():
        return (
            f"it was judged by another policy ({passed_by.short}) than the one in force "
            f"({policy.digest().short}), by which its decision is {release.refusal} "
            "Promote what passes by the policy in force."
        )
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    return release.untimely(policy, at=terms.at)


def _verify_word(
    release: Release, model: RegisteredModel, *, vouched: LedgerEntry, trust: Trust, at: datetime
) -> None:
    """Trusted keys vouch for it, in this registry. What the ledger promoted before anybody had to
    sign may go without, where the operator says so. Raises Untrusted."""
    number, history = vouched.version, model.history()
    if (
        trust.unsigned == "accept_existing"
        and vouched.action != "passed"
        and number is not None
        and history.predates_signing(number)
    ):
        return
    files, registries = named_beside(vouched), model.identities()
    verify_statements(release, files=files, trust=trust, registries=registries, now=at)


def release_beside(path: Path, records: Records, *, name: str, twin: TwinDigests | None) -> Release:
    """What a downloaded version is made of, but for the golden vectors of the exact file. Raises as
    `twin_in`."""
    beside = path.parent / QUANTIZED
    return Release(
        model_name=name,
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        run_id="",
        description="",
        # What the ledger does not name was put there afterwards, and is not read.
        twin=twin_in(beside, twin) if twin is not None and beside.is_dir() else None,
    )


def _decided_anew(release: Release, policy: Policy, compared: Incumbent | None) -> Release:
    """By the policy in force, and with the comparison that counts: what the decision beside the
    version left open for the service is no other decision."""
    twin = release.twin
    if twin is not None and policy.twin is not None:
        # The golden vectors are of the policy that passed it; the ledger has their digest.
        twin = replace(twin, decision=_decision(twin, policy.twin), golden=None)
    return replace(release, decision=_decision(release, policy, compared), twin=twin)


def _decision(judged: Judged, policy: Policy, compared: Incumbent | None = None) -> Decision:
    at = judged.decision.decided_at
    return decide(policy, judged.evidence, incumbent=compared, decided_at=at)
