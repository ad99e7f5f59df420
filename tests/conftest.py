"""What all tests need."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# Two processes run the tests on two cores: more threads in each wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# How fast an example is says something about the machine alone.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged goes from one process to another, which lone surrogates can't."""
    report = yield
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none of them is alone at the end of a run by two."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
