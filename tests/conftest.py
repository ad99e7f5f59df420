"""What all tests need."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, settings

from benchmarks import install_size
from tests.exhaustive import leave_out

# Two processes run the tests on two cores: more threads in each wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Thousands of small databases: where memory can hold them, nobody waits for a disk.
_MEMORY, _ROOM = Path("/dev/shm"), 8 << 30
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# A check that a script starts in the background ignores Ctrl-C, and all that it starts would.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How fast an example is, or is drawn, says something about the machine alone.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage is of the first row of each table, and not of proofs and laws, which it would make
    slower."""
    measuring = Coverage.current()
    is_law = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    uncounted = is_law or any(map(item.get_closest_marker, ("again", "proof")))
    if measuring is None or not uncounted:
        return (yield)
    measuring.stop()
    try:
        return (yield)
    finally:
        measuring.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged goes from one process to another, which lone surrogates can't."""
    report = yield
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout."""
    return install_size.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def place() -> Iterator[Path]:
    """For an environment: on a disk, as one may take gigabytes, and gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "env")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests or proofs first, so that none of them is alone at the end of a run by
    several. A further row of a table is marked: it runs the lines that the first one ran."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "proof")))}
    items.sort(key=lambda item: item.path not in slow)
    leave_out(items)
    rows: Counter[tuple[Path, str]] = Counter()
    for item in items:
        rows[test := (item.path, item.nodeid.partition("[")[0])] += 1
        if rows[test] > 1:
            item.add_marker("again")


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
