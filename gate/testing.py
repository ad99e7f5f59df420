"""Assert parity in a test suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from gate.api import EvaluationResult
    from gate.measure.job import Reference
    from gate.policy.policy import Policy

_WIDTH = 100

_MORE = "the report has them (pytest --parity-report DIR)"


class ParityError(AssertionError):
    """The file was rejected, or could not be judged.

    The text has the headline, the cause and the next commands, as `gate check` prints them.
    """

    def __init__(self, result: EvaluationResult) -> None:
        super().__init__(_text(result))
        self.result = result
        """Evidence, decision and explanation."""


def assert_parity(
    file: Path | str,
    reference: Reference | nn.Module | Path | str,
    samples: Any,
    policy: Policy | Path | str | None = None,
) -> EvaluationResult:
    """Check the ONNX file against the reference, and return the result if it passes.

    The arguments are those of `gate.check`. Raises ParityError, an AssertionError, unless every
    check of the policy passes, including checks that could not be measured. Raises GateError if
    nothing can be measured, for example for a missing file or samples that don't fit.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from gate.api import check

    result = check(file, reference, samples, policy)
    if not result.decision.passed:
        raise ParityError(result)
    return result


def _text(result: EvaluationResult) -> str:
    import io

    from rich.console import Console

    from gate.report.terminal import print_summary

    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, color_system=None)
    print_summary(result.summary, console, more=_MORE)
    return stream.getvalue()
