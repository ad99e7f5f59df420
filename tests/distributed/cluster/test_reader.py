"""Samples read by a Ray task equal those of the file, as do the errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from gate import SampleSet
from gate.data.open_samples import Opening
from gate.distributed.worker import FetchedRows, _rows
from gate.errors import DataError


class Task:
    """A Ray task that runs immediately; the result is its own reference."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, function: Any) -> None:
        self._function = function

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, source: Opening, places: Any) -> Any:
        self.calls.append(places)
        return self._function(source, places)


@pytest.fixture(autouse=True)
def _immediate_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=_make_read_only, remote=Task))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    Task.calls.clear()
    _rows.cache_clear()


def _make_read_only(answer: Any) -> Any:
    """Return arrays read-only, as the object store does."""
    if isinstance(answer, tuple) and isinstance(answer[0], dict):
        for array in answer[0].values():
            array.setflags(write=False)
    return answer


def create_fetched_rows(inputs: Path | str) -> FetchedRows:
    return FetchedRows(Opening(str(inputs)), "here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    x = np.arange(44, dtype=np.float32).reshape(11, 4)
    np.savez(tmp_path / "x.npz", x=x, n=np.arange(11))
    return tmp_path / "x.npz"


def test_remote_samples_equal_the_file(file: Path) -> None:
    custom, there = SampleSet.open(file), SampleSet(create_fetched_rows(file))
    assert there.digest() == custom.digest()
    assert there.slice(3, 7).digest() == custom.slice(3, 7).digest()
    assert [spec.name for spec in there.specs] == [spec.name for spec in custom.specs]
    for arguments, expected in zip(there.batches(4), custom.batches(4), strict=True):
        assert arguments.keys() == expected.keys()
        assert all((arguments[name] == expected[name]).all() for name in expected)
        assert all(array.flags.writeable for array in arguments.values())


def test_next_batch_is_prefetched(file: Path) -> None:
    batches = SampleSet(create_fetched_rows(file)).batches(4)
    next(batches)
    assert [list(locations) for locations in Task.calls[1:]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_unreadable_source_raises_its_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.npy"):
        create_fetched_rows(tmp_path / "none.npy")


def test_later_read_error_is_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = create_fetched_rows(file)

    def torn(*_: Any) -> Any:
        raise DataError("sample 2 changed")

    monkeypatch.setattr("gate.data.array_files.MappedRows.read", torn)
    with pytest.raises(DataError, match="sample 2 changed"):
        rows.read([2])
