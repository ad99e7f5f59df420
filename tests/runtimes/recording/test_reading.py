"""Incomplete or malicious recordings are rejected."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gate import Digest, GateError
from gate.distributed.external_runtime import Packing
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.recording_format import Recording, RecordingSource, row_digests
from tests.runtimes import consumer

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def recording_folder(tmp_path_factory):
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
def folder(recording_folder, tmp_path):
    return shutil.copytree(recording_folder / "recording", tmp_path / "recording")


@pytest.mark.parametrize("name", ["recording", "recording.zip"])
def test_complete_recording_is_read(recording_folder, name):
    recording = Recording(recording_folder / name)
    assert np.array_equal(recording.outputs["samples"][0], 2 * ROWS)
    assert recording.rows.shape == (4, 32)
    assert recording.manifest.whence.device == "Jetson Orin Nano"


def edit_manifest(folder: Path, change) -> None:
    plain = json.loads((folder / "manifest.json").read_text())
    change(plain)
    (folder / "manifest.json").write_text(json.dumps(plain))


def output(plain):
    return plain["parts"][0]["outputs"][0]


def with_array(array, **settings):
    """Return a function that replaces the array and its digest in the manifest."""

    def spoil(folder):
        np.save(folder / "samples/0.npy", array, **settings)
        digest = str(Digest.from_file(folder / "samples/0.npy"))
        edit_manifest(folder, lambda plain: output(plain).update(sha256=digest))

    return spoil


def truncate_array(folder):
    os.truncate(folder / "samples/0.npy", 150)


def append_bytes(folder):
    with (folder / "samples/0.npy").open("ab") as file:
        file.write(b"\0" * 8)


def replace_array(folder):
    np.save(folder / "samples/0.npy", ROWS)


def remove_array(folder):
    (folder / "samples/0.npy").unlink()


def replace_by_symlink(folder):
    (folder / "samples/0.npy").rename(folder.parent / "outside.npy")
    (folder / "samples/0.npy").symlink_to(folder.parent / "outside.npy")


def replace_by_pipe(folder):
    (folder / "samples/0.npy").unlink()
    os.mkfifo(folder / "samples/0.npy")


def replace_row_digests(folder):
    np.save(folder / "rows.npy", np.zeros((4, 32), np.uint8))
    digest = str(Digest.from_file(folder / "rows.npy"))
    edit_manifest(folder, lambda plain: plain["rows"].update(sha256=digest))


def with_output_file(file):
    def spoil(folder):
        np.save(folder.parent / "outside.npy", 2 * ROWS)
        edit_manifest(folder, lambda plain: output(plain).update(file=file))

    return spoil


def with_output_fields(**fields):
    return lambda folder: edit_manifest(folder, lambda plain: output(plain).update(fields))


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def write_invalid_manifest(folder):
    (folder / "manifest.json").write_bytes(b"\x80\x04 no json")


def write_deeply_nested_manifest(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


def duplicate_part(folder):
    edit_manifest(folder, lambda plain: plain["parts"].append(plain["parts"][0]))


def rename_samples_part(folder):
    edit_manifest(folder, lambda plain: plain["parts"][0].update(name="batch_1"))


def reduce_part_size(folder):
    edit_manifest(folder, lambda plain: plain["parts"][0].update(size=3))


def remove_outputs(folder):
    edit_manifest(folder, lambda plain: plain["parts"][0].update(outputs=[]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate_array, "holds 22 bytes of numbers, not 48"),
        (append_bytes, "holds 56 bytes of numbers, not 48"),
        (replace_array, "another digest"),
        (remove_array, "No such file"),
        (replace_by_symlink, "can't be read"),
        (replace_by_pipe, "not a regular file"),
        (replace_row_digests, "sample digests that differ"),
        (with_output_file("../outside.npy"), "not a path inside"),
        (with_output_file("/dev/zero"), "not a path inside"),
        (with_output_fields(shape=[1 << 40, 3]), "rows on axis 0"),
        (with_output_fields(shape=[4, 1 << 50]), "are 18014398509481984 and"),
        (with_output_fields(shape=[4, 4]), "says float32 .4, 4."),
        (with_output_fields(dtype="object"), "should match pattern"),
        (with_output_fields(dtype="int32"), "manifest says int32"),
        (with_array(np.array([[None] * 3] * 4), allow_pickle=True), "bytes|object"),
        (with_array(np.asfortranarray(2 * ROWS)), "by columns"),
        (with_array((2 * ROWS).astype(">f4")), "manifest says"),
        (remove_manifest, "No such file"),
        (write_invalid_manifest, "not valid JSON"),
        (write_deeply_nested_manifest, "nested"),
        (duplicate_part, "each once"),
        (rename_samples_part, "must be first"),
        (reduce_part_size, "rows"),
        (remove_outputs, "either outputs or failed"),
    ],
)
def test_invalid_recording_is_refused(folder, spoil, words):
    spoil(folder)
    with pytest.raises(GateError, match=words):
        Recording(folder)


def write_zip(path: Path, folder: Path, *, compression=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in folder.rglob("*.*"):
            archive.write(file, file.relative_to(folder).as_posix())
    return path


def test_zip_bomb_is_refused(folder, tmp_path):
    path = write_zip(tmp_path / "bomb.zip", folder, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(GateError, match="compressed"):
        Recording(path)


def test_zip_with_overlapping_members_is_refused(folder, tmp_path):
    path = write_zip(tmp_path / "one.zip", folder)
    archive = zipfile.ZipFile(path)
    member = archive.getinfo("samples/0.npy")
    data = bytearray(path.read_bytes())
    location = data.rindex(b"samples/0.npy") - 46  # the entry in the central directory at the end
    assert data[location : location + 4] == b"PK\1\2"
    larger = (member.file_size + len(data)).to_bytes(4, "little")
    data[location + 20 : location + 28] = larger + larger
    path.write_bytes(data)
    with pytest.raises(GateError, match="overlap"):
        Recording(path)


@pytest.mark.parametrize("content", [b"", b"PK\5\6" + b"\0" * 18, b"no zip at all"])
def test_invalid_zip_is_refused(tmp_path, content):
    (tmp_path / "recording.zip").write_bytes(content)
    with pytest.raises(GateError, match="can't be read"):
        Recording(tmp_path / "recording.zip")


X = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(4)


def test_row_digests_do_not_depend_on_batches():
    recording_folder = row_digests({"x": X, "ids": IDS})
    parts = [row_digests({"ids": IDS[s : s + 3], "x": X[s : s + 3]}) for s in (0, 3)]
    assert np.array_equal(recording_folder, np.concatenate(parts))
    assert len({row.tobytes() for row in recording_folder}) == 4


def test_row_digests_ignore_byte_order_and_layout():
    plain = row_digests({"x": X})
    assert np.array_equal(plain, row_digests({"x": X.astype(">f4")}))
    assert np.array_equal(plain, row_digests({"x": np.asfortranarray(X)}))


@pytest.mark.parametrize(
    "other",
    [{"y": X}, {"x": X.view(np.int32)}, {"x": X.reshape(4, 3, 1)}, {"x": -X}, {"x": X, "y": IDS}],
)
def test_row_digests_depend_on_names_values_and_dtypes(other):
    assert not (row_digests({"x": X}) == row_digests(other)).all(axis=1).any()
