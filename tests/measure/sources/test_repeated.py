"""A source that gives another sample than before, and a file that is written to meanwhile."""

import os
import uuid

import fsspec
import numpy as np
import pytest

from gate import SampleSet
from gate.data.location import RemoteFile
from gate.errors import DataError
from tests.measure.sources import factories, written
from tests.measure.sources.factories import HERE, Map, X


def everything(samples, size=4):
    return [batch["input"] for batch in samples.batches(size)]


@pytest.mark.parametrize("again", [
    everything,
    lambda s: s.at([7]),
    lambda s: s.take([7]),
    lambda s: everything(s.slice(5, 9)),
    lambda s: s.slice(6, 8).digest(),
])  # fmt: skip
def test_another_sample_the_second_time_is_named(again):
    samples = SampleSet.open(f"{HERE}:changing")
    samples.digest()
    with pytest.raises(DataError, match="sample 7 of .*shuffles, augments or changes"):
        again(samples)


def test_what_is_beside_it_is_still_there():
    samples = SampleSet.open(f"{HERE}:changing")
    everything(samples)
    everything(samples.slice(0, 7))
    np.testing.assert_array_equal(samples.at([8])["input"], X[[8]])


def test_another_label_is_another_sample():
    samples = SampleSet.open(f"{HERE}:relabelled")
    samples.labels()
    with pytest.raises(DataError, match="sample 3 of"):
        everything(samples)


def test_a_shuffled_set_has_another_digest_in_each_process(monkeypatch):
    orders = iter((range(11), [0, 2, 1, *range(3, 11)]))
    monkeypatch.setattr(factories, "shuffled", lambda: X[list(next(orders))], raising=False)
    one, other = (SampleSet.open(f"{HERE}:shuffled") for _ in range(2))
    assert one.slice(1, 2).digest() != other.slice(1, 2).digest()
    assert one.slice(3, 11).digest() == other.slice(3, 11).digest()


def test_each_sample_is_read_twice_for_digest_labels_and_measuring(monkeypatch):
    asked = []
    data = Map(lambda place: asked.append(place) or (X[place], 1))
    monkeypatch.setattr(factories, "counted", lambda: data, raising=False)
    samples = SampleSet.open(f"{HERE}:counted")
    asked.clear()
    samples.digest()
    samples.labels()
    everything(samples)
    samples.allow_nan().digest()
    assert sorted(asked) == sorted([*range(11)] * 2)


def later(path):
    """As written a second later: clocks of file systems are coarse."""
    soon = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(soon, soon))


def npy(folder):
    np.save(folder / "x.npy", X)
    return folder / "x.npy"


WRITTEN = {
    "npy": npy,
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
def test_a_file_that_is_written_to_meanwhile(kind, at, tmp_path, monkeypatch):
    monkeypatch.setattr("gate.data.location._CHECK_INTERVAL_S", 0.0)
    path = WRITTEN[kind](tmp_path)
    batches = SampleSet.open(at.format(path)).batches(4)
    next(batches)
    with path.open("r+b") as file:
        file.seek(-60, os.SEEK_END)
        file.write(b"other bytes")
    later(path)
    with pytest.raises(DataError, match=r"x\.(npy|tar|parquet) was .*sample"):
        list(batches)


def test_a_file_that_was_cut_off_meanwhile_does_not_end_the_process(tmp_path):
    path = npy(tmp_path)
    samples = SampleSet.open(path)
    os.truncate(path, 128)
    with pytest.raises(DataError, match="samples 0 to 3"):
        everything(samples)


@pytest.mark.parametrize("kind", ["npy", "tar"])
def test_a_file_that_was_exchanged_or_deleted_stays_as_it_was(kind, tmp_path):
    samples = SampleSet.open(WRITTEN[kind](tmp_path))
    (path,) = tmp_path.iterdir()
    other = tmp_path / "other"
    other.write_bytes(b"other")
    other.replace(path)
    np.testing.assert_array_equal(np.concatenate(everything(samples)), X)
    path.unlink()
    np.testing.assert_array_equal(np.concatenate(everything(samples)), X)


@pytest.mark.parametrize("suffix", ["tar", "arrow", "parquet"])
def test_a_file_that_was_exchanged_before_it_is_opened_again(suffix, tmp_path):
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


def test_arrays_of_a_store_are_copied_once_and_read_to_the_end():
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for number in range(4):
        system.pipe(f"{root}/{number}.npy", written.npy(X + number))
    samples = SampleSet.open(f"memory:/{root}")
    digest = samples.digest()
    system.pipe(f"{root}/0.npy", written.npy(X - 1))
    system.rm(f"{root}/1.npy")
    np.testing.assert_array_equal(samples.at([0])["input"], X[:1])
    assert samples.digest() == digest


def test_a_file_of_a_store_that_is_exchanged_while_it_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr("gate.data.location._CHECK_INTERVAL_S", 0.0)
    path = npy(tmp_path)
    cached = RemoteFile.cached

    def exchanged(file, folder):
        copy = cached(file, folder)
        later(path)
        return copy

    monkeypatch.setattr(RemoteFile, "cached", exchanged)
    with pytest.raises(DataError, match=r"x\.npy was replaced .* its copy"):
        SampleSet.open(f"file://{path}")
