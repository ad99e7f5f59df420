"""What commands that check a verdict's statement share: reading it, looking, printing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gate.attestation.envelope import SignedStatement
    from gate.attestation.trust import Trust
    from gate.attestation.verdict import Beside, Verified


def verified(statement: Path, beside: Callable[[], Beside], *, trust: Trust) -> Verified:
    """Look at a statement and at what is read beside it: what is no such record is no verdict that
    could be trusted. Raises PolicyError, StorageError where it can't be looked at."""
    from datetime import UTC, datetime

    from gate.attestation.verdict import Verified, verify_verdict
    from gate.errors import DigestMismatch, EvidenceError, Untrusted

    try:
        signed, things = read_statement(statement), beside()
    except (Untrusted, DigestMismatch, EvidenceError) as error:
        return Verified(trusted=False, summary=None, problems=(str(error),))
    return verify_verdict(signed, things, trust=trust, now=datetime.now(UTC))


def read_statement(path: Path) -> SignedStatement:
    """Open the envelope in a file. Raises Untrusted, StorageError."""
    from gate.attestation.envelope import ENVELOPE_LIMIT, SignedStatement

    return SignedStatement.of(content(path, limit=ENVELOPE_LIMIT), what=path.name)


def content(path: Path, *, limit: int) -> bytes:
    """The bytes of a file that the caller named, one more than `limit` at most. Raises
    StorageError."""
    from gate.errors import StorageError
    from gate.storage.files import open_plain

    try:
        with open_plain(path) as stream:
            return stream.read(limit + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}. Check it.") from error


def show(found: Verified, console: Console) -> None:
    """Print it for people: what came of looking first, then what the statement says."""
    from rich.text import Text

    style = "bold green" if found.trusted else "bold red"
    console.print(Text(outcome(found), style=style))
    show_statement(found, console)


def outcome(found: Verified) -> str:
    """What came of looking, in a few words."""
    if found.trusted:
        assert found.summary is not None
        return f"TRUSTED {found.summary.verification_result}"
    if _is_proven(found):
        assert found.summary is not None
        return f"NOT TRUSTED: those whom you trust say {found.summary.verification_result}"
    count = len(found.problems)
    return f"NOT TRUSTED ({count} problem{'' if count == 1 else 's'})"


def _is_proven(found: Verified) -> bool:
    """Whether what the statement says is so: nothing is wrong but, perhaps, the verdict itself."""
    return bool(found.signers) and len(found.problems) == ("result" not in found.checked)


def show_statement(found: Verified, console: Console) -> None:
    """Print what is wrong with a statement, and what it says: of one that is not trusted, as what
    it claims."""
    from rich.text import Text

    from gate.story.wording import printable

    for problem in found.problems:
        console.print(Text(f"- {printable(problem)}", style="red"))
    says = found.summary
    if says is not None:
        facts = {
            "verdict": ", ".join(dict.fromkeys((says.verification_result, *says.verified_levels))),
            "model": str(says.model),
            "for": says.resource_uri,
            "made": says.time_verified,
        }
        if not _is_proven(found):
            console.print("What the statement claims, and nothing here proves:")
        for name, fact in facts.items():
            console.print(f"{name:<10}{printable(fact)}")
    if found.signers:
        names = ", ".join(f"{key.name} ({key.short})" for key in found.signers)
        console.print(f"signed by {printable(names)}")
    console.print(f"{'proven':<10}{', '.join(found.checked) or 'nothing'}")
    if found.unchecked:
        console.print(printable(f"not checked, because not given: {', '.join(found.unchecked)}"))
