"""Options of commands that sign or check signatures, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.given import Given
from gate.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gate.attestation.keys import PublicKey, SigningKey
    from gate.attestation.local import LocalKeys
    from gate.attestation.statements import Signatory, Statements
    from gate.decision.decision import Decision
    from gate.policy.policy import Policy
    from gate.records.evidence import Evidence
    from gate.storage.digest import Digest

STATE = Path(".gate")
"""The folder whose own key and trust count where no others are named."""
KEY = click.option(
    "--key", metavar="URI",
    help="The key that signs: a file (PEM, mode 0600), awskms:…, gcpkms:…, azurekms:…, hsm:…. "
    "Default: GATE_SIGNING_KEY, else the key of this folder, .gate/keys/local.pem, made on first "
    "use.",
)  # fmt: skip
TRUST = click.option(
    "--trust", type=Given(PolicyError, "YAML with a 'trust:' section, or the trust itself"),
    metavar="FILE",
    help="Whose signatures count. Default: GATE_TRUST, else .gate/trust.yaml, which trusts the key "
    "of this folder.",
)  # fmt: skip


@dataclass(frozen=True)
class Signing:
    """Who signs what a command measures, and for what: a registered model, or the file alone."""

    signatory: Signatory
    resource: str | None = None

    @classmethod
    def of_report(
        cls, report: Path | None, *, key: str | None, model: str | None, registry: str
    ) -> Signing | None:
        """Who signs a report; None without a report. `model`: the name in the registry at this
        address, if the verdict is for one. Raises UsageError, KeyUnusable, StorageError."""
        if report is not None:
            resource = _resource(registry, model) if model else None
            return cls(signatory(local_keys().signing_key(key)), resource)
        if key is not None or model is not None:
            raise click.UsageError("--key and --name are for what --report writes: give it, too.")
        return None

    @property
    def label(self) -> str:
        """Whose and which key, for people."""
        return self.signatory.key.public.label

    def statements(
        self,
        evidence: Evidence,
        decision: Decision,
        *,
        policy: Policy,
        subjects: Mapping[str, Digest],
    ) -> Statements:
        """Sign what was measured and decided, as it is in memory. Raises KeyUnusable."""
        from gate.attestation.resource import file_resource
        from gate.attestation.statements import Statements

        resource = self.resource or file_resource(decision.subject_sha256)
        return Statements(
            self.signatory.measured(evidence, subjects),
            self.signatory.decided(
                decision, subjects, precision=policy.precision, resource=resource
            ),
        )


def _resource(registry: str, model: str) -> str:
    from gate.attestation.resource import resource_of
    from gate.ledger.addresses import plain  # which imports the ledger's database

    return resource_of(plain(registry), model)


def signatory(key: SigningKey) -> Signatory:
    """Who signs, with the code of the current folder."""
    from gate.attestation.code_version import code_version
    from gate.attestation.statements import Signatory

    return Signatory(key, code_version(Path.cwd()))


def local_keys() -> LocalKeys:
    """Of the current folder; what it makes is said on stderr."""
    from gate.attestation.local import LocalKeys

    return LocalKeys(STATE, lambda text: click.echo(text, err=True))


def words_of(signers: Iterable[PublicKey]) -> list[str]:
    """Who signed, and of the folder's own key what that is worth."""
    local = local_keys()
    return [
        local.word_of(key) if local.is_own(key) else f"signed by {key.label}" for key in signers
    ]
