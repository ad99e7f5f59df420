"""What the rules found in a model, and what they could not read."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gate.records.lint import LintFinding, LintLevel, at_least
from gate.storage.record import Record


class UnreadCode(Record):
    """Code that the model reaches and that could not be read."""

    name: str
    """`package.module.function`, or the dotted path of a module."""
    reason: str


class LintReport(Record):
    """All findings, in the order of files and lines."""

    strategy: str
    findings: tuple[LintFinding, ...]
    """Suppressed ones too."""
    unread: tuple[UnreadCode, ...]
    functions: Annotated[int, Field(ge=0)]
    """How many functions and methods were read."""

    @property
    def active(self) -> tuple[LintFinding, ...]:
        """Findings that no `# noqa` silences."""
        return tuple(finding for finding in self.findings if not finding.suppressed)

    @property
    def suppressed(self) -> tuple[LintFinding, ...]:
        """Findings that a `# noqa` silences."""
        return tuple(finding for finding in self.findings if finding.suppressed)

    def refused(self, level: LintLevel) -> tuple[LintFinding, ...]:
        """Active findings of this level or worse."""
        return tuple(finding for finding in self.active if finding.level in at_least(level))
