import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gate import SampleSet
from gate.data.array_files import MappedRows, Shard, open_labels
from gate.errors import DataError, StorageError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 2, 3)).astype(np.float32)
IDS = RNG.integers(0, 9, size=(11, 4))


def join_batches(samples, size):
    batches = list(samples.batches(size))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in samples.names}


def write_npy(folder):
    np.save(folder / "x.npy", X)
    return folder / "x.npy"


def write_npz(folder):
    np.savez_compressed(folder / "x.npz", input=X)
    return folder / "x.npz"


def write_fortran_order(folder):
    np.save(folder / "x.npy", np.asfortranarray(X))
    return folder / "x.npy"


def write_big_endian(folder):
    np.save(folder / "x.npy", X.astype(">f4"))
    return folder / "x.npy"


def write_npy_shards(folder):
    for number, rows in enumerate((X[:4], X[4:5], X[5:])):
        np.save(folder / f"{number}.npy", rows)
    (folder / ".hidden").write_text("ignored")
    return folder


def write_npz_shards(folder):
    np.savez(folder / "a.npz", input=X[:7])
    np.savez(folder / "b.npz", input=X[7:])
    return folder


@pytest.mark.parametrize(
    "save",
    [
        write_npy,
        write_npz,
        write_fortran_order,
        write_big_endian,
        write_npy_shards,
        write_npz_shards,
    ],
)
def test_each_file_format_gives_the_same_samples_and_digest(tmp_path, save):
    samples = SampleSet.open(save(tmp_path))

    assert len(samples) == 11
    assert [(s.name, s.dtype, s.shape) for s in samples.specs] == [
        ("input", "float32", ("samples", 2, 3))
    ]
    for size in (1, 3, 11, 50):
        np.testing.assert_array_equal(join_batches(samples, size)["input"], X)
    assert samples.digest() == SampleSet.from_arrays({"input": X}).digest()


def test_batches_are_native_writable_copies(tmp_path):
    samples = SampleSet.open(write_big_endian(tmp_path))
    batch = next(samples.batches(4))["input"]
    assert batch.flags.writeable
    assert batch.flags.c_contiguous
    assert batch.dtype.isnative
    batch[:] = 0
    np.testing.assert_array_equal(next(samples.batches(4))["input"], X[:4])


@pytest.mark.parametrize("other", [
    {"y": X},
    {"x": X.astype(np.float64)},
    {"x": X.reshape(11, 3, 2)},
    {"x": X[:-1]},
    {"x": X[::-1]},
    {"x": X, "y": X},
    {"x": np.nextafter(X, np.float32(9))},
])  # fmt: skip
def test_digest_depends_on_names_dtypes_shapes_and_values(other):
    assert SampleSet.from_arrays(other).digest() != SampleSet.from_arrays({"x": X}).digest()


@given(cuts=st.lists(st.integers(1, 10), max_size=4), size=st.integers(1, 12))
def test_shards_do_not_change_batches_or_digest(cuts, size):
    parts = np.split(X, sorted(set(cuts)))
    samples = SampleSet(MappedRows([Shard({"x": part}) for part in parts], origin="test"))
    np.testing.assert_array_equal(join_batches(samples, size)["x"], X)
    assert samples.digest() == SampleSet.from_arrays({"x": X}).digest()


@given(
    cuts=st.lists(st.integers(1, 10), max_size=3),
    ends=st.lists(st.integers(0, 11), min_size=4, max_size=4),
)
def test_slice_has_the_samples_of_its_range(cuts, ends):
    first, second, third, fourth = sorted(ends)
    assume(first < fourth and second < third)
    parts = np.split(X, sorted(set(cuts)))
    samples = SampleSet(MappedRows([Shard({"x": part}) for part in parts], origin="test"))
    part = samples.slice(first, fourth).slice(second - first, third - first)
    rows = X[second:third]
    assert len(part) == len(rows)
    assert part.digest() == SampleSet.from_arrays({"x": rows}).digest()
    np.testing.assert_array_equal(join_batches(part, 2)["x"], rows)
    np.testing.assert_array_equal(part.at([0, len(rows) - 1])["x"], rows[[0, -1]])
    np.testing.assert_array_equal(join_batches(part.take([len(rows) - 1]), 2)["x"], rows[-1:])


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 4), (4, 12)])
def test_invalid_slice_is_refused(span):
    with pytest.raises(DataError, match="there are no samples"):
        SampleSet.from_arrays({"x": X}).slice(*span)


def test_slice_names_samples_by_index_in_the_whole_set():
    x = X.copy()
    x[8] = np.nan
    part = SampleSet.from_arrays({"x": x}).slice(2, 11).slice(3, 9)
    with pytest.raises(DataError, match=r"sample 8\b"):
        list(part.batches(2))
    assert len(list(part.allow_nan().slice(0, 4).batches(2))) == 2


def save_array(array):
    def save(folder):
        np.save(folder / "x.npy", array, allow_pickle=True)
        return folder / "x.npy"

    return save


def save_shards(first, second):
    def save(folder):
        np.savez(folder / "a.npz", **first)
        np.savez(folder / "b.npz", **second)
        return folder

    return save


def change_bytes(save, change):
    """Return a function that writes the file of `save` with changed bytes."""

    def write(folder):
        path = save(folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def touch_files(*names, of=""):
    """Return a function that writes empty files and returns the path `of` its folder."""

    def save(folder):
        write_npy(folder)
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        return folder / of

    return save


def npz_with_text_member(folder):
    path = write_npz(folder)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")
    return path


PICKLE = np.array([{"a": 1}], dtype=object)
UNUSABLE = [
    (change_bytes(write_npy, lambda data: data[:-5]), "cannot read x.npy"),
    (change_bytes(write_npy, lambda data: data[:20]), "cannot read x.npy"),
    (change_bytes(write_npy, lambda _: b""), "cannot read x.npy"),
    (save_array(PICKLE), "cannot read x.npy"),
    (save_shards({"x": PICKLE}, {"x": PICKLE}), "cannot read"),
    (change_bytes(write_npz, lambda data: data[:60] + bytes(30) + data[90:]), "cannot read x.npz"),
    (change_bytes(write_npz, lambda data: data[:80]), "cannot read x.npz"),
    (save_shards({}, {}), "has no array"),
    (npz_with_text_member, "notes.txt"),
    (lambda folder: folder / "nothing", "does not exist"),
    (lambda folder: folder, "is empty"),
    (touch_files("x.npz"), "mixes"),
    (touch_files("labels.txt"), "labels.txt"),
    (touch_files("cat/1.PNG", of="cat"), "Preprocess"),
    (touch_files("1.jpg", of="1.jpg"), "Preprocess"),
    (touch_files("x.txt", of="x.txt"), "not a .npy or .npz"),
    (save_array(np.float32(3)), "scalar"),
    (save_array(X[:0]), "nothing to measure"),
    (save_array(np.zeros((3, 0), np.float32)), "nothing to measure"),
    (save_array(np.array([b"a", b"b"])), "dtype"),
    (save_array(np.zeros(3, complex)), "dtype"),
    (save_array(np.zeros(3, np.longdouble)), "dtype"),
    (save_array(np.zeros(3, "M8[s]")), "dtype"),
    (save_shards({"x": X}, {"y": X}), "different arrays"),
    (save_shards({"x": X}, {"x": X.astype(float)}), "differ"),
    (save_shards({"x": X}, {"x": X[:, :1]}), "differ"),
    (save_shards({"x": X}, {"x": X[:0]}), "nothing to measure"),
    (save_shards({"x": X, "y": X[:3]}, {"x": X, "y": X}), "different numbers of samples"),
]


@pytest.mark.parametrize(("spoil", "words"), UNUSABLE)
def test_invalid_sample_files_are_refused(tmp_path, spoil, words):
    with pytest.raises(DataError, match=words):
        SampleSet.open(spoil(tmp_path))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_refused_with_their_sample(value):
    x = X.copy()
    x[9, 1, 2] = x[8, 0, 0] = value
    with pytest.raises(DataError, match=r"'image'.*sample 8\b"):
        list(SampleSet.from_arrays({"ids": IDS, "image": x}).batches(4))


def test_npz_without_disk_space_is_a_storage_error(tmp_path, monkeypatch):
    path = write_npz(tmp_path)
    monkeypatch.setattr(
        "gate.data.array_files.shutil.disk_usage", lambda _: type("U", (), {"free": 9})
    )
    with pytest.raises(StorageError, match="TMPDIR"):
        SampleSet.open(path)


def test_labels_are_copied_as_int64(tmp_path):
    path = save_array(np.arange(11, dtype=np.uint8))(tmp_path)
    labels = open_labels(path, samples=11)
    assert labels.dtype == np.int64
    np.lib.format.open_memmap(path, mode="r+")[:] = 0
    np.testing.assert_array_equal(labels, np.arange(11))


@pytest.mark.parametrize("labels", [
    np.arange(10),
    np.arange(11).reshape(11, 1),
    np.arange(11) - 1,
    np.arange(11.0),
    np.ones(11, bool),
    np.full(11, 2**63, np.uint64),
    np.array(0),
])  # fmt: skip
def test_invalid_labels_are_refused(tmp_path, labels):
    with pytest.raises(DataError):
        open_labels(save_array(labels)(tmp_path), samples=11)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
@pytest.mark.parametrize("work", [lambda s: [len(b) for b in s.batches(64)], SampleSet.digest])
def test_read_pages_are_released(tmp_path, work):
    path = tmp_path / "large.npy"
    np.save(path, np.zeros((2048, 1024), np.float32))
    samples = SampleSet.open(path)
    work(samples)
    mapped = Path("/proc/self/smaps").read_text().split(str(path), 1)[1]
    resident = int(re.search(r"^Rss:\s+(\d+) kB", mapped, flags=re.MULTILINE).group(1))
    assert resident < 1024
