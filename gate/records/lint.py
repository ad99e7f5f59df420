"""A finding of the trace-safety rules (`gate.lint`), as the evidence keeps it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from gate.storage.record import Record, later

LintLevel = Literal["error", "warning", "note"]
"""`error`: the file computes something else for inputs that the model takes. `warning`: it does
where an axis is dynamic, or a caller does otherwise. `note`: worth knowing."""
LEVELS: tuple[LintLevel, ...] = ("error", "warning", "note")
"""The worst first."""


class LintFinding(Record):
    """One place in the model's source that an export gets wrong."""

    code: Annotated[str, StringConstraints(pattern=r"^TRC\d{3}$")]
    level: LintLevel
    path: str
    """Below the import path, so the same on every machine: `mypackage/models.py`."""
    line: Annotated[int, Field(ge=1)]
    module: str
    """Dotted path of the first module that reaches it; empty: the model itself."""
    expression: str
    """The offending source, in one line."""
    message: str
    rewrite: str
    """What to write instead."""
    suppressed: bool = later(False)
    """The line says `# noqa: TRC…`: kept and shown, refuses nothing."""

    @property
    def page(self) -> str:
        """Path of the rule's page, from the root of the project."""
        return f"docs/lint/{self.code}.md"

    @property
    def place(self) -> str:
        """`path:line`."""
        return f"{self.path}:{self.line}"


def at_least(level: LintLevel) -> tuple[LintLevel, ...]:
    """The levels that are as bad as this one, or worse."""
    return LEVELS[: LEVELS.index(level) + 1]
