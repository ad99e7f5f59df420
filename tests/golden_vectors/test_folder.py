"""Golden vectors are written completely and read only after every file is verified."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate import Digest
from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import GOLDEN_JSON, ExpectedOutput, files_of, read_golden
from gate.golden.manifest import GoldenManifest, GoldenModel
from gate.storage import files
from tests import builders
from tests.golden_vectors import vectors
from tests.golden_vectors.vectors import write_vectors

NAMES = ["bool", "int8", "int64", "uint8", "uint64", "float16", "float32", "float64"]
MODEL = GoldenModel(sha256=builders.digest("model"), file="model.onnx")


@pytest.mark.further
@settings(max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(NAMES))
def test_vectors_round_trip(tmp_path_factory, data, dtype) -> None:
    arguments = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, max_side=4)))
    values = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, max_side=4)))
    finite = arguments.dtype.kind != "f" or np.isfinite(arguments).all()
    comparable = values.dtype.kind != "f" or not np.isnan(values).any()
    folder = tmp_path_factory.mktemp("golden")

    def write() -> GoldenManifest:
        return write_vectors(
            folder, model=MODEL, inputs={"x": arguments},
            outputs={"y": ExpectedOutput(values, 0.5)}, origin=vectors.origin(),
        )  # fmt: skip

    if not (finite and comparable):
        with pytest.raises(EvidenceError, match="can't be compared"):
            write()
        return
    golden = write()
    read = read_golden(folder)
    assert read.golden == golden
    assert read.sha256 == Digest.from_file(folder / GOLDEN_JSON)
    for got, want in ((read.inputs["x"], arguments), (read.outputs["y"], values)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert {path.name for path in folder.iterdir()} == set(files_of(golden))


def test_writing_is_deterministic_and_leaves_no_other_files(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    vectors.write_model_vectors(folder, path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    vectors.write_model_vectors(folder, path, inputs={"input": vectors.inputs() + 1})
    assert {file.name for file in folder.iterdir()} == set(files_of(read_golden(folder).golden))


def test_crash_at_any_file_leaves_complete_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    original = files.write_bytes
    for survived in range(4):
        remaining = [survived]

        def write(target: Path, data: bytes, remaining: list[int] = remaining) -> None:
            if not remaining[0]:
                raise KeyboardInterrupt
            remaining[0] -= 1
            original(target, data)

        monkeypatch.setattr(files, "write_bytes", write)
        second = {"input": vectors.inputs() + survived + 1}
        try:
            vectors.write_model_vectors(folder, path, inputs=second)
        except KeyboardInterrupt:
            pass
        else:
            assert survived == 3
        read_golden(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": {}}, "golden vectors need every"),
        ({"outputs": {}}, "golden vectors need every"),
        ({"inputs": {"input": np.zeros((0, 3), np.float32)}}, "nothing to compare"),
        ({"inputs": {"input": np.float32(1).reshape(())}}, "nothing to compare"),
        ({"inputs": {"input": np.array(["a"])}}, "has dtype"),
        ({"inputs": {"input": np.zeros((4, 3), np.complex64)}}, "has dtype"),
        ({"inputs": {"input": np.full((4, 3), np.inf, np.float32)}}, "can't be compared"),
        ({"outputs": {"y": ExpectedOutput(np.full((4, 2), np.nan), 1.0)}}, "can't be compared"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 0)), 1.0)}}, "nothing to compare"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 2)), -1.0)}}, "are not valid"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 2)), float("nan"))}}, "are not valid"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 2)), float("inf"))}}, "are not valid"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 2)), 1.0, 1.5)}}, "are not valid"),
        ({"outputs": {"y": ExpectedOutput(np.ones((4, 1)), 1.0, 1.0)}}, "are not valid"),
        ({"outputs": {"y": ExpectedOutput(np.ones((3, 2)), 1.0, 1.0)}}, "are not valid"),
        ({"inputs": {"a": np.ones((4, 3)), "b": np.ones((3, 3))}}, "are not valid"),
    ],
)  # fmt: skip
def test_meaningless_vectors_are_not_written(tmp_path: Path, fields, message) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    with pytest.raises(EvidenceError, match=message):
        vectors.write_model_vectors(tmp_path / "other", path, **fields)
    assert not (tmp_path / "other" / GOLDEN_JSON).exists()


def _first_array(folder: Path) -> Path:
    return folder / read_golden(folder).golden.outputs[0].file


def _edit_record(folder: Path, **changes: object) -> None:
    plain = json.loads((folder / GOLDEN_JSON).read_text())
    (folder / GOLDEN_JSON).write_text(json.dumps(plain | changes))


def _flip_bits(folder: Path) -> None:
    path = _first_array(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"\7")


def _shorten(folder: Path) -> None:
    path = _first_array(folder)
    path.write_bytes(path.read_bytes()[:-4])


def _lengthen(folder: Path) -> None:
    path = _first_array(folder)
    path.write_bytes(path.read_bytes() + b"more")


def _replace_by_symlink(folder: Path) -> None:
    path = _first_array(folder)
    path.rename(folder / "elsewhere")
    path.symlink_to("elsewhere")


def _name_outside(folder: Path) -> None:
    path = _first_array(folder)
    output = json.loads((folder / GOLDEN_JSON).read_text())["outputs"][0]
    path.rename(folder.parent / "outside.bin")
    _edit_record(folder, outputs=[output | {"file": "../outside.bin"}])


def _replace_by_pipe(folder: Path) -> None:
    """Replace the array by a pipe, which would block every reader."""
    path = _first_array(folder)
    path.unlink()
    os.mkfifo(path)


def _reshape(folder: Path) -> None:
    output = json.loads((folder / GOLDEN_JSON).read_text())["outputs"][0]
    _edit_record(folder, outputs=[output | {"shape": [4, 11]}])


def _set_shape(folder: Path, shape: list[int]) -> None:
    output = json.loads((folder / GOLDEN_JSON).read_text())["outputs"][0]
    _edit_record(folder, outputs=[output | {"shape": shape, "top1_agreement": None}])


def _name_external_data(folder: Path, name: str) -> None:
    model = json.loads((folder / GOLDEN_JSON).read_text())["model"]
    _edit_record(folder, model=model | {"external_data": [name]})


def _name_numpy_dtype(folder: Path) -> None:
    output = json.loads((folder / GOLDEN_JSON).read_text())["outputs"][0]
    _edit_record(folder, outputs=[output | {"dtype": "object"}])


def _share_a_file(folder: Path) -> None:
    plain = json.loads((folder / GOLDEN_JSON).read_text())
    _edit_record(folder, outputs=[plain["outputs"][0] | {"file": plain["inputs"][0]["file"]}])


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (_flip_bits, DigestMismatch),
        (_shorten, DigestMismatch),
        (_lengthen, DigestMismatch),
        (_replace_by_symlink, EvidenceError),
        (_replace_by_pipe, EvidenceError),
        (_reshape, DigestMismatch),
        (_name_outside, EvidenceError),
        (_name_numpy_dtype, EvidenceError),
        (_share_a_file, EvidenceError),
        (lambda folder: _first_array(folder).unlink(), EvidenceError),
        (lambda folder: (folder / GOLDEN_JSON).unlink(), EvidenceError),
        (lambda folder: (folder / GOLDEN_JSON).write_text("{}"), EvidenceError),
        (lambda folder: (folder / GOLDEN_JSON).write_text(" " * (1 << 20) + "{}"), DigestMismatch),
        (lambda folder: _set_shape(folder, [4, 2**36]), EvidenceError),
        (lambda folder: _set_shape(folder, [4, 2**61]), EvidenceError),
        (lambda folder: _set_shape(folder, [4] + [1] * 99), EvidenceError),
        (lambda folder: _set_shape(folder, [4, 2**20]), DigestMismatch),
        (lambda folder: _name_external_data(folder, "/dev/zero"), EvidenceError),
        (lambda folder: _name_external_data(folder, "../w.bin"), EvidenceError),
        (lambda folder: _name_external_data(folder, "a/../../w.bin"), EvidenceError),
        (lambda folder: _name_external_data(folder, "..\\w.bin"), EvidenceError),
        (lambda folder: _name_external_data(folder, "C:\\w.bin"), EvidenceError),
        (lambda folder: _name_external_data(folder, "w\0.bin"), EvidenceError),
        (lambda folder: _name_external_data(folder, "w" * 256), EvidenceError),
        (lambda folder: _name_external_data(folder, ""), EvidenceError),
        (lambda folder: (folder / GOLDEN_JSON).write_text("[" * 500_000), EvidenceError),
        (lambda folder: _edit_record(folder, outputs=[]), EvidenceError),
        (lambda folder: _edit_record(folder, inputs=[]), EvidenceError),
        (lambda folder: _edit_record(folder, samples=0), EvidenceError),
        (lambda folder: _edit_record(folder, samples=3), EvidenceError),
        (lambda folder: _edit_record(folder, schema_version=2), EvidenceError),
        (lambda folder: _edit_record(folder, more=1), EvidenceError),
    ],
)
def test_tampered_vectors_are_refused(tmp_path: Path, tamper, error) -> None:
    _, folder = vectors.write_model_and_vectors(tmp_path)
    tamper(folder)
    with pytest.raises(error, match="golden"):
        read_golden(folder)


def test_sparse_array_files_are_refused(tmp_path: Path) -> None:
    """Name three sparse files of 2 GiB that use no disk space."""
    _, folder = vectors.write_model_and_vectors(tmp_path)
    output = json.loads((folder / GOLDEN_JSON).read_text())["outputs"][0]
    names = [f"output-{index}-hole.bin" for index in range(3)]
    for name in names:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 31)
    sparse = {"shape": [4, 1 << 27], "top1_agreement": None}
    _edit_record(folder, outputs=[output | sparse | {"name": name, "file": name} for name in names])
    with pytest.raises(EvidenceError, match="the maximum is 4294967296"):
        read_golden(folder)


def test_vectors_over_the_read_limit_are_not_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gate.golden.folder.SIZE_LIMIT", 100)
    with pytest.raises(EvidenceError, match="the maximum is 100"):
        vectors.write_model_and_vectors(tmp_path)


def test_old_golden_vectors_are_readable() -> None:
    read = read_golden(Path(__file__).parent / "v1")
    assert read.sha256.hex == "b579de6ded4ea47979aa30fe646bcac8e1b5f55947ce1bdf6a16c2dede47effa"
    assert read.golden.outputs[0].max_abs_diff == vectors.TOLERANCE
