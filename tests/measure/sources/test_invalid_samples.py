"""Invalid and malicious samples are refused before they use memory or disk."""

import errno
import os
import pickle
import struct
import tarfile
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from gate import PreprocessSpec, SampleSet
from gate.errors import DataError, StorageError
from tests.measure.sources import factories, written
from tests.measure.sources.factories import HERE, Map, Raising, Stream, X, replace_item
from tests.measure.sources.written import member, members, npy, tar

SPEC = PreprocessSpec()


class ExitOnUnpickle:
    """An object that ends the process when it is unpickled."""

    def __reduce__(self):
        return os._exit, (66,)


def npy_with_header(shape, dtype="<f4", data=b""):
    """Return an .npy file whose header states more data than the file has."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def huge_png():
    """Return a small PNG file whose header states 100 000 x 100 000 pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def register_factory(monkeypatch, data):
    """Register a factory that returns `data`, and return its name."""
    monkeypatch.setattr(factories, "spoiled", lambda: data, raising=False)
    return f"{HERE}:spoiled"


ITEMS = {
    "another shape": (X[0][:1], r"sample 5 .*\(1, 3\), sample 0 .*\(2, 3\)"),
    "another dtype": (X[0].astype(np.float64), "sample 5 .*float64"),
    "a label where none is": ((X[0], 1), "sample 5 .*has a label"),
    "other inputs": ({"input": X[0], "mask": X[0]}, "sample 5 .*'mask'"),
    "None": (None, "sample 5 .*None"),
    "a list": ([1, 2, 3], "sample 5 .*type list"),
    "Python objects": (np.array([ExitOnUnpickle()], dtype=object), "sample 5 .*dtype object"),
    "bfloat16": (torch.zeros(2, 3, dtype=torch.bfloat16), "sample 5 .*bfloat16"),
    "a sparse tensor": (torch.eye(3).to_sparse(), "sample 5 .*Tensor of torch.float32"),
    "complex numbers": (X[0].astype(complex), "dtype complex"),
    "nothing in it": (X[0][:0], "nothing to measure"),
    "a picture without a spec": (b"\x89PNG", "--preprocessing"),
}


@pytest.mark.parametrize("make", [Map, Stream], ids=["by place", "in order"])
@pytest.mark.parametrize("kind", ITEMS)
def test_item_unlike_the_first_is_refused(kind, make, monkeypatch):
    item, words = ITEMS[kind]
    data = make(replace_item(5, item).item)
    with pytest.raises(DataError, match=words):
        list(SampleSet.open(register_factory(monkeypatch, data)).batches(4))


FIRST = {
    "a label that is no index": ((X[0], X[0]), "second item is ndarray of float32"),
    "a negative label": ((X[0], -1), "sample 0 .*label -1.*#label="),
    "a label beyond int64": ((X[0], 2**63), "label 9223372036854775808"),
    "an unsigned label beyond int64": ((X[0], np.uint64(2**64 - 1)), "label 18446744073709551615"),
    "three parts": ((X[0], X[0], 1), "type tuple"),
    "only a label": ({"label": 1}, "has no input"),
    "longdouble": (X[0].astype(np.longdouble), "dtype"),
}


class NoLength(Map):
    def __len__(self):
        raise RuntimeError("the index is away")


class Closed(Stream):
    def __iter__(self):
        raise OSError("no disk")


SETS = {
    "no samples": (lambda: [], "0 samples: nothing to measure"),
    "an empty stream": (lambda: iter(()), "no sample: nothing to measure"),
    "a DataLoader": (factories.loader, "DataLoader, expected single samples"),
    "a dict": (lambda: {"x": X}, "returned a dict"),
    "a text": (lambda: "samples.npy", "returned a str"),
    "None": (lambda: None, "returned NoneType, expected a callable"),
    "an error": (
        lambda: Raising(ValueError("cannot decode")),
        "sample 4 .*ValueError: cannot decode",
    ),
    "an exit": (lambda: Raising(SystemExit(0)), "sample 4 .*SystemExit"),
    "too short": (lambda: Raising(IndexError("end")), "sample 4 .*IndexError"),
    "an end": (lambda: Raising(StopIteration()), "sample 4 .*StopIteration"),
    "an error in a stream": (lambda: Stream(Raising(KeyError("x")).item), "sample 4 .*KeyError"),
    "no length": (lambda: NoLength(None), r"len\(\) of .*the index is away"),
    "a stream that does not begin": (lambda: Closed(None), "iterable of .*no disk"),
}


@pytest.mark.parametrize(("make", "words"), [
    *(pytest.param(lambda item=item: [item], words, id=kind) for kind, (item, words) in FIRST.items()),
    *(pytest.param(*row, id=kind) for kind, row in SETS.items()),
])  # fmt: skip
def test_invalid_first_item_or_failing_data_set_is_refused(make, words, monkeypatch):
    with pytest.raises(DataError, match=words):
        list(SampleSet.open(register_factory(monkeypatch, make())).batches(4))


@pytest.mark.parametrize(("factory", "words"), [
    (f"{HERE}:raising", "raised RuntimeError: no data here.*factories.py"),
    (f"{HERE}:nothing", "has no 'nothing'"),
    (f"{HERE}:PID", "an object of type int, expected a callable .*Dataset"),
    ("no_such_package.data:build", "no module named 'no_such_package'"),
])  # fmt: skip
def test_invalid_factory_is_refused(factory, words):
    with pytest.raises(DataError, match=words):
        SampleSet.open(factory)


def test_endless_stream_is_stopped(monkeypatch):
    monkeypatch.setattr("gate.data.datasets._RESERVED_BYTES", 1 << 8)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 9})())
    endless = Stream(lambda index: X[0], 1 << 12)
    with pytest.raises(StorageError, match="after 11 of them.*check that it ends"):
        SampleSet.open(register_factory(monkeypatch, endless))


TARS = {
    "a pickle": ([*members([0]), member("1.npy", npy(np.array([ExitOnUnpickle()], dtype=object))), member("1.cls", b"1")], "Python objects"),
    "a bare pickle": ([member("0001.npy", pickle.dumps(ExitOnUnpickle()))], "cannot read npy of sample 0"),
    "more than there is": ([member("0.npy", npy_with_header((1 << 40,)))], "4398046511104 bytes"),
    "less than there is": ([member("0.npy", npy_with_header((1,), data=bytes(8)))], "4 bytes of numbers, but 8 bytes"),
    "negative shape": ([member("0.npy", npy_with_header((-4,), data=bytes(4)))], "sample 0"),
    "code in the header": ([member("0.npy", npy_with_header("__import__('os')._exit(66)"))], "cannot read"),
    "a way out": ([member("../../0.npy", npy(X[0]))], "is outside of its folder"),
    "the root": ([member("/etc/0.npy", npy(X[0]))], "is outside of its folder"),
    "a link": ([member("0.npy", type=tarfile.SYMTYPE, linkname="/etc/passwd")], "is a link"),
    "a hard link": ([member("0.npy", type=tarfile.LNKTYPE, linkname="1.npy")], "is a link"),
    "a device": ([member("0.npy", type=tarfile.CHRTYPE)], "a device"),
    "one name twice": ([member("0.npy", npy(X[0])), member("0.npy", npy(X[1]))], "0.npy twice"),
    "one sample in two places": ([*members([0, 1]), *members([0])], "0000 in two places"),
    "a field twice": ([member("0.npy", npy(X[0])), member("0.png", b"")], "one field twice"),
    "another field": ([*members([0]), member("1.npy", npy(X[1]))], "sample 1 of"),
    "other shapes": ([*members([0]), member("1.npy", npy(X[1][:1])), member("1.cls", b"1")], "sample 1 of"),
    "a label that is none": ([member("0.npy", npy(X[0])), member("0.cls", b"cat")], "b'cat', expected a class"),
    "a label beyond int64": ([member("0.npy", npy(X[0])), member("0.cls", b"9" * 19)], "int64"),
    "a label of a megabyte": ([member("0.npy", npy(X[0])), member("0.cls", b"9" * 1_000_000)], "int64"),
    "a negative label": ([member("0.npy", npy(X[0])), member("0.cls", b"-1")], "b'-1'"),
    "only texts": ([member("0.json", b"{}"), member("0.pth", pickle.dumps(ExitOnUnpickle()))], "neither arrays"),
    "no members": ([], "neither arrays"),
    "a bomb": ([member("0.png", huge_png())], "10000000000 pixels"),
    "half a picture": ([member("0.png", huge_png()[:40])], "not a complete picture"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TARS)
def test_invalid_tar_is_refused(kind, tmp_path):
    tar_members, words = TARS[kind]
    path = tar(tmp_path / "x.tar", tar_members)
    with pytest.raises(DataError, match=words):
        list(SampleSet.open(path, preprocessing=SPEC).batches(4))
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


def test_huge_tar_member_is_refused(tmp_path):
    info, _ = member("0.npy")
    info.size = 1 << 50
    (tmp_path / "x.tar").write_bytes(info.tobuf() + bytes(1024))
    with pytest.raises(DataError, match="more than 1073741824"):
        SampleSet.open(tmp_path / "x.tar")


@pytest.mark.parametrize("left", [3072, 3000, 512 * 3, 100, 0])
def test_truncated_tar_is_refused(left, tmp_path):
    path = tar(tmp_path / "x.tar", members())
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match=r"cannot read|no end"):
        SampleSet.open(path)


def column(values, kind=None):
    return pa.table({"input": pa.array(values, kind)})


FLOATS = pa.list_(pa.float32())
COLUMNS = {
    "ragged lists": (column([[1.0, 2.0], [1.0, 2.0], [1.0]], FLOATS), r"sample 2 has shape 1"),
    "no value": (column([[1.0], None], FLOATS), "sample 1 has no value"),
    "no value in a list": (column([[1.0, 2.0], [1.0, None]], FLOATS), "sample 1 has no value"),
    "no value in a tensor": (pa.table({"input": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), (2,)), pa.array([[1.0, 2.0], [3.0, None]], pa.list_(pa.float32(), 2)))}), "sample 1 has no value"),
    "empty lists": (column([[], []], FLOATS), "sample 0 has an empty list"),
    "texts": (column(["a", "b"]), "--preprocessing"),
    "times": (column(np.zeros(2, "M8[s]")), "has type timestamp"),
    "structs": (column([{"a": 1}]), "has type struct"),
    "no rows": (column([], FLOATS), "no rows"),
    "a label beyond int64": (pa.table({"input": [1.0], "label": pa.array([2**63], pa.uint64())}), "sample 0 is 9223372036854775808.*#label="),
    "a negative label": (pa.table({"input": [1.0, 2.0], "label": [0, -1]}), "sample 1 is -1"),
    "only a label": (pa.table({"label": [1]}), "only a label column"),
    "two of one name": (pa.Table.from_arrays([pa.array([1.0])] * 2, ["x", "x"]), "two columns with the same name"),
}  # fmt: skip


@pytest.mark.parametrize("write", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", COLUMNS)
def test_invalid_columns_are_refused(kind, write, tmp_path):
    table, words = COLUMNS[kind]
    path = getattr(written, write)(tmp_path / f"x.{write}", table)
    with pytest.raises(DataError, match=words):
        list(SampleSet.open(path).batches(4))


@pytest.mark.parametrize("size", [4, 8])
def test_lists_of_different_length_are_refused(size, tmp_path):
    table = column([[1.0, 2.0]] * 4 + [[1.0, 2.0, 3.0]] * 4, FLOATS)
    samples = SampleSet.open(written.arrow(tmp_path / "x.arrow", table))
    with pytest.raises(DataError, match="Give all samples the same shape"):
        list(samples.batches(size))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
@pytest.mark.parametrize("spoil", [
    lambda d: b"",
    lambda d: d[: len(d) // 2],
    lambda d: bytes(len(d)),
    lambda d: pickle.dumps(ExitOnUnpickle()),
])  # fmt: skip
def test_corrupt_columnar_file_is_refused(name, spoil, tmp_path):
    path = tmp_path / name
    getattr(written, "parquet" if name == "x.parquet" else "arrow")(path, written.table())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match="cannot read"):
        SampleSet.open(path)


def test_corrupt_parquet_page_is_refused(tmp_path):
    path = written.parquet(
        tmp_path / "x.parquet", written.table(), compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xff" * 36
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="cannot read"):
        SampleSet.open(path).digest()


@pytest.mark.parametrize(("text", "words"), [
    ("x.parquet#inputs=a&inputs=b", "each once"),
    ("x.parquet#inputs=a&rows=b", "cannot read the fields"),
    ("x.parquet", "x.parquet"),
    ("x.tar", "x.tar"),
    ("x.zip", "does not exist"),
    ("x" * 5000, "File name too long"),
    ("a\0b", "does not exist"),
    ("there.npy#inputs=input", "no fields to choose"),
    ("memory://nowhere/x.parquet", "cannot open memory://"),
    ("memory://nowhere/x.npy", "cannot open memory://"),
    ("nowhere://a/b", "cannot open nowhere://a/b.*Install"),
    ("nowhere://me:secret@host/b", r"cannot open nowhere://host/b"),
])  # fmt: skip
def test_invalid_location_is_refused(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("there.npy", X)
    with pytest.raises(DataError, match=words) as raised:
        SampleSet.open(text)
    assert "secret" not in str(raised.value)


def test_folder_with_other_files_is_refused(tmp_path):
    tar(tmp_path / "0.tar", members())
    (tmp_path / "labels.csv").write_text("0")
    with pytest.raises(DataError, match=r"labels\.csv"):
        SampleSet.open(tmp_path)
    with pytest.raises(DataError, match=r"labels\.csv"):
        SampleSet.open(f"file://{tmp_path}")
    (tmp_path / "labels.csv").unlink()
    written.parquet(tmp_path / "1.parquet", written.table())
    with pytest.raises(DataError, match=r"mixes \.parquet and \.tar"):
        SampleSet.open(tmp_path)


def test_shards_with_different_columns_are_refused(tmp_path):
    written.parquet(tmp_path / "0.parquet", written.table())
    written.parquet(tmp_path / "1.parquet", written.table().drop_columns("label"))
    with pytest.raises(DataError, match=r"1\.parquet differ"):
        SampleSet.open(tmp_path)


def test_remote_file_without_disk_space_is_refused(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X)
    url = f"file://{tmp_path}/x.npy"
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
        with pytest.raises(StorageError, match="not enough space to copy .*TMPDIR"):
            SampleSet.open(url)
    for error, kind in ((errno.ENOSPC, StorageError), (errno.EIO, DataError)):
        with monkeypatch.context() as patched:
            patched.setattr("fsspec.filesystem", BrokenCache(error))
            with pytest.raises(kind, match="not enough space to copy|cannot read"):
                SampleSet.open(url)
    monkeypatch.setattr("gate.data.location.RemoteFile.size", 100)
    with pytest.raises(DataError, match="longer than the size that its store"):
        SampleSet.open(url)


class BrokenCache:
    """A file system whose cache raises the given OS error."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *_, **__):
        return self

    def open(self, *_):
        raise OSError(self.number, os.strerror(self.number))


def test_tar_truncated_after_opening_is_refused(tmp_path, monkeypatch):
    path = tar(tmp_path / "x.tar", members())
    samples = SampleSet.open(path)
    monkeypatch.setattr("gate.data.location.LocalFile.check", lambda *_: None)
    os.truncate(path, 3000)
    with pytest.raises(DataError, match="sample 9 of .* is truncated"):
        samples.at([9])


def test_picture_with_too_many_bytes_or_pixels_is_refused(tmp_path, monkeypatch):
    image = Image.new("RGB", (16, 16))
    image.save(tmp_path / "x.png")
    monkeypatch.setattr("gate.data.datasets.MAX_BYTES", 16)
    monkeypatch.setattr("gate.data.datasets.MAX_PIXELS", 255)
    for item, words in (
        (tmp_path / "x.png", "more than 16 bytes"),
        (image, "16 x 16 pixels, the maximum is 255"),
    ):
        with pytest.raises(DataError, match=words):
            SampleSet.open(register_factory(monkeypatch, [item]), preprocessing=SPEC)
