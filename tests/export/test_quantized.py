from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from gate import Policy, Verdict
from gate import check as check_
from gate.errors import ExportError
from gate.export.quantize import QuantizeSettings, quantize
from gate.onnx_file.tested_file import QUANTIZED_FROM
from gate.summary.render import render_check

SETTINGS = QuantizeSettings(samples=32, batch_size=8)


class Net(nn.Module):
    """Logits of four classes with large margins, from images of shape (3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 8.0 * self.body(x)


def images(count: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def batches(arrays: np.ndarray, size: int = 8, name: str = "input") -> Iterator[dict[str, Any]]:
    return ({name: arrays[i : i + size]} for i in range(0, len(arrays), size))


@pytest.fixture(scope="module")
def exact_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("exact") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's deprecations
        torch.onnx.export(
            Net().eval(), (torch.from_numpy(images(4)),), str(path), dynamo=False, opset_version=13,
            input_names=["input"], output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
        )  # fmt: skip
    return path


@pytest.mark.parametrize("settings", [
    SETTINGS.model_copy(update={"method": "percentile", "per_channel": False}),
    SETTINGS.model_copy(update={"activation": "int8", "reduce_range": False}),
])  # fmt: skip
def test_quantized_file_agrees_and_has_metadata(exact_file, tmp_path, settings, capsys):
    created = quantize(exact_file, batches(images()), tmp_path / "twin.onnx", settings=settings)
    reported = created.record.settings
    assert (created.record.strategy, reported["calibration_samples"]) == ("quantized", 32)
    assert reported["method"] == settings.method
    proto = onnx.load(str(created.path))
    props = {entry.key: entry.value for entry in proto.metadata_props}
    assert props[QUANTIZED_FROM] == reported["of_sha256"]
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in proto.graph.node}
    x = images(seed=1)
    answers = [
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
            None, {"input": x}
        )[0]
        for path in (exact_file, created.path)
    ]
    assert 0 < np.abs(answers[0] - answers[1]).max() < answers[0].std()
    assert (answers[0].argmax(1) == answers[1].argmax(1)).mean() > 0.9
    assert capsys.readouterr().out == ""


def test_quantization_is_reproducible(exact_file, tmp_path):
    first, repeated, second = (
        quantize(exact_file, batches(images(seed=seed)), tmp_path / f"{i}.onnx", settings=SETTINGS)
        for i, seed in enumerate((0, 0, 5))
    )
    assert first.subject.sha256 == repeated.subject.sha256 != second.subject.sha256
    assert first.record == repeated.record
    assert (
        first.record.settings["calibration_sha256"] != second.record.settings["calibration_sha256"]
    )


def nothing_to_quantize(folder: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["input"], ["y"])],
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, 8, 8])],
    )
    path = folder / "relu.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8),
        str(path),
    )
    return path


NAN = np.full_like(images(), np.nan)


@pytest.mark.parametrize(("calibration", "message"), [
    (batches(images(0)), "no calibration sample"),
    (batches(NAN), "NaN"),
    (batches(images(), name="other"), "input"),
    (batches(images()[:, :2]), "calibration samples fit"),
])  # fmt: skip
def test_invalid_calibration_samples_are_refused(exact_file, tmp_path, calibration, message):
    old = tmp_path / "twin.onnx"
    old.write_bytes(b"old")
    with pytest.raises(ExportError, match=message):
        quantize(exact_file, calibration, old, settings=SETTINGS)
    assert old.read_bytes() == b"old"


def test_file_without_quantizable_nodes_is_refused(tmp_path):
    exact_file = nothing_to_quantize(tmp_path)
    with pytest.raises(ExportError, match="nothing in .* could be quantized"):
        quantize(exact_file, batches(images()), tmp_path / "twin.onnx", settings=SETTINGS)


def test_quantized_input_is_refused_and_the_old_file_kept(quantized_file, tmp_path):
    old = tmp_path / "old.onnx"
    old.write_bytes(b"old")
    with pytest.raises(ExportError, match="already quantized"):
        quantize(quantized_file, batches(images()), old, settings=SETTINGS)
    assert old.read_bytes() == b"old"


@pytest.fixture(scope="module")
def quantized_file(exact_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("twin") / "model.onnx"
    return quantize(exact_file, batches(images()), path, settings=SETTINGS).path


def check_file(path: Path, policy: Policy | None):
    return check_(path, Net().eval(), {"input": images(128, seed=2)}, policy).decision


def names(decision, *verdicts: Verdict) -> set[str]:
    return {check.name for check in decision.checks if check.verdict in verdicts}


@pytest.mark.proof
def test_quantized_file_passes_only_its_policy(quantized_file):
    custom = check_file(quantized_file, LENIENT)
    assert custom.passed, [render_check(check) for check in custom.problems]
    exact_file = check_file(quantized_file, None)
    assert not exact_file.passed
    assert {"graph_quantized", "noise_ratio"} <= names(exact_file, Verdict.FAIL)


@pytest.mark.further
def test_wrongly_calibrated_file_fails_its_policy(exact_file, tmp_path):
    flat = np.full_like(images(), 0.01)
    created = quantize(exact_file, batches(flat), tmp_path / "twin.onnx", settings=SETTINGS)
    assert "top1_agreement" in names(check_file(created.path, LENIENT), Verdict.FAIL)


def _create_lenient_policy() -> Policy:
    """Return the built-in policy with wider bounds, for a network with random weights."""
    from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy

    bounds = Bounds(
        top1_agreement=0.9,
        confidence_bands=ConfidenceBands(
            over_1_percent=1.0, over_5_percent=0.3, over_10_percent=0.1
        ),
    )
    runtimes = {"ort-cpu-optimized": RuntimePolicy(required="always", bounds=bounds)}
    return Policy.quantized().model_copy(update={"runtimes": runtimes})


LENIENT = _create_lenient_policy()
