"""Whose word counts for a service: read anew at each look, so that keys change at any time."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from gate.attestation.trust import SECTION, Trust
from gate.errors import PolicyError
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import History
from gate.ledger.ledger import Ledger
from gate.storage.yaml_section import has_section

_log = logging.getLogger(__name__)


class TrustFile:
    """The file with the trust, if there is one. Implements `gate.registry.terms.ReadTrust`."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        """None: the service trusts no key, and believes its ledger alone."""
        self._warned: dict[str, str] = {}
        """By model: what was said last of what serves."""

    @classmethod
    def named(cls, trust: Path | None, *, policy: Path | None) -> TrustFile:
        """The file that is named, else that of the policy, if it has a section `trust:`. Raises
        PolicyError where the policy can't be read."""
        if trust is None and policy is not None and has_section(policy, SECTION):
            return cls(policy)
        return cls(trust)

    def __call__(self) -> Trust | None:
        """As it is now; messages have its name without the folder, because they are for all who
        read the version's page. Raises PolicyError where it is damaged: then nothing new is
        believed."""
        return None if self.path is None else Trust.of_file(self.path).read_from(self.path.name)

    def follow(self, ledger: Ledger) -> None:
        """Have a ledger be believed by it as it is now; where it is damaged, as it was before."""
        if self.path is not None:
            with contextlib.suppress(PolicyError):
                ledger.trust = self()

    def trouble(self) -> str | None:
        """Why nobody's word counts now, although somebody's should; or None. The log says more than
        strangers may read."""
        try:
            self()
        except PolicyError as error:
            _log.warning("nothing that is handed in is judged: %s", error)
            return "can't be read"
        return None

    def warn_of(self, model: str, history: History) -> None:
        """Say once, in the log, that what serves stands on no word that counts: it goes on serving,
        because a file of settings alone takes nothing out of service. Raises PolicyError."""
        trust, number = self(), history.serving
        vouched = None if number is None else history.vouching_for(number)
        if trust is None or vouched is None:
            return
        text = weakness(vouched, trust)
        if text is None:
            self._warned.pop(model, None)
            return
        warning = f"version {number} {text}"
        if self._warned.get(model) != warning:
            self._warned[model] = warning
            _log.warning(
                "%s: %s. It goes on serving. Hand in a signed one, or take it back: gate rollback.",
                model,
                warning,
            )


def is_approved(approvers: tuple[str, ...], trust: Trust | None) -> bool:
    """Whether an approval of which the ledger tells counts still: thresholds counted when it was
    given, and again only where a key of it was revoked since."""
    revoked = () if trust is None else trust.revoked
    left = [key_id for key_id in approvers if key_id not in revoked]
    needed = 1 if trust is None or len(left) == len(approvers) else trust.reviewers_threshold
    return len(left) >= needed


def weakness(vouched: LedgerEntry, trust: Trust) -> str | None:
    """What the word behind a version that served lacks, by the ledger alone; None: nothing. Age and
    thresholds count when it is promoted, and no more."""
    revoked = sorted(set(vouched.measured_by).intersection(trust.revoked))
    if revoked:
        ids = ", ".join(key_id[:12] for key_id in revoked)
        return f"was measured by keys that were revoked since: {ids}"
    if not vouched.signers:
        return None if trust.unsigned == "accept_existing" else "has no statement of anybody"
    believed = {key.key_id for key in trust.measurers} - set(trust.revoked)
    if not believed.intersection(vouched.signers):
        ids = ", ".join(key_id[:12] for key_id in vouched.signers)
        return f"stands on the word of keys that are not trusted, or revoked since: {ids}"
    if vouched.approvers and not is_approved(vouched.approvers, trust):
        ids = ", ".join(key_id[:12] for key_id in vouched.approvers)
        return f"was approved by keys of which too few are left that were not revoked: {ids}"
    return None
