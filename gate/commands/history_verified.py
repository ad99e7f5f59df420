"""`gate history --verify`: is the ledger what it was, and who vouches for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.outcome import Outcome
from gate.commands.signing import local_keys
from gate.commands.state import existing_ledger
from gate.commands.status import Status
from gate.errors import DigestMismatch, EvidenceError, Untrusted

if TYPE_CHECKING:
    from rich.console import Console

    from gate.attestation.keys import PublicKey
    from gate.attestation.trust import Trust
    from gate.ledger.audit import Audit
    from gate.ledger.checkpoint import Checkpoint
    from gate.ledger.ledger import Ledger


@dataclass(frozen=True)
class _Kept:
    """What a checkpoint proved."""

    checkpoint: Checkpoint
    signers: tuple[PublicKey, ...]
    since: int
    """Lines that came afterwards."""


def verified(state: str, *, trust: Path | None, checkpoint: Path | None) -> Outcome:
    """Prove chain, signatures and checkpoint. What does not hold is an outcome; that nobody can
    look is an error: raises as `existing_ledger`, StateUnavailable, PolicyError, UsageError."""
    from gate.ledger.audit import audit

    ledger = existing_ledger(state)
    ledger.trust = believed = local_keys().trust_if_any(trust)
    if checkpoint is not None and believed is None:
        raise click.UsageError("a checkpoint is believed by its signature: say whose with --trust.")
    try:
        proven = audit(ledger)
        kept = None
        if checkpoint is not None and believed is not None:
            kept = _kept(checkpoint, ledger, believed)
    except (DigestMismatch, EvidenceError, Untrusted) as error:
        problem = str(error)
        plain = {"holds": False, "problem": problem, "ledger": ledger.place}
        return Outcome(Status.REJECTED, plain, lambda console: _show_problem(problem, console))
    return Outcome(
        Status.DONE,
        {
            "holds": True,
            "problem": None,
            "ledger": ledger.place,
            "lines": proven.lines,
            "head": None if proven.head is None else str(proven.head),
            "signed_by": proven.by_key,
            "accepted": list(proven.accepted),
            "checkpoint": None if kept is None else _plain(kept),
        },
        lambda console: _show(ledger, proven, kept, console),
    )


def _kept(path: Path, ledger: Ledger, trust: Trust) -> _Kept:
    from gate.attestation.envelope import ENVELOPE_LIMIT, SignedStatement
    from gate.ledger.checkpoint import Checkpoint, checkpoint_signers
    from gate.storage.foreign import read_foreign

    signed = SignedStatement.of(read_foreign(path, limit=ENVELOPE_LIMIT), what=str(path))
    signers = checkpoint_signers(signed, trust=trust)
    checkpoint = Checkpoint.read(signed)
    return _Kept(checkpoint, signers, checkpoint.verify(ledger))


def _plain(kept: _Kept) -> dict[str, Any]:
    return {
        "lines": kept.checkpoint.lines,
        "at": kept.checkpoint.at,
        "since": kept.since,
        "signers": [key.key_id for key in kept.signers],
    }


def _show_problem(problem: str, console: Console) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    console.print(Text(printable(f"the ledger does not hold: {problem}"), style="bold red"))


def _show(ledger: Ledger, proven: Audit, kept: _Kept | None, console: Console) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    last = "" if proven.head is None else f", the last with digest {proven.head}"
    lines = [f"the ledger {ledger.place} holds: {proven.lines} lines{last}"]
    writers = () if ledger.trust is None else ledger.trust.writers
    if writers:
        counts = [
            f"{proven.by_key[key.key_id]} by {key.label}"
            for key in writers
            if key.key_id in proven.by_key
        ]
        trusted = "" if ledger.trust is None else ledger.trust.by
        lines.append(f"signed: {', '.join(counts) or 'none'}; trusted{trusted}")
    else:
        lines.append("signatures were not looked at: no writers are trusted (--trust)")
    if proven.accepted:
        numbers = ", ".join(map(str, proven.accepted))
        lines.append(f"vouched for by a later line of a trusted writer only: {numbers}")
    if kept is not None:
        names = ", ".join(key.label for key in kept.signers)
        lines.append(
            f"the checkpoint of {kept.checkpoint.at}, signed by {names}: its "
            f"{kept.checkpoint.lines} lines are there, {kept.since} came since"
        )
    for line in lines:
        console.print(Text(printable(line)))
