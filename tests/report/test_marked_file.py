"""A copy of the file with its layers' tensors as outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate import MeasurementJob, SampleSet, TestedFile, locate
from gate.errors import EvidenceError, StorageError
from gate.localize import marked_file
from gate.localize.marked_file import write_marked_file
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sessions import open_on_cpu
from tests.localize import nets

ROWS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)) * 2)


@pytest.fixture(scope="module")
def localized(tmp_path_factory):
    model = TwoLinear().eval()
    path = tmp_path_factory.mktemp("marked") / "m.onnx"
    candidate = nets.export(model, path, ROWS)
    case = MeasurementJob(
        model, candidate, SampleSet.from_arrays({"input": ROWS}), policy=nets.POLICY
    )
    return case, locate(case, runtime="ort-cpu")


def test_layers_are_outputs_with_correct_values(localized, tmp_path):
    case, result = localized
    path = tmp_path / "marked.onnx"
    path.write_bytes(b"older")
    marked = write_marked_file(case, result, path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    names = [value.name for value in model.graph.output]
    assert names == ["logits", *marked.outputs]
    tensors = {row.module: row.tensor for row in result.layers if row.module}
    assert {tensors["first"], tensors["act"]} <= set(marked.outputs)
    answers = dict(zip(names, open_on_cpu(path).run(None, {"input": ROWS}), strict=True))
    with torch.no_grad():
        first = case.model.first(torch.from_numpy(ROWS))
        np.testing.assert_allclose(answers[tensors["first"]], first.numpy(), atol=1e-6)
        np.testing.assert_allclose(answers[tensors["act"]], first.tanh().numpy(), atol=1e-6)
        np.testing.assert_allclose(answers["logits"], case.model(torch.from_numpy(ROWS)).numpy(),
                                   atol=1e-6)  # fmt: skip
    described = {value.name: value.doc_string for value in model.graph.output}
    assert described[tensors["first"]].startswith("first, Linear, ok")
    shapes = {spec.name: spec.shape for spec in read_subject(path).outputs}
    assert shapes[tensors["first"]] == ("batch", 4)
    assert [file.name for file in tmp_path.iterdir()] == ["marked.onnx"]


def test_marked_file_never_replaces_the_model(localized, tmp_path):
    case, result = localized
    link = tmp_path / "link.onnx"
    link.hardlink_to(case.candidate.path)
    for path in (case.candidate.path, link):
        with pytest.raises(StorageError, match="is a file of the model itself"):
            write_marked_file(case, result, path)
    case.candidate.verify()


def test_external_weights_are_kept(localized, tmp_path):
    case, result = localized
    model = onnx.load(case.candidate.path)
    path = tmp_path / "large.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    large = MeasurementJob(
        case.model, TestedFile(path, read_subject(path)), case.samples, policy=case.policy
    )
    marked = write_marked_file(large, result, tmp_path / "marked.onnx")
    assert read_subject(marked.path).external_data == ("w.bin",)
    assert len(open_on_cpu(marked.path).run(None, {"input": ROWS})) == 1 + len(marked.outputs)
    (tmp_path / "other").mkdir()
    with pytest.raises(StorageError, match=r"external data is in .* \(w.bin\).* Name a file in"):
        write_marked_file(large, result, tmp_path / "other" / "marked.onnx")
    with pytest.raises(StorageError, match="is a file of the model"):
        write_marked_file(large, result, tmp_path / "w.bin")


def test_unloadable_marked_file_is_not_written(localized, tmp_path, monkeypatch):
    def refuse(_path: Path) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(marked_file, "open_on_cpu", refuse)
    path = tmp_path / "marked.onnx"
    with pytest.raises(EvidenceError, match="does not take the file .*: no such operator"):
        write_marked_file(*localized, path)
    assert list(tmp_path.iterdir()) == []
