"""What a CI reads of the stage `promote`: summary, JUnit XML, OpenMetrics; also of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gate.commands.status import Status
from gate.errors import GateError
from gate.report.ci import CiResult
from gate.report.junit import junit
from gate.report.openmetrics import openmetrics
from gate.report.summary import summary
from gate.storage import atomic
from gate.storage.redaction import Redaction
from gate.story.story import Story
from pipelines import paths
from pipelines.promotion_report import PromotionReport

_WRITERS = {paths.SUMMARY: summary, paths.JUNIT: junit, paths.OPENMETRICS: openmetrics}


def write(story: Story, report: PromotionReport) -> None:
    """Write them of a verdict and of what came of it. Raises StorageError."""
    _write(
        CiResult(
            command="promote",
            exit_code=Status.of_promotion(report.outcome, report.verdict.value),
            model=report.model_name,
            sentence=report.sentence(),
            story=story,
        )
    )


@contextlib.contextmanager
def also_of_a_failure() -> Iterator[None]:
    """Take those of an earlier run away; where nothing can be judged, write why."""
    for path in _WRITERS:
        path.unlink(missing_ok=True)
    try:
        yield
    except GateError as error:
        failed = CiResult(
            command="promote",
            exit_code=Status.NOT_JUDGED,
            sentence=Redaction().clean(str(error)),
        )
        with contextlib.suppress(GateError):
            _write(failed)
        raise


def _write(result: CiResult) -> None:
    for path, text in _WRITERS.items():
        atomic.write_text(path, text(result))
