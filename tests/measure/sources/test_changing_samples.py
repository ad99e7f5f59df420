"""Samples and files may change between or during reads; the change is reported."""

import os
import uuid

import fsspec
import numpy as np
import pytest

from gate import SampleSet
from gate.data.location import RemoteFile
from gate.errors import DataError
from tests.measure.sources import written
from tests.measure.sources.factories import HERE, X


def read_batches(samples, size=4):
    return [batch["input"] for batch in samples.batches(size)]


@pytest.mark.parametrize("again", [
    read_batches,
    lambda s: s.at([7]),
    lambda s: s.take([7]),
    lambda s: read_batches(s.slice(5, 9)),
    lambda s: s.slice(6, 8).digest(),
])  # fmt: skip
def test_sample_that_changes_on_second_read_is_named(again):
    samples = SampleSet.open(f"{HERE}:changing")
    samples.digest()
    with pytest.raises(DataError, match="sample 7 of .*shuffles, augments or changes"):
        again(samples)


def test_changed_label_is_refused():
    samples = SampleSet.open(f"{HERE}:relabelled")
    samples.labels()
    with pytest.raises(DataError, match="sample 3 of"):
        read_batches(samples)


def touch_later(path):
    """Set the modification time one second later, because file system clocks are coarse."""
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def write_npy(folder):
    np.save(folder / "x.npy", X)
    return folder / "x.npy"


WRITERS = {
    "npy": write_npy,
    "tar": lambda d: written.tar(d / "x.tar", written.members()),
    "parquet": lambda d: written.parquet(d / "x.parquet", written.table()),
}


@pytest.mark.parametrize(("kind", "at"), [
    ("npy", "{}"),
    ("tar", "{}"),
    ("parquet", "{}"),
    ("tar", "file://{}"),
    ("parquet", "file://{}"),
])  # fmt: skip
def test_file_changed_while_reading_is_refused(kind, at, tmp_path, monkeypatch):
    monkeypatch.setattr("gate.data.location._CHECK_INTERVAL_S", 0.0)
    path = WRITERS[kind](tmp_path)
    batches = SampleSet.open(at.format(path)).batches(4)
    next(batches)
    with path.open("r+b") as file:
        file.seek(-60, os.SEEK_END)
        file.write(b"other bytes")
    touch_later(path)
    with pytest.raises(DataError, match=r"x\.(npy|tar|parquet) was .*sample"):
        list(batches)


def test_file_truncated_while_reading_is_refused(tmp_path):
    path = write_npy(tmp_path)
    samples = SampleSet.open(path)
    os.truncate(path, 128)
    with pytest.raises(DataError, match="samples 0 to 3"):
        read_batches(samples)


@pytest.mark.parametrize("kind", ["npy", "tar"])
def test_replaced_or_deleted_file_is_read_from_the_open_handle(kind, tmp_path):
    samples = SampleSet.open(WRITERS[kind](tmp_path))
    (path,) = tmp_path.iterdir()
    replacement = tmp_path / "other"
    replacement.write_bytes(b"other")
    replacement.replace(path)
    np.testing.assert_array_equal(np.concatenate(read_batches(samples)), X)
    path.unlink()
    np.testing.assert_array_equal(np.concatenate(read_batches(samples)), X)


@pytest.mark.parametrize("suffix", ["tar", "arrow", "parquet"])
def test_replaced_shard_is_refused_when_reopened(suffix, tmp_path):
    def write(name, rows):
        if suffix == "tar":
            return written.tar(tmp_path / name, written.members(rows))
        table = written.table(rows=list(rows))
        return getattr(written, suffix)(tmp_path / name, table)

    for number in range(5):
        write(f"{number}.{suffix}", [number])
    samples = SampleSet.open(tmp_path)
    write("other", [9]).replace(tmp_path / f"1.{suffix}")
    with pytest.raises(DataError, match=rf"1\.{suffix} was replaced"):
        samples.at([1])


def test_remote_arrays_are_copied_once():
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for number in range(4):
        system.pipe(f"{root}/{number}.npy", written.npy(X + number))
    samples = SampleSet.open(f"memory:/{root}")
    digest = samples.digest()
    system.pipe(f"{root}/0.npy", written.npy(X - 1))
    system.rm(f"{root}/1.npy")
    np.testing.assert_array_equal(samples.at([0])["input"], X[:1])
    assert samples.digest() == digest


def test_remote_file_replaced_while_copying_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gate.data.location._CHECK_INTERVAL_S", 0.0)
    path = write_npy(tmp_path)
    cached = RemoteFile.cached

    def cache_and_touch(file, folder):
        copy = cached(file, folder)
        touch_later(path)
        return copy

    monkeypatch.setattr(RemoteFile, "cached", cache_and_touch)
    with pytest.raises(DataError, match=r"x\.npy was replaced .* its copy"):
        SampleSet.open(f"file://{path}")
