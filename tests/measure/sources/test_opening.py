"""Every source of the same samples gives equal samples and digests."""

import uuid

import fsspec
import numpy as np
import pytest

from gate import PreprocessSpec, SampleSet
from gate.errors import DataError
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.spec import Resize
from tests.measure.sources import written
from tests.measure.sources.factories import HERE, IDS, PIXELS, X, Y, encode_png

SPEC = PreprocessSpec(resize=Resize(size=(4, 4)))
TENSORS = np.stack([pillow_preprocess(picture, SPEC) for picture in PIXELS])
FACTORIES = [f"{HERE}:{name}" for name in ("pairs", "tensors", "records", "stream", "generator")]


def write_shards(suffix, write):
    def save(folder):
        for number, rows in enumerate((range(4), range(4, 5), range(5, 11))):
            write(folder / f"{number}{suffix}", rows)
        return folder

    return save


def table_slice(rows):
    return written.table(rows=slice(rows.start, rows.stop))


FILES = {
    "parquet": lambda d: written.parquet(d / "x.parquet", written.table(), row_group_size=4),
    "one row group": lambda d: written.parquet(d / "x.parquet", written.table()),
    "lists": lambda d: written.parquet(d / "x.parquet", written.table(written.ragged)),
    "tensors": lambda d: written.parquet(d / "x.parquet", written.table(written.tensor)),
    "arrow": lambda d: written.arrow(d / "x.arrow", written.table()),
    "arrow stream": lambda d: written.arrow(d / "x.arrow", written.table(), streamed=True),
    "feather": lambda d: written.arrow(d / "x.feather", written.table(written.tensor)),
    "tar": lambda d: written.tar(d / "x.tar", written.members()),
    "as Spark leaves it": lambda d: (
        (d / "_SUCCESS").touch()
        or write_shards(".parquet", lambda p, rows: written.parquet(p, table_slice(rows)))(d)
    ),
    "parquet shards": write_shards(
        ".parquet", lambda p, rows: written.parquet(p, table_slice(rows))
    ),
    "tar shards": write_shards(".tar", lambda p, rows: written.tar(p, written.members(rows))),
}


def assert_same_samples(samples, *, labels=True):
    """Assert that the samples are X and Y for every way to read them."""
    assert len(samples) == 11
    assert [(s.name, s.dtype, s.shape) for s in samples.specs] == [
        ("input", "float32", ("samples", 2, 3))
    ]
    np.testing.assert_array_equal(samples.at([7, 2, 2, 3])["input"], X[[7, 2, 2, 3]])
    for size in (1, 4, 50):
        batches = [batch["input"] for batch in samples.batches(size)]
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert batches[0].flags.writeable
        np.testing.assert_array_equal(np.concatenate(batches), X)
    (picked,) = samples.take([10, 0]).batches(5)
    np.testing.assert_array_equal(picked["input"], X[[10, 0]])
    assert samples.digest() == SampleSet.from_arrays({"input": X}).digest()
    part = samples.slice(3, 9)
    assert part.digest() == SampleSet.from_arrays({"input": X[3:9]}).digest()
    np.testing.assert_array_equal(part.at([1])["input"], X[[4]])
    if labels:
        np.testing.assert_array_equal(part.labels(), Y[3:9])
        np.testing.assert_array_equal(samples.labels(), Y)
    else:
        assert samples.labels() is None


@pytest.mark.parametrize("factory", FACTORIES)
def test_data_set_factories(factory):
    assert_same_samples(SampleSet.open(factory))


@pytest.mark.parametrize("name", ["unlabelled", "array", "records#label=", "pairs#label="])
def test_unlabeled_data_sets(name):
    if name == "records#label=":  # here the label is an input
        assert SampleSet.open(f"{HERE}:records#label=").names == ("input", "label")
    else:
        assert_same_samples(SampleSet.open(f"{HERE}:{name}"), labels=False)


@pytest.mark.parametrize("kind", FILES)
def test_file_formats(kind, tmp_path):
    assert_same_samples(SampleSet.open(FILES[kind](tmp_path)))


@pytest.mark.parametrize(
    "kind", ["parquet", "arrow", "arrow stream", "tar", "tar shards", "npy", "npz", "npy shards"]
)
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_remote_files(kind, scheme, tmp_path, monkeypatch):
    temporary, source = tmp_path / "temporary", tmp_path / "source"
    temporary.mkdir()
    source.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    plain = {
        "npy": lambda d: np.save(d / "x.npy", X) or d / "x.npy",
        "npz": lambda d: np.savez(d / "x.npz", input=X) or d / "x.npz",
        "npy shards": write_shards(".npy", lambda p, rows: np.save(p, X[rows.start : rows.stop])),
    }
    path = (FILES | plain)[kind](source)
    url = f"file://{path}"
    if scheme == "memory":
        system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
        system.put(str(path), f"{root}/{path.name}", recursive=True)
        url = f"memory:/{root}/{path.name}"
    samples = SampleSet.open(url)
    assert_same_samples(samples, labels=kind not in plain)
    assert list(temporary.iterdir()) == []


def test_inputs_are_selected_by_name():
    samples = SampleSet.open(f"{HERE}:named#inputs=ids,image")
    assert samples.names == ("ids", "image")
    assert samples.digest() == SampleSet.from_arrays({"ids": IDS, "image": X}).digest()


def test_array_field_called_label_is_an_input():
    samples = SampleSet.open(f"{HERE}:strange_label")
    assert (samples.names, samples.labels()) == (("input", "label"), None)


def test_columns_are_selected_by_name(tmp_path):
    table = written.table().append_column("digit", written.pa.array(Y[::-1]))
    table = table.append_column("path", written.pa.array(["x"] * 11))
    path = written.parquet(tmp_path / "x.parquet", table)
    samples = SampleSet.open(f"{path}#inputs=input&label=digit")
    np.testing.assert_array_equal(samples.labels(), Y[::-1])
    assert SampleSet.open(f"{path}#inputs=label,input&label=").names == ("label", "input")
    with pytest.raises(DataError, match=r"no field 'pixels'.*input, label, digit, path"):
        SampleSet.open(f"{path}#inputs=pixels")
    with pytest.raises(DataError, match="--preprocessing SPEC.*#inputs=FIELD"):
        SampleSet.open(path)


def write_pictures_parquet(folder):
    struct = [{"bytes": encode_png(index), "path": None} for index in range(5)]
    table = written.pa.table({"input": struct, "label": range(5)})
    return written.parquet(folder / "x.parquet", table)


def write_pictures_tar(folder):
    return written.tar(
        folder / "x.tar",
        (written.member(f"{index}.{kind}", data) for index in range(5)
         for kind, data in (("PNG", encode_png(index)), ("cls", b"%d" % index))),
    )  # fmt: skip


def write_picture_files(folder):
    for index in range(5):
        (folder / f"{index}.png").write_bytes(encode_png(index))
    return f"{HERE}:picture_paths"


@pytest.mark.parametrize(
    "source",
    [write_pictures_parquet, write_pictures_tar, write_picture_files,
     *(lambda _, name=name: f"{HERE}:{name}" for name in ("pictures", "picture_bytes", "picture_stream"))],
)  # fmt: skip
def test_pictures_are_preprocessed(source, tmp_path, monkeypatch):
    path = source(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path.cwd()))
    monkeypatch.chdir(tmp_path)
    samples = SampleSet.open(path, preprocessing=SPEC)
    assert samples.digest() == SampleSet.from_arrays({"input": TENSORS}).digest()
    np.testing.assert_array_equal(samples.labels(), range(5))
    with pytest.raises(DataError, match="--preprocessing"):
        SampleSet.open(path)
