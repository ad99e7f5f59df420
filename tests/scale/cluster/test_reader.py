"""Samples that an actor reads for others are those of the file, with its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gate.data.open_samples import Opening
from gate.data.samples import SampleSet
from gate.distributed.worker import FetchedRows, SampleActor
from gate.errors import DataError


class Remote:
    """A method of an actor, called at once: its answer is the reference to it."""

    def __init__(self, method: Any, calls: list[Any]) -> None:
        self._method, self._calls = method, calls

    def remote(self, *arguments: Any) -> Any:
        self._calls.append(arguments)
        return self._method(*arguments)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=_read_only))


def _read_only(answer: Any) -> Any:
    """As the object store gives arrays."""
    for array in getattr(answer, "arrays", {}).values():
        array.setflags(write=False)
    return answer


def handle(inputs: str, calls: list[Any] | None = None) -> Any:
    """Of an actor on these samples."""
    actor, calls = SampleActor(Opening(inputs)), [] if calls is None else calls
    return SimpleNamespace(form=Remote(actor.form, calls), read=Remote(actor.read, calls))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    x = np.arange(44, dtype=np.float32).reshape(11, 4)
    np.savez(tmp_path / "x.npz", x=x, n=np.arange(11))
    return tmp_path / "x.npz"


def test_they_are_the_samples_of_the_file(file: Path) -> None:
    own, fetched = SampleSet.open(file), SampleSet(FetchedRows(handle(str(file))))
    assert fetched.digest() == own.digest()
    assert fetched.slice(3, 7).digest() == own.slice(3, 7).digest()
    assert [spec.name for spec in fetched.specs] == [spec.name for spec in own.specs]
    for given, wanted in zip(fetched.batches(4), own.batches(4), strict=True):
        assert given.keys() == wanted.keys()
        assert all((given[name] == wanted[name]).all() for name in wanted)
        assert all(array.flags.writeable for array in given.values())


def test_the_next_batch_is_asked_for_before_this_one_is_used(file: Path) -> None:
    calls: list[Any] = []
    batches = SampleSet(FetchedRows(handle(str(file), calls))).batches(4)
    next(batches)
    assert [list(places) for places, _ in calls[1:]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_can_not_be_read_is_the_error_of_the_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.npy"):
        FetchedRows(handle(str(tmp_path / "none.npy")))


def test_what_breaks_later_is_one_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = handle(str(file))
    rows = FetchedRows(actor)

    def torn(*_: Any) -> Any:
        raise DataError("sample 2 changed")

    monkeypatch.setattr("gate.data.array_files.MappedRows.read", torn)
    with pytest.raises(DataError, match="sample 2 changed"):
        rows.read([2])
