"""The outcome of a promotion or a rollback."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import quote

from gate.commands.outcome import Outcome
from gate.commands.status import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from gate.registry.promotion import Promotion
    from gate.storage.digest import Digest


def promoted(
    promotion: Promotion,
    *,
    name: str,
    digest: Digest | None,
    uri: str,
    verdict: str | None = None,
    signed_by: Sequence[str] = (),
) -> Outcome:
    """`digest`: of the file that it is about. `verdict`: of the decision on it. `signed_by`: who
    vouches for that, for people."""
    status = Status.of_promotion(promotion.outcome, verdict)
    url = version_page(uri, name, promotion.version)
    plain = {
        "name": name,
        **asdict(promotion),
        "digest": None if digest is None else str(digest),
        "url": url,
    }
    return Outcome(
        status,
        plain,
        lambda console: _show(promotion, url, signed_by, console),
        sentence=f"{promotion.outcome.replace('_', ' ')}: {promotion.reason}",
    )


def version_page(uri: str, name: str, version: str | None) -> str | None:
    """The version's page in MLflow's user interface; None without a version, or without a server.

    Straight to the page: newer MLflows hide the list of models below another entry.
    """
    from gate.storage.redaction import redacted

    if version is None or not uri.startswith(("http://", "https://")):
        return None
    return f"{redacted(uri).rstrip('/')}/#/models/{quote(name, safe='')}/versions/{version}"


def _show(
    promotion: Promotion, url: str | None, signed_by: Sequence[str], console: Console
) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    facts = [promotion.outcome.replace("_", " ")]
    facts += [f"version {promotion.version}"] if promotion.version else []
    previous = promotion.previous_version
    facts += [f"version {previous} was champion before"] if previous else []
    style = "bold red" if promotion.outcome == "refused" else "green"
    console.print(Text(", ".join(facts), style=style))
    console.print(Text(printable(promotion.reason)))
    for sentence in signed_by:
        console.print(Text(printable(sentence)))
    if url is not None:
        console.print(Text(f"look at {printable(url)}"))
