"""What all tests need."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged goes from one process to another, which lone surrogates can't."""
    report = yield
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    return report


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
