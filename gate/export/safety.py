"""Trace safety before an export: which strategies the model's own source forbids."""

from __future__ import annotations

from torch import nn

from gate.errors import ExportRefused
from gate.lint import LintReport, lint_model
from gate.records.lint import LintFinding
from gate.records.strategy import ExportSettings, Strategy

_SHOWN = 5


class Safety:
    """Reads a model's source for each strategy when it is asked for, once."""

    def __init__(self, model: nn.Module, settings: ExportSettings) -> None:
        self._model = model
        self._settings = settings
        self._reports: dict[Strategy, LintReport] = {}

    def report(self, strategy: Strategy) -> LintReport:
        """What the rules found."""
        if strategy not in self._reports:
            self._reports[strategy] = lint_model(self._model, strategy=strategy)
        return self._reports[strategy]

    def objection(self, strategy: Strategy) -> str | None:
        """Why the settings forbid this strategy, in one line; None: they don't."""
        bad = self._forbidden(strategy)
        if not bad:
            return None
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"refused by {_line(bad[0])}{more}"

    def refusal(self) -> ExportRefused:
        """The error for a model that no strategy may export; at most ten lines."""
        bad = self._forbidden(self._settings.rungs[0])
        tried = ", ".join(self._settings.rungs)
        lines = [f"the model's source can't be exported faithfully ({tried}):"]
        lines += [f"  {_line(finding)}: {finding.message}" for finding in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            lines.append(f"  and {len(bad) - _SHOWN} more; gate lint lists them all.")
        lines.append(
            f"Rewrite it ({bad[0].rewrite}), silence a finding by '# noqa: {bad[0].code}' on its "
            "line, or say lint: off."
        )
        return ExportRefused("\n".join(lines))

    def _forbidden(self, strategy: Strategy) -> tuple[LintFinding, ...]:
        level = self._settings.lint
        return () if level == "off" else self.report(strategy).refused(level)


def _line(finding: LintFinding) -> str:
    return f"{finding.code} at {finding.place} ({finding.expression})"
