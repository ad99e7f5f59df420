"""Lint a model and return the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gate.records.export import LintFinding, LintLevel, at_least
from gate.storage.record import Record

if TYPE_CHECKING:
    from torch import nn

    from gate.records.export import Strategy


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


def lint_model(model: nn.Module, *, strategy: Strategy = "traced") -> LintReport:
    """Report the faults of an export of `model` by this strategy, from the source.

    The model is not run and not changed; eval mode is assumed. The values of its attributes and a
    light data flow distinguish tensors from Python values. Code that cannot be read is listed in
    `unread`. The rules: docs/lint/README.md.
    """
    from gate.lint.forward_visitor import ModelLinter

    linter = ModelLinter(model, strategy)
    linter.lint()
    findings = sorted(linter.findings.items(), key=lambda pair: (pair[0][1:], pair[0][0]))
    return LintReport(
        strategy=strategy,
        findings=tuple(finding for _, finding in findings),
        unread=tuple(
            UnreadCode(name=name, reason=why) for name, why in sorted(linter.unread.items())
        ),
        functions=len(linter.read),
    )
