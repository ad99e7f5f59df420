"""The pytest plug-in: the fixture `parity_gate`, and the report of each check.

pytest loads this module in every test run if parity-gate is installed, so it imports only pytest
until a check has run.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gate.api import EvaluationResult

_RESULTS = pytest.StashKey[list[Any]]()
"""The results of the checks that one test ran through the fixture."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--parity-report DIR`."""
    parser.getgroup("parity-gate").addoption(
        "--parity-report",
        metavar="DIR",
        type=Path,
        help="write the report of each check by parity-gate below this folder",
    )


@pytest.fixture
def parity_gate(request: pytest.FixtureRequest) -> Callable[..., EvaluationResult]:
    """Return `gate.testing.assert_parity`, which then attaches the report of a check that passes
    to the test, too."""
    from gate.testing import assert_parity

    results: list[Any] = request.node.stash.setdefault(_RESULTS, [])

    def checked(*arguments: Any, **options: Any) -> EvaluationResult:
        __tracebackhide__ = True
        result = assert_parity(*arguments, **options)
        results.append(result)
        return result

    return checked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the results of the test's checks: JUnit properties, the report's folder, and the
    first screen of the report for pytest-html."""
    results = _results(item, call) if call.when == "call" else []
    for result in results:  # before the report of the test copies its properties
        item.user_properties += _properties(result)
    notes = [_write(item, result, number) for number, result in enumerate(results)]
    report = yield
    for result, note in zip(results, notes, strict=True):
        if note:
            report.sections.append(("parity-gate", note))
        if item.config.pluginmanager.hasplugin("html"):
            from pytest_html import extras

            shown = [*getattr(report, "extras", ()), extras.html(result._repr_html_())]
            report.extras = shown  # type: ignore[attr-defined]  # where pytest-html looks
    return report


def _results(item: pytest.Item, call: pytest.CallInfo[None]) -> list[Any]:
    """Return the results that passed in the fixture, and the one that failed."""
    results = list(item.stash.get(_RESULTS, ()))
    testing = sys.modules.get("gate.testing")
    error = None if call.excinfo is None else call.excinfo.value
    if testing is not None and isinstance(error, testing.ParityError):
        results.append(error.result)
    return results


def _properties(result: EvaluationResult) -> list[tuple[str, object]]:
    headline, subject = result.summary.headline, result.summary.subject
    values = {
        "parity_verdict": headline.verdict.value,
        "parity_file": subject.sha256,
        "parity_cause": headline.cause if result.failures else None,
        "parity_blamed": headline.blamed,
        "parity_policy": subject.policy_sha256,
        "parity_evidence": subject.evidence_sha256,
    }
    return [(name, str(value)) for name, value in values.items() if value is not None]


def _write(item: pytest.Item, result: EvaluationResult, number: int) -> str:
    """Write the report if `--parity-report` is set; return the lines to show after the test.

    It never raises: an exception here would end the whole test run.
    """
    root: Path | None = item.config.getoption("--parity-report")
    if root is None:
        return ""
    from gate.errors import describe_failure

    digest = hashlib.sha256(f"{item.nodeid}\0{number}".encode()).hexdigest()[:8]
    folder = root / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', item.nodeid)[-80:].strip('-.')}-{digest}"
    try:
        result.write_report(folder)
    except Exception as error:
        return f"no report was written: {describe_failure(error)}"
    item.user_properties.append(("parity_report", str(folder / "report.html")))
    return f"report: {folder / 'report.html'}"
