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

from gate import Digest, Policy, Verdict
from gate import check as check_
from gate.errors import ExportError, OnnxFileError
from gate.export.quantize import QuantizeSettings, quantize
from gate.onnx_file.tested_file import QUANTIZED_FROM, quantized_from
from gate.summary.render import render_check
from tests.registry.releases import onnx_file

SETTINGS = QuantizeSettings(samples=32, batch_size=8)


class Net(nn.Module):
    """Logits of four classes with wide margins, from images of shape (3, 8, 8)."""

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
def exact(tmp_path_factory):
    path = tmp_path_factory.mktemp("exact") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of the exporter
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
def test_a_twin_answers_alike_and_says_what_it_is(exact, tmp_path, settings, capsys):
    made = quantize(exact, batches(images()), tmp_path / "twin.onnx", settings=settings)
    told = made.record.settings
    assert (made.record.strategy, told["calibration_samples"]) == ("quantized", 32)
    assert told["method"] == settings.method
    proto = onnx.load(str(made.path))
    props = {entry.key: entry.value for entry in proto.metadata_props}
    assert props[QUANTIZED_FROM] == told["of_sha256"]
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in proto.graph.node}
    x = images(seed=1)
    answers = [
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
            None, {"input": x}
        )[0]
        for path in (exact, made.path)
    ]
    assert 0 < np.abs(answers[0] - answers[1]).max() < answers[0].std()
    assert (answers[0].argmax(1) == answers[1].argmax(1)).mean() > 0.9
    assert capsys.readouterr().out == ""


def test_the_same_file_samples_and_settings_give_the_same_bytes(exact, tmp_path):
    one, two, other = (
        quantize(exact, batches(images(seed=seed)), tmp_path / f"{i}.onnx", settings=SETTINGS)
        for i, seed in enumerate((0, 0, 5))
    )
    assert one.subject.sha256 == two.subject.sha256 != other.subject.sha256
    assert one.record == two.record
    assert one.record.settings["calibration_sha256"] != other.record.settings["calibration_sha256"]


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
def test_what_cant_be_calibrated_is_told(exact, tmp_path, calibration, message):
    old = tmp_path / "twin.onnx"
    old.write_bytes(b"old")
    with pytest.raises(ExportError, match=message):
        quantize(exact, calibration, old, settings=SETTINGS)
    assert old.read_bytes() == b"old"


def test_a_file_without_anything_to_quantize_is_refused(tmp_path):
    exact = nothing_to_quantize(tmp_path)
    with pytest.raises(ExportError, match="nothing in .* could be quantized"):
        quantize(exact, batches(images()), tmp_path / "twin.onnx", settings=SETTINGS)


def test_what_is_quantized_already_is_refused_and_the_old_file_stays(twin, tmp_path):
    old = tmp_path / "old.onnx"
    old.write_bytes(b"old")
    with pytest.raises(ExportError, match="already quantized"):
        quantize(twin, batches(images()), old, settings=SETTINGS)
    assert old.read_bytes() == b"old"


def test_a_file_says_what_it_was_made_of(exact, twin, tmp_path):
    assert quantized_from(twin) == str(Digest.from_file(exact))
    assert quantized_from(exact) is None
    (tmp_path / "no.onnx").write_bytes(b"no model")
    with pytest.raises(OnnxFileError):
        quantized_from(tmp_path / "no.onnx")
    with pytest.raises(OnnxFileError):
        quantize(tmp_path / "no.onnx", batches(images()), tmp_path / "t", settings=SETTINGS)


@pytest.fixture(scope="module")
def twin(exact, tmp_path_factory):
    path = tmp_path_factory.mktemp("twin") / "model.onnx"
    return quantize(exact, batches(images()), path, settings=SETTINGS).path


def judged(path: Path, policy: Policy | None):
    return check_(path, Net().eval(), {"input": images(128, seed=2)}, policy).decision


def names(decision, *verdicts: Verdict) -> set[str]:
    return {check.name for check in decision.checks if check.verdict in verdicts}


@pytest.mark.proof
def test_its_own_policy_lets_it_pass_and_the_exact_one_does_not(twin):
    own = judged(twin, LENIENT)
    assert own.passed, [render_check(check) for check in own.problems]
    exact = judged(twin, None)
    assert not exact.passed
    assert {"graph_quantized", "noise_ratio"} <= names(exact, Verdict.FAIL)


def test_a_wrong_twin_fails_its_own_policy(exact, tmp_path):
    flat = np.full_like(images(), 0.01)
    made = quantize(exact, batches(flat), tmp_path / "twin.onnx", settings=SETTINGS)
    assert "top1_agreement" in names(judged(made.path, LENIENT), Verdict.FAIL)


def _lenient() -> Policy:
    """As the built-in one, for a network with noise as weights."""
    from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy

    bounds = Bounds(
        top1_agreement=0.9,
        confidence_bands=ConfidenceBands(
            over_1_percent=1.0, over_5_percent=0.3, over_10_percent=0.1
        ),
    )
    runtimes = {"ort-cpu-optimized": RuntimePolicy(required="always", bounds=bounds)}
    return Policy.quantized().model_copy(update={"runtimes": runtimes})


LENIENT = _lenient()


def test_tiny_twins_can_be_made_of_any_file(tmp_path):
    calibration = ({"input": np.eye(3, dtype=np.float32)} for _ in range(2))
    made = quantize(
        onnx_file(tmp_path / "a.onnx"), calibration, tmp_path / "t.onnx", settings=SETTINGS
    )
    assert made.record.settings["calibration_samples"] == 6
