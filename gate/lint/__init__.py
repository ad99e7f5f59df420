"""Trace safety: static rules over the source of every forward that a model reaches.

Nothing is run. The instance tells what each attribute is; a light data flow tells tensors from
Python values; `# noqa: TRC001` on the line silences a rule there. The rules: docs/lint/README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gate.lint.report import LintReport, UnreadCode

if TYPE_CHECKING:
    from torch import nn

    from gate.records.strategy import Strategy

__all__ = ["LintReport", "UnreadCode", "lint_model"]


def lint_model(model: nn.Module, *, strategy: Strategy = "traced") -> LintReport:
    """What an export of `model` by this strategy gets wrong, as far as the source tells.

    The model is not run and not changed; eval mode is taken for granted. Code that can't be read
    is listed in `unread`, never skipped in silence.
    """
    from gate.lint.walk import ModelWalk

    walk = ModelWalk(model, strategy)
    walk.whole()
    findings = sorted(walk.findings.items(), key=lambda pair: (pair[0][1:], pair[0][0]))
    return LintReport(
        strategy=strategy,
        findings=tuple(finding for _, finding in findings),
        unread=tuple(
            UnreadCode(name=name, reason=why) for name, why in sorted(walk.not_read.items())
        ),
        functions=len(walk.read),
    )
