"""A verdict by its statement: whose word it is, on which bytes, and whether it comes out again.

Needs files only: no torch, no MLflow, no ONNX Runtime, no network. Everything that is wrong is
found, not only the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from gate.attestation.envelope import SignedStatement
from gate.attestation.files import model_files, verify_golden_files, verify_model
from gate.attestation.keys import PublicKey
from gate.attestation.statements import (
    summary_in,
    verify_files,
    verify_measurement,
    verify_resource,
)
from gate.attestation.subjects import GOLDEN, PREPROCESSING
from gate.attestation.summary import Summary
from gate.attestation.trust import Trust
from gate.decision.decision import decide
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.storage.digest import Digest

Check = Literal[
    "signature", "result", "model", "resource", "evidence", "measurement", "policy", "decision",
    "golden", "preprocessing",
]  # fmt: skip
_WHAT = "the statement on the decision"


@dataclass(frozen=True)
class Beside:
    """What a statement is held against. None: it is not looked at."""

    model: Path
    registered: tuple[frozenset[str], str] | None = None
    """Addresses of the registry, and the name of the model there."""
    evidence: Evidence | None = None
    measurement: SignedStatement | None = None
    """The statement on the evidence."""
    policy: Policy | None = None
    golden: Path | None = None
    preprocessing: Digest | None = None
    """Of the spec's canonical JSON."""


@dataclass(frozen=True)
class Verified:
    """What came of looking. Only `trusted` says that all is well."""

    trusted: bool
    """A trusted measurer signed it, all that was looked at is what it names, and it PASSED."""
    summary: Summary | None
    """What the statement says; of a statement that is not trusted, nobody's word. None: it is no
    verdict."""
    signers: tuple[PublicKey, ...] = ()
    """Trusted keys that signed it."""
    checked: tuple[Check, ...] = ()
    """What was looked at, and is well."""
    unchecked: tuple[str, ...] = ()
    """Subjects that were not looked at: nobody brought them."""
    problems: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "trusted": self.trusted,
            "statement": self.summary and self.summary.to_plain(),
            "signers": [{"name": key.name, "key_id": key.key_id} for key in self.signers],
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "problems": list(self.problems),
        }


def verify_verdict(
    signed: SignedStatement, beside: Beside, *, trust: Trust, now: datetime
) -> Verified:
    """Look at a verdict's statement and at what lies beside it.

    Raises StorageError where a file can't be read: then nothing was found out.
    """
    try:
        summary = summary_in(signed)
    except Untrusted as error:
        return Verified(trusted=False, summary=None, problems=(str(error),))
    look = _Look(signed, summary, beside)
    checked: list[Check] = []
    problems: list[str] = []
    signers: tuple[PublicKey, ...] = ()
    for check in look.wanted():
        try:
            if check == "signature":
                signers = trust.signers(
                    signed, role="measurers", made_at=summary.time_verified, now=now, what=_WHAT
                )
            elif check == "measurement":
                look.measurement(trust, now)
            else:
                getattr(look, check)()
        except (Untrusted, DigestMismatch, EvidenceError) as error:
            problems.append(str(error))
        else:
            checked.append(check)
    return Verified(
        trusted=not problems and bool(signers),
        summary=summary,
        signers=signers,
        checked=tuple(checked),
        unchecked=look.left(),
        problems=tuple(problems),
    )


class _Look:
    """One method a check, by its name; each raises what is wrong."""

    def __init__(self, signed: SignedStatement, summary: Summary, beside: Beside) -> None:
        self._signed, self._summary, self._beside = signed, summary, beside
        self._files: tuple[str, ...] = ()

    def wanted(self) -> Iterator[Check]:
        """What can be looked at."""
        beside = self._beside
        yield from ("signature", "result", "model")
        if beside.registered is not None:
            yield "resource"
        if beside.evidence is not None:
            yield "evidence"
            if beside.measurement is not None:
                yield "measurement"
        if beside.policy is not None:
            yield "policy"
            if beside.evidence is not None and self._policy() is not None:
                yield "decision"
        if beside.golden is not None:
            yield "golden"
        if beside.preprocessing is not None:
            yield "preprocessing"

    def left(self) -> tuple[str, ...]:
        """Subjects that nobody brought."""
        brought = {*(self._files or model_files(self._signed))}
        brought |= {GOLDEN} if self._beside.golden is not None else set()
        brought |= {PREPROCESSING} if self._beside.preprocessing is not None else set()
        names = (each.name or "a subject without a name" for each in self._signed.statement.subject)
        return tuple(name for name in names if name not in brought)

    def result(self) -> None:
        if self._summary.verification_result != "PASSED":
            raise Untrusted(
                f"the verdict is {self._summary.verification_result}: the file was rejected, or "
                "could not be judged. Its report says why; take another version."
            )

    def model(self) -> None:
        self._files = verify_model(self._signed, self._beside.model, model=self._summary.model)

    def resource(self) -> None:
        assert self._beside.registered is not None
        registries, name = self._beside.registered
        verify_resource(self._summary, registries=registries, model=name)

    def evidence(self) -> None:
        evidence, summary = self._beside.evidence, self._summary
        assert evidence is not None
        named = [each.sha256 for each in summary.input_attestations]
        if named != [evidence.digest().hex] or evidence.subject.sha256 != summary.model:
            raise Untrusted(
                f"the verdict was made on evidence {', '.join(map(str, named))} of "
                f"{summary.model}, this is {evidence.digest().hex} of {evidence.subject.sha256}. "
                "The evidence was edited, or is another's."
            )

    def measurement(self, trust: Trust, now: datetime) -> None:
        assert self._beside.measurement is not None
        assert self._beside.evidence is not None
        verify_measurement(self._beside.measurement, self._beside.evidence, trust=trust, now=now)

    def policy(self) -> None:
        policy = self._policy()
        if policy is None:
            assert self._beside.policy is not None
            raise Untrusted(
                f"the verdict was made by policy {self._summary.policy.sha256}, this is "
                f"{self._beside.policy.digest().hex}. Give the policy that was applied: "
                "policy.json of the report."
            )

    def decision(self) -> None:
        policy, evidence, summary = self._policy(), self._beside.evidence, self._summary
        assert policy is not None
        assert evidence is not None
        again = decide(
            policy, evidence, incumbent=summary.incumbent, decided_at=summary.time_verified
        )
        version = summary.verifier.version.get("parity-gate", "")
        made = Summary.of(
            again, precision=policy.precision, resource=summary.resource_uri, version=version
        )
        if made.to_plain() != summary.to_plain():  # NaN is not equal to itself
            raise Untrusted(
                f"decided again from this evidence and policy, the verdict is {again.verdict} "
                f"({again.digest().hex}), the statement says {summary.verification_result} "
                f"({summary.decision.sha256}). It was edited, or parity-gate {version or '?'} has "
                "other rules than this version: decide anew, or look with that one."
            )

    def golden(self) -> None:
        assert self._beside.golden is not None
        verify_golden_files(self._signed, self._beside.golden, model=self._summary.model)

    def preprocessing(self) -> None:
        assert self._beside.preprocessing is not None
        verify_files(self._signed, {PREPROCESSING: self._beside.preprocessing})

    def _policy(self) -> Policy | None:
        """The policy of the statement: the one that was brought, or that of the twin in it."""
        policy = self._beside.policy
        named = self._summary.policy.sha256
        each = (policy, policy.twin if policy else None)
        return next((one for one in each if one and one.digest().hex == named), None)
