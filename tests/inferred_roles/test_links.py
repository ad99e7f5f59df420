"""Files that are links to blobs, as in the caches of model hubs and DVC, are checked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from gate import Digest, TestedFile, Verdict
from gate.errors import DigestMismatch
from gate.onnx_file.reading import WithData, read_subject
from tests.inferred_roles.nets import Net, check_file, export, make_policy, with_scale


@pytest.fixture(scope="module")
def net():
    return Net(with_scale)


@pytest.fixture
def external_data_file(net, tmp_path):
    """A model file with all weights in an external data file."""
    single = export(net, tmp_path / "single.onnx")
    path = tmp_path / "plain" / "model.onnx"
    path.parent.mkdir()
    onnx.save_model(onnx.load(single), path, save_as_external_data=True,
                    location="model.onnx_data", size_threshold=0)  # fmt: skip
    return path


def copy_to_cache(source: Path, kind: str) -> Path:
    """Copy the two files to a cache with links of this kind."""
    root = source.parent.parent / "cache"
    folder = root / "snapshots" / "abc" / "onnx"
    folder.mkdir(parents=True)
    for name in ("model.onnx", "model.onnx_data"):
        digest = Digest.from_file(source.parent / name).hex
        inside = digest[:2] if kind == "a folder for each" else ""
        blob = root / "blobs" / inside / digest
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes((source.parent / name).read_bytes())
        if kind == "hard":
            os.link(blob, folder / name)
        elif kind == "data alone" and name == "model.onnx":
            (folder / name).write_bytes(blob.read_bytes())
        else:
            (folder / name).symlink_to(os.path.relpath(blob, folder))
    return folder / "model.onnx"


@pytest.mark.parametrize("kind", ["hub", "hard"])
def test_linked_file_is_checked_like_its_copy(net, external_data_file, kind):
    path = copy_to_cache(external_data_file, kind)
    assert read_subject(path) == read_subject(external_data_file)
    result = check_file(net, path, 48, make_policy())
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    assert result.evidence.subject.external_data == ("model.onnx_data",)
    names = {"ort-cpu", "ort-cpu-optimized"}
    assert {r.runtime for r in result.evidence.runtimes if r.outputs} == names


@pytest.mark.further
def test_wrong_weight_behind_a_link_is_localized(net, external_data_file):
    path = copy_to_cache(external_data_file, "a folder for each")
    blob = path.with_name("model.onnx_data").resolve()
    proto = onnx.load(path, load_external_data=False)
    weight = next(t for t in proto.graph.initializer if t.name == "body.2.weight")
    offset = next(int(e.value) for e in weight.external_data if e.key == "offset")
    data = bytearray(blob.read_bytes())
    values = np.frombuffer(data, np.float32, count=1, offset=offset)
    data[offset : offset + 4] = (values * 1.5).astype(np.float32).tobytes()
    blob.write_bytes(data)
    result = check_file(net, path, 48, make_policy())
    assert result.decision.verdict is Verdict.FAIL
    assert result.explanation.failure is None
    assert result.explanation.localisation is not None


def test_loaded_bytes_are_the_hashed_bytes(external_data_file):
    path = copy_to_cache(external_data_file, "hub")
    candidate = TestedFile(path, read_subject(path))
    loaded = candidate.loadable()
    assert isinstance(loaded, WithData)
    blob = path.with_name("model.onnx_data").resolve()
    assert loaded.data == {"model.onnx_data": blob.read_bytes()}
    blob.write_bytes(b"\1" * blob.stat().st_size)
    with pytest.raises(DigestMismatch):
        candidate.loadable()
    with pytest.raises(DigestMismatch):
        candidate.verify()
