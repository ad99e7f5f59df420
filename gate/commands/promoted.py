"""The outcome of a promotion or a rollback."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from gate.commands.outcome import Outcome
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.registry.promotion import Promotion


def promoted(promotion: Promotion, *, verdict: str | None = None) -> Outcome:
    """`verdict`: of the decision that was to be promoted."""
    status = Status.of_promotion(promotion.outcome, verdict)
    return Outcome(status, asdict(promotion), lambda console: _show(promotion, console))


def _show(promotion: Promotion, console: Console) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    facts = [promotion.outcome.replace("_", " ")]
    facts += [f"version {promotion.version}"] if promotion.version else []
    facts += [f"before: {promotion.previous_version}"] if promotion.previous_version else []
    style = "bold red" if promotion.outcome == "refused" else "green"
    console.print(Text(f"{', '.join(facts)}: {printable(promotion.reason)}", style=style))
