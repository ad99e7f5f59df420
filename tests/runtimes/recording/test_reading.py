"""A recording is read as what a stranger wrote: what is not whole is refused before it is used, and
nothing outside of it is touched."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gate.distributed.external_runtime import Packing
from gate.errors import GateError
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.recording_format import Recording, RecordingSource, row_digests
from gate.storage.digest import Digest
from tests.runtimes import consumer

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    np.save(folder / "x.npy", ROWS)
    np.save(folder / "y.npy", 2 * ROWS)
    spec = TensorSpec(name="x", dtype="float32", shape=("n", 3))
    subject = Subject(
        sha256=Digest.from_bytes(b"file"), size_bytes=1, opset=17, producer="", inputs=(spec,),
        outputs=(spec.model_copy(update={"name": "y"}),),
    )  # fmt: skip
    packing = Packing(
        subject, folder / "x.npy", folder / "y.npy", RecordingSource.model_validate(consumer.META)
    )
    packing.write(folder / "recording")
    packing.write(folder / "recording.zip")
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole / "recording", tmp_path / "recording")


@pytest.mark.parametrize("name", ["recording", "recording.zip"])
def test_a_whole_one_is_read(whole, name):
    recording = Recording(whole / name)
    assert np.array_equal(recording.outputs["samples"][0], 2 * ROWS)
    assert recording.rows.shape == (4, 32)
    assert recording.manifest.whence.device == "Jetson Orin Nano"


def edited(folder: Path, change) -> None:
    plain = json.loads((folder / "manifest.json").read_text())
    change(plain)
    (folder / "manifest.json").write_text(json.dumps(plain))


def output(plain):
    return plain["parts"][0]["outputs"][0]


def replaced(array, **settings):
    """Another array, with the digest of it in the manifest."""

    def spoil(folder):
        np.save(folder / "samples/0.npy", array, **settings)
        digest = str(Digest.from_file(folder / "samples/0.npy"))
        edited(folder, lambda plain: output(plain).update(sha256=digest))

    return spoil


def cut(folder):
    os.truncate(folder / "samples/0.npy", 150)


def grown(folder):
    with (folder / "samples/0.npy").open("ab") as file:
        file.write(b"\0" * 8)


def other_numbers(folder):
    np.save(folder / "samples/0.npy", ROWS)


def removed(folder):
    (folder / "samples/0.npy").unlink()


def link(folder):
    (folder / "samples/0.npy").rename(folder.parent / "outside.npy")
    (folder / "samples/0.npy").symlink_to(folder.parent / "outside.npy")


def pipe(folder):
    (folder / "samples/0.npy").unlink()
    os.mkfifo(folder / "samples/0.npy")


def other_rows(folder):
    np.save(folder / "rows.npy", np.zeros((4, 32), np.uint8))
    digest = str(Digest.from_file(folder / "rows.npy"))
    edited(folder, lambda plain: plain["rows"].update(sha256=digest))


def named(file):
    def spoil(folder):
        np.save(folder.parent / "outside.npy", 2 * ROWS)
        edited(folder, lambda plain: output(plain).update(file=file))

    return spoil


def said(**fields):
    return lambda folder: edited(folder, lambda plain: output(plain).update(fields))


def no_manifest(folder):
    (folder / "manifest.json").unlink()


def nonsense(folder):
    (folder / "manifest.json").write_bytes(b"\x80\x04 no json")


def deep(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


def two_parts(folder):
    edited(folder, lambda plain: plain["parts"].append(plain["parts"][0]))


def no_samples(folder):
    edited(folder, lambda plain: plain["parts"][0].update(name="batch_1"))


def fewer_rows(folder):
    edited(folder, lambda plain: plain["parts"][0].update(size=3))


def neither(folder):
    edited(folder, lambda plain: plain["parts"][0].update(outputs=[]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "holds 22 bytes of numbers, not 48"),
        (grown, "holds 56 bytes of numbers, not 48"),
        (other_numbers, "another digest"),
        (removed, "No such file"),
        (link, "can't be read"),
        (pipe, "not a regular file"),
        (other_rows, "sample digests that differ"),
        (named("../outside.npy"), "not a path inside"),
        (named("/dev/zero"), "not a path inside"),
        (said(shape=[1 << 40, 3]), "rows on axis 0"),
        (said(shape=[4, 1 << 50]), "are 18014398509481984 and"),
        (said(shape=[4, 4]), "says float32 .4, 4."),
        (said(dtype="object"), "should match pattern"),
        (said(dtype="int32"), "manifest says int32"),
        (replaced(np.array([[None] * 3] * 4), allow_pickle=True), "bytes|object"),
        (replaced(np.asfortranarray(2 * ROWS)), "by columns"),
        (replaced((2 * ROWS).astype(">f4")), "manifest says"),
        (no_manifest, "No such file"),
        (nonsense, "not valid JSON"),
        (deep, "nested"),
        (two_parts, "each once"),
        (no_samples, "must be first"),
        (fewer_rows, "rows"),
        (neither, "either outputs or failed"),
    ],
)
def test_what_is_not_whole_is_refused(folder, spoil, words):
    spoil(folder)
    with pytest.raises(GateError, match=words):
        Recording(folder)


def zipped(path: Path, folder: Path, *, compression=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in folder.rglob("*.*"):
            archive.write(file, file.relative_to(folder).as_posix())
    return path


def test_a_zip_bomb_is_refused_before_it_unpacks(folder, tmp_path):
    path = zipped(tmp_path / "bomb.zip", folder, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(GateError, match="compressed"):
        Recording(path)


def test_a_zip_whose_members_overlap_is_refused(folder, tmp_path):
    path = zipped(tmp_path / "one.zip", folder)
    archive = zipfile.ZipFile(path)
    member = archive.getinfo("samples/0.npy")
    data = bytearray(path.read_bytes())
    place = data.rindex(b"samples/0.npy") - 46  # the entry in the directory at the end
    assert data[place : place + 4] == b"PK\1\2"
    larger = (member.file_size + len(data)).to_bytes(4, "little")
    data[place + 20 : place + 28] = larger + larger
    path.write_bytes(data)
    with pytest.raises(GateError, match="overlap"):
        Recording(path)


@pytest.mark.parametrize("content", [b"", b"PK\5\6" + b"\0" * 18, b"no zip at all"])
def test_what_is_no_zip_is_refused(tmp_path, content):
    (tmp_path / "recording.zip").write_bytes(content)
    with pytest.raises(GateError, match="can't be read"):
        Recording(tmp_path / "recording.zip")


def test_the_arrays_outlive_the_files(folder):
    recording = Recording(folder)
    shutil.rmtree(folder)
    assert np.array_equal(recording.outputs["samples"][0], 2 * ROWS)


X = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(4)


def test_a_batch_has_the_digests_of_its_parts():
    whole = row_digests({"x": X, "ids": IDS})
    parts = [row_digests({"ids": IDS[s : s + 3], "x": X[s : s + 3]}) for s in (0, 3)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert len({row.tobytes() for row in whole}) == 4


def test_byte_order_and_layout_do_not_matter():
    plain = row_digests({"x": X})
    assert np.array_equal(plain, row_digests({"x": X.astype(">f4")}))
    assert np.array_equal(plain, row_digests({"x": np.asfortranarray(X)}))


@pytest.mark.parametrize(
    "other",
    [{"y": X}, {"x": X.view(np.int32)}, {"x": X.reshape(4, 3, 1)}, {"x": -X}, {"x": X, "y": IDS}],
)
def test_everything_else_does(other):
    assert not (row_digests({"x": X}) == row_digests(other)).all(axis=1).any()
