"""The files of a statement are matched by digest, under any name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate import Digest, GateError
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.onnx_file.reading import read_subject
from gate.signing.statement import SignedStatement, Statement, resources
from gate.signing.subjects import GOLDEN, model_files, verify_golden_files, verify_model
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.releases import onnx_file, onnx_file_with_data
from tests.signing import signing


def sign_files(files: dict[str, Digest]) -> SignedStatement:
    statement = Statement(subject=resources(files), predicate_type="t", predicate={"x": 1})
    return SignedStatement.sign(statement, signing.key())


def model_digests(path: Path) -> dict[str, Digest]:
    """Return the digests of the model and its external data by file name."""
    data = read_subject(path).external_data
    return {name: Digest.from_file(path.parent / name) for name in (path.name, *data)}


OTHER_FILES = {
    GOLDEN: builders.digest("golden"),
    "preprocessing": builders.digest("spec"),
    "quantized/model.onnx": builders.digest("twin"),
}


@pytest.mark.parametrize("make", [onnx_file, onnx_file_with_data])
def test_model_is_matched_by_digest_under_any_name(tmp_path: Path, make) -> None:
    path = make(tmp_path / "model.onnx")
    subject = read_subject(path)
    signed = sign_files({**model_digests(path), **OTHER_FILES})
    files = ("model.onnx", *subject.external_data)
    assert model_files(signed) == files
    assert verify_model(signed, path, model=subject.sha256) == files
    renamed = path.rename(tmp_path / "served.onnx")
    assert verify_model(signed, renamed, model=subject.sha256) == files


def test_twin_is_not_accepted_as_the_model(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    signed = sign_files(
        {"model.onnx": builders.digest("x"), "quantized/model.onnx": Digest.from_file(path)}
    )
    with pytest.raises(Untrusted, match="does not name"):
        verify_model(signed, path, model=Digest.from_file(path))


def test_model_of_another_verdict_is_refused(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    with pytest.raises(Untrusted, match="is not the model"):
        verify_model(sign_files(model_digests(path)), path, model=builders.digest("x"))


@pytest.mark.parametrize("tamper", ["change", "remove", "folder"])
def test_every_external_data_file_is_verified(tmp_path: Path, tamper: str) -> None:
    path = onnx_file_with_data(tmp_path / "model.onnx")
    signed, model = sign_files(model_digests(path)), read_subject(path).sha256
    data = tmp_path / "weights.data"
    if tamper == "change":
        data.write_bytes(data.read_bytes()[:-1] + b"x")
    else:
        data.unlink()
        if tamper == "folder":
            data.mkdir()
    with pytest.raises(Untrusted, match=r"the external data of .* weights\.data"):
        verify_model(signed, path, model=model)


def test_data_file_missing_in_the_statement_is_refused(tmp_path: Path) -> None:
    path = onnx_file_with_data(tmp_path / "model.onnx")
    signed = sign_files({"model.onnx": Digest.from_file(path)})
    with pytest.raises(Untrusted, match="with no external data is not the model"):
        verify_model(signed, path, model=read_subject(path).sha256)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a\0b", "out/secret"])
def test_paths_outside_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "model"
    path = onnx_file(folder / "model.onnx")
    (folder / "out").symlink_to(tmp_path)
    signed = sign_files({**model_digests(path), name: Digest.from_file(tmp_path / "secret")})
    with pytest.raises(Untrusted, match="outside the model's folder"):
        verify_model(signed, path, model=builders.digest("x"))


def test_golden_vectors_are_verified_completely(tmp_path: Path) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    model = Digest.from_file(path)
    signed = sign_files({GOLDEN: Digest.from_file(folder / "golden.json")})
    verify_golden_files(signed, folder, model=model)
    with pytest.raises(Untrusted, match="the verdict to"):
        verify_golden_files(signed, folder, model=builders.digest("x"))
    with pytest.raises(Untrusted, match="the statement names none"):
        verify_golden_files(sign_files({"model.onnx": model}), folder, model=model)


def change(pattern: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return a function that edits the first file of a folder with this pattern."""

    def tamper(folder: Path) -> None:
        file = next(folder.glob(pattern))
        file.write_bytes(edit(file.read_bytes()))

    return tamper


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (change("golden.json", lambda data: data + b"\n"), Untrusted),
        (change("output-*.bin", lambda data: bytes(len(data))), DigestMismatch),
        (change("input-*.bin", lambda data: data + b"\0"), DigestMismatch),
        (lambda folder: next(folder.glob("input-*.bin")).unlink(), EvidenceError),
        (lambda folder: (folder / "golden.json").unlink(), EvidenceError),
    ],
)
def test_replaced_golden_vector_file_is_refused(
    tmp_path: Path, tamper, error: type[GateError]
) -> None:
    path, folder = vectors.write_model_and_vectors(tmp_path)
    signed = sign_files({GOLDEN: Digest.from_file(folder / "golden.json")})
    tamper(folder)
    with pytest.raises(error):
        verify_golden_files(signed, folder, model=Digest.from_file(path))
