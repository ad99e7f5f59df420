"""The files that a CI reads of a verdict, and the commands that have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from gate.commands.ci_files import CiFile, CiFilesCommand, Ending
from gate.commands.status import Status

if TYPE_CHECKING:
    from gate.report.ci import CiResult


def _summary(ending: Ending) -> str:
    from gate.report.summary import summary

    return summary(_result(ending))


def _junit(ending: Ending) -> str:
    from gate.report.junit import junit

    return junit(_result(ending))


def _openmetrics(ending: Ending) -> str:
    from gate.report.openmetrics import openmetrics

    return openmetrics(_result(ending))


class VerdictCommand(CiFilesCommand):
    """`gate check`, `gate merge`, `gate promote`: their outcome has the story of the decision."""

    files: ClassVar[tuple[CiFile, ...]] = (
        CiFile(
            "--summary",
            "Write the verdict as Markdown here, for a pull request or cml comment; to "
            "$GITHUB_STEP_SUMMARY it is added (docs/ci.md).",
            _summary,
        ),
        CiFile(
            "--junit",
            "Write the checks as JUnit XML here, for GitLab or Jenkins: a suite a runtime, a case "
            "a check.",
            _junit,
        ),
        CiFile(
            "--metrics-file",
            "Write the numbers in OpenMetrics here, for Prometheus.",
            _openmetrics,
        ),
    )


def _result(ending: Ending) -> CiResult:
    from gate.report.ci import CiResult
    from gate.story.story import Story

    outcome, options = ending.outcome, ending.options
    model = str(options.get("name") or options.get("reference") or "")
    if outcome is None:
        return CiResult(
            command=ending.command,
            exit_code=Status.NOT_JUDGED,
            model=model,
            sentence=ending.failure,
        )
    return CiResult(
        command=ending.command,
        exit_code=outcome.status,
        model=model,
        sentence=outcome.sentence,
        story=outcome.record if isinstance(outcome.record, Story) else None,
        links=_links(outcome.plain),
    )


def _links(plain: Mapping[str, Any]) -> dict[str, str]:
    """To the run of `gate check --track`, and to the page of the version."""
    run = plain.get("run") or {}
    found = {"MLflow run": run.get("address"), "Model version": plain.get("url")}
    return {label: target for label, target in found.items() if target}
