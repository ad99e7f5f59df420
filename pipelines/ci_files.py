"""Write the files that a CI reads: summary, JUnit XML, OpenMetrics.

`promote` writes them for its verdict. Other stages write the reason why there is no verdict, so
that a CI never shows the files of an earlier run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gate.commands.result import ExitCode
from gate.errors import GateError
from gate.report.ci_formats import CiResult, junit_xml, openmetrics_text
from gate.report.markdown import pull_request_comment
from gate.storage import files
from gate.storage.safe_text import Redaction
from gate.summary.summary import Summary
from pipelines import paths
from pipelines.promotion_report import PromotionReport

_WRITERS = {
    paths.SUMMARY: pull_request_comment,
    paths.JUNIT: junit_xml,
    paths.OPENMETRICS: openmetrics_text,
}


def write(summary: Summary, report: PromotionReport) -> None:
    """Write the files of a verdict and the resulting promotion. Raises StorageError."""
    _write_files(
        CiResult(
            command="promote",
            is_stage=True,
            exit_code=ExitCode.from_promotion(report.outcome, report.verdict.value),
            model=report.model_name,
            sentence=report.sentence(),
            summary=summary,
        )
    )


def write_rejection(stage: str, reason: str) -> None:
    """Write that `stage` rejected the file, so that there is no verdict. Raises StorageError."""
    _write_without_verdict(stage, ExitCode.REJECTED, reason)


def remove_files() -> None:
    """Remove the files of an earlier run."""
    for path in _WRITERS:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def record_failure(stage: str) -> Iterator[None]:
    """If `stage` fails, write the reason; if it is interrupted, leave no files."""
    try:
        yield
    except Exception as error:
        reason = str(error)
        if not isinstance(error, GateError):
            reason = f"unexpected {type(error).__name__}: {reason}"
        remove_files()
        with contextlib.suppress(GateError):
            _write_without_verdict(stage, ExitCode.NOT_JUDGED, reason)
        raise
    except BaseException:
        remove_files()
        raise


def _write_without_verdict(stage: str, status: ExitCode, reason: str) -> None:
    sentence = Redaction().clean(reason)
    _write_files(CiResult(command=stage, is_stage=True, exit_code=status, sentence=sentence))


def _write_files(result: CiResult) -> None:
    for path, text in _WRITERS.items():
        files.write_text(path, text(result))
