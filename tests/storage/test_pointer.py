"""A DVC or Git LFS pointer in place of a file is reported with the command that fetches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from gate import GateError
from gate.commands.click_types import CHECKPOINT_FILE, ONNX_FILE, SAMPLES, SampleLocationType
from gate.data.array_files import open_labels, open_shards
from gate.data.open_samples import Opening
from gate.errors import CheckpointError, DataError, OnnxFileError
from gate.model.checkpoint import load_checkpoint
from gate.onnx_file.reading import read_subject
from gate.onnx_file.release_file import ReleaseFile
from gate.preprocess.pictures import read_dumped_tensors, read_picture
from gate.storage.untrusted_files import detect_pointer_file
from pipelines.images import _read_npz
from tests.export.graphs import write_external_adder

OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 44000000\n"
DVC = "outs:\n- md5: a304afb96060aad90176268345e10355\n  size: 37891850\n  hash: md5\n  path: {}\n"

Open = Callable[[Path], object]
OPENERS: dict[str, tuple[str, type[GateError], Open]] = {
    "model": ("m.onnx", OnnxFileError, read_subject),
    "checkpoint": ("w.pt", CheckpointError, lambda path: load_checkpoint(nn.Identity(), path)),
    "safetensors": ("w.safetensors", CheckpointError,
                    lambda path: load_checkpoint(nn.Identity(), path)),
    "array": ("x.npy", DataError, open_shards),
    "arrays": ("x.npz", DataError, open_shards),
    "labels": ("y.npy", DataError, lambda path: open_labels(path, samples=1)),
    "columns": ("x.parquet", DataError, lambda path: Opening(str(path)).rows()),
    "shards of pictures": ("x.tar", DataError, lambda path: Opening(str(path)).rows()),
    "picture": ("x.png", DataError, read_picture),
    "tensors of a consumer": ("t.npy", DataError, lambda path: read_dumped_tensors([("phone", path)])),
    "pictures to train on": ("x.npz", DataError, _read_npz),
    "argument: model": ("m.onnx", OnnxFileError, lambda path: ONNX_FILE.convert(path, None, None)),
    "argument: checkpoint": ("w.pt", CheckpointError,
                             lambda path: CHECKPOINT_FILE.convert(path, None, None)),
    "argument: samples": ("x.npy", DataError, lambda path: SAMPLES.convert(path, None, None)),
    "argument: source": ("x.npy", DataError, lambda p: SampleLocationType().convert(str(p), None, None)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "error", "opened"), OPENERS.values(), ids=OPENERS)
def test_pointer_error_names_the_fetch_command(
    tmp_path: Path, name: str, error: type[GateError], opened: Open
) -> None:
    path = tmp_path / name
    path.write_text(LFS)
    with pytest.raises(error, match=r"Git-LFS pointer.* of 44000000 bytes.*git lfs pull"):
        opened(path)
    path.unlink()
    beside = tmp_path / f"{name}.dvc"
    beside.write_text(DVC.format(name))
    with pytest.raises(error, match=f"tracked by DVC.*dvc pull {beside}"):
        opened(path)


def test_dvc_file_names_its_target(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx.dvc"
    path.write_text(DVC.format("m.onnx"))
    text = detect_pointer_file(path)
    assert text is not None
    assert f"dvc pull {path}; then name {tmp_path / 'm.onnx'}." in text
    assert "to m.onnx, expected the content of 37891850 bytes" in text
    copied = path.rename(tmp_path / "m.onnx")
    with pytest.raises(OnnxFileError, match="dvc pull in its repository"):
        read_subject(copied)


def test_folder_tracked_by_dvc(tmp_path: Path) -> None:
    (tmp_path / "data.dvc").write_text(DVC.format("data"))
    requested = tmp_path / "data" / "held_out" / "x.npy"
    with pytest.raises(DataError, match=rf"dvc pull {tmp_path / 'data.dvc'}"):
        open_shards(requested)
    with pytest.raises(DataError, match="dvc pull"):
        open_shards(requested.parent)


def test_pointer_among_shards(tmp_path: Path) -> None:
    (tmp_path / "0.npy").write_text(LFS)
    with pytest.raises(DataError, match=r"0\.npy is a Git-LFS pointer"):
        open_shards(tmp_path)


@pytest.mark.parametrize("how", ["Git-LFS", "DVC"])
def test_pointer_as_external_data(tmp_path: Path, how: str) -> None:
    path = write_external_adder(tmp_path / "m.onnx")
    data = tmp_path / "w.bin"
    data.unlink()
    if how == "Git-LFS":
        data.write_text(LFS)
    else:
        (tmp_path / "w.bin.dvc").write_text(DVC.format("w.bin"))
    with pytest.raises(OnnxFileError, match=f"tensor .*w.bin.*{how}"):
        read_subject(path)


@pytest.mark.parametrize("how", ["Git-LFS", "DVC"])
@pytest.mark.parametrize(("file", "says"), [("head.onnx", "the part head: "), ("release.yaml", "")])
def test_pointer_in_a_release_names_the_part(
    tmp_path: Path, how: str, file: str, says: str
) -> None:
    for name in ("encoder.onnx", "head.onnx"):
        (tmp_path / name).write_bytes(b"an ONNX file")
    release = tmp_path / "release.yaml"
    release.write_text(
        "chain: a.b:run\nparts: {encoder: {file: encoder.onnx}, head: {file: head.onnx}}\n"
    )
    if how == "Git-LFS":
        (tmp_path / file).write_text(LFS)
    else:
        (tmp_path / file).unlink()
        (tmp_path / f"{file}.dvc").write_text(DVC.format(file))
    with pytest.raises(OnnxFileError, match=f"{says}.*{file}.*{how}"):
        ReleaseFile.load(release)


NOT_POINTERS = {
    "nothing": "",
    "a text about it": f"# {LFS}",
    "another version line": "version https://example.com/spec/v1\n",
    "more than a pointer": LFS + "x" * 1024,
    "yaml without a hash": "outs:\n- path: m.onnx\n",
    "settings": "export:\n  opset: 13\n",
}


@pytest.mark.parametrize("text", NOT_POINTERS.values(), ids=NOT_POINTERS)
def test_other_files_are_not_pointers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_text(text)
    assert detect_pointer_file(path) is None


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "missing", "null byte", "unreadable"])
def test_large_or_missing_files_are_not_read(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "missing.dvc").mkdir()
    paths = {"folder": tmp_path, "device": Path("/dev/zero"), "null byte": tmp_path / "x\0y"}
    path = paths.get(kind, tmp_path / kind)
    if kind == "unreadable":
        path.write_text(LFS)
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("nothing is unreadable for root")
    assert detect_pointer_file(path) is None


@pytest.mark.parametrize("text", [LFS, LFS.replace("\n", "\r\n"),
                                  LFS.replace("git-lfs.github", "hawser.github")])  # fmt: skip
def test_pointer_format_variants(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(text.encode())
    assert "git lfs pull" in str(detect_pointer_file(path))
