"""A group: checks that fail for one cause, while findings are put together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gate.decision.checks import CheckResult, Verdict
from gate.records.localisation import Localisation
from gate.story.story import CauseKind
from gate.story.words import strain


@dataclass
class Group:
    """Checks with one cause, while they are put together."""

    cause: CauseKind
    checks: list[CheckResult] = field(default_factory=list)
    localisation: Localisation | None = None
    """The layer, where one is to blame."""
    cpu_agrees: bool = False
    """Whether ONNX Runtime passed on the CPU: then the file is right."""

    @property
    def verdict(self) -> Verdict:
        """The worst of its checks."""
        verdicts = {check.verdict for check in self.checks}
        order = (Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED)
        return next(verdict for verdict in order if verdict in verdicts)

    @property
    def ordered(self) -> tuple[CheckResult, ...]:
        """What fails first, then what can't be judged; each the farthest beyond its bound first."""
        return tuple(sorted(self.checks, key=_place))


def _place(check: CheckResult) -> tuple[int, int, float]:
    used = strain(check)
    shows = 0 if not check.name.startswith(("graph_", "probe_")) else 1
    verdict = 0 if check.verdict is Verdict.FAIL else 1
    return verdict, shows, -(used if used is not None and not math.isnan(used) else 0.0)


def worst_of(checks: Iterable[CheckResult], beginning: str) -> CheckResult | None:
    """The check of this name that is farthest beyond its bound, or None."""
    named = [check for check in checks if check.name.startswith(beginning)]
    return max(named, key=lambda check: strain(check) or 0.0, default=None)
