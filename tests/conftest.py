"""Configuration and fixtures of all tests."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, settings

from benchmarks import install_size
from tests.exhaustive import EXHAUSTIVE, mark_further_rows, skip_rows
from tests.once import VARIABLE

# Several processes run the tests, so more threads per process would only compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The tests create thousands of small databases, which are faster in memory.
_MEMORY_FOLDER, _REQUIRED_BYTES = Path("/dev/shm"), 8 << 30
if _MEMORY_FOLDER.is_dir() and shutil.disk_usage(_MEMORY_FOLDER).free > _REQUIRED_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY_FOLDER))
# A run started in the background would inherit an ignored SIGINT and pass it to its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Deadlines would make the tests depend on the machine.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30
)
settings.register_profile("fewer examples", settings.get_profile("tests"), max_examples=12)
settings.register_profile("exhaustive", settings.get_profile("tests"), max_examples=200)
settings.load_profile("exhaustive" if EXHAUSTIVE else "tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure coverage only for the first row of each table. Omit proofs and property tests,
    because coverage makes them slower."""
    _reuse_torchlib()
    is_uncounted = is_property_test(item) or any(map(item.get_closest_marker, ("again", "proof")))
    stopped: list[Coverage] = []
    # In an xdist worker pytest-cov starts two measurements; stopping the inner one resumes the outer.
    while is_uncounted and (measuring := Coverage.current()):
        measuring.stop()
        stopped.append(measuring)
    try:
        return (yield)
    finally:
        for measuring in reversed(stopped):
            measuring.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in logs, which can't be sent between processes."""
    report = yield
    report.sections = [(name, _escape_surrogates(text)) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of the checkout."""
    return install_size.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def environment_path() -> Iterator[Path]:
    """Yield a path on disk for a virtual environment, which may need gigabytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "env")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples of properties in `make test`, pause garbage collection, and create the
    folder of tests/once.py.

    Collecting the tests creates 1 200 000 permanent objects.
    """
    if "not further" in config.option.markexpr:
        settings.load_profile("fewer examples")
    gc.disable()
    if VARIABLE not in os.environ:  # else this is a worker
        folder = tempfile.mkdtemp("-tests", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        os.environ[VARIABLE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(VARIABLE))


def pytest_collection(session: pytest.Session) -> None:
    """In each of N workers, import every N-th test file first.

    Its rewritten assertions are cached for the other workers: rewriting all files took each worker 15
    of 45 s of CPU time in a new checkout.
    """
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    root = session.config.rootpath
    files = sorted(
        path for name in session.config.args for path in (root / name).rglob("test_*.py")
    )
    for path in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
        # pytest imports it again and reports the failure.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests or proofs first, so that parallel workers end at about the same time.

    Rows of a table after the first get the mark `again`: they cover the same lines.
    """
    for property_test in filter(is_property_test, items) if EXHAUSTIVE else ():
        property_test.add_marker("proof")  # an exhaustive run draws more examples
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "proof")))}
    items.sort(key=lambda item: item.path not in slow)
    skip_rows(items)
    mark_further_rows(items)
    rows: Counter[tuple[Path, str]] = Counter()
    for item in items:
        rows[property_test := (item.path, item.nodeid.partition("[")[0])] += 1
        if rows[property_test] > 1:
            item.add_marker("again")


def is_property_test(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _reuse_torchlib() -> None:
    """Share the table of ONNX functions between exports with dynamo.

    PyTorch reads it from the source of onnxscript for each export: 1.0 of 1.4 s of CPU time of a
    small export (torch 2.15).
    """
    module = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(module, "ONNXRegistry", None)
    if registry is None or hasattr(registry, "read_torchlib"):
        return
    registry.read_torchlib = functools.cache(registry.from_torchlib)

    def from_torchlib(**opset: int) -> object:
        shared = registry.read_torchlib(**opset)
        first = copy.copy(shared)  # an export adds the functions of its caller
        first.functions = {target: [*all_of] for target, all_of in shared.functions.items()}
        return first

    registry.from_torchlib = staticmethod(from_torchlib)


def _escape_surrogates(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
