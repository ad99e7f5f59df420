"""Faults are localized in quantized files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.quantization as ort
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, disable_observer
from torch.nn import functional

from gate import Localization, MeasurementJob, Policy, SampleSet, TestedFile, locate
from tests.localize import nets
from tests.measure import tiny

IMAGES = np.random.default_rng(0).normal(size=(32, 3, 8, 8)).astype(np.float32)

POLICY = Policy.model_validate(
    {
        "precision": "quantized",
        "task": "tensors",
        "runtimes": {"ort-cpu": {"required": "always", "bounds": {"scaled_diff": 0.1}}},
    }
)


class Segmenting(nn.Module):
    """Images to a mask of three classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(functional.relu(self.c2(functional.relu(self.c1(x)))))


class Reader(ort.CalibrationDataReader):
    def __init__(self) -> None:
        self._batches: Iterator[dict[str, np.ndarray]] = iter([{"input": IMAGES}])

    def get_next(self):
        return next(self._batches, None)


@pytest.fixture(scope="module")
def quantize(tmp_path_factory):
    """Return a function that quantizes the file in a format of ONNX Runtime's quantizer."""
    folder: Path = tmp_path_factory.mktemp("quantized")
    nets.export(Segmenting().eval(), folder / "m.onnx", IMAGES)
    quant_pre_process(folder / "m.onnx", folder / "pre.onnx")

    def make(format_: str) -> TestedFile:
        path = folder / f"{format_}.onnx"
        if format_ == "dynamic":
            ort.quantize_dynamic(folder / "pre.onnx", path)
        else:
            ort.quantize_static(
                folder / "pre.onnx",
                path,
                Reader(),
                quant_format=ort.QuantFormat["QOperator" if format_ == "operators" else "QDQ"],
                per_channel=format_ == "channels",
            )
        return tiny.candidate(path)

    return make


def compare(candidate: TestedFile, policy: Policy = nets.POLICY) -> Localization:
    samples = SampleSet.from_arrays({"input": IMAGES})
    case = MeasurementJob(Segmenting().eval(), candidate, samples, policy=policy)
    return locate(case, runtime="ort-cpu")


@pytest.mark.parametrize("format_", ["channels", "operators", "dynamic"])
def test_quantization_is_the_cause(quantize, format_):
    reported = compare(quantize(format_))
    assert reported.first_divergence == ("head" if format_ == "operators" else "c1")
    assert "quantized" in reported.fault
    assert "bias" not in reported.fault.partition("(")[0]
    assert "--precision quantized" in reported.remedy
    assert (
        "precision: quantized, task: tensors" in reported.remedy
    )  # the built-in policy is for classification


def make_fake_quantize() -> FakeQuantize:
    """Return fake quantization of a weight, per tensor."""
    return FakeQuantize(
        MinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )


class FakeQuantized(Segmenting):
    """A Segmenting model with fake quantization of weights and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList([make_fake_quantize(), make_fake_quantize()])
        self.values = FakeQuantize(MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)

    def forward(self, x):
        first, second = self.weights
        x = functional.relu(functional.conv2d(x, first(self.c1.weight), self.c1.bias, padding=1))
        x = self.values(x)
        x = functional.conv2d(x, second(self.c2.weight), self.c2.bias, padding=1)
        return self.head(functional.relu(x))


def increase_scale(proto: onnx.ModelProto) -> None:
    nets.change_weight(proto, "values.scale", lambda scale: scale * 1.01)


def use_signed_zero_point(proto: onnx.ModelProto) -> None:
    """Make the zero point int8, so that the same steps end at 127."""
    node = next(node for node in proto.graph.node if node.name == "/values/QuantizeLinear")
    tensor = nets.find_weight(proto, node.input[2])
    zeros = numpy_helper.to_array(tensor).astype(np.int8)
    tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))


@pytest.mark.parametrize(
    ("spoil", "code", "attributes"),
    [(increase_scale, "settings", ["scale"]), (use_signed_zero_point, "operators", [])],
)
def test_fake_quantized_model_is_not_called_quantized(spoil, code, attributes, tmp_path):
    model = FakeQuantized()
    model(torch.from_numpy(IMAGES))
    model.apply(disable_observer).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", IMAGES)
    assert nets.localize_file(model, candidate, IMAGES).faults == ()
    (fault,) = nets.localize_file(model, candidate, IMAGES, edit=spoil).faults
    assert (fault.module, fault.code) == ("values", code)
    matches = [detail.get("attribute") for detail in fault.params["details"]]
    assert [name for name in matches if name] == attributes


def reverse_weight(name: str) -> Callable[[onnx.ModelProto], None]:
    """Return an edit that reverses the integers of a weight, as a wrong checkpoint would change
    them.
    """

    def change(proto: onnx.ModelProto) -> None:
        tensor = nets.find_weight(proto, name)
        stored = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(stored[::-1].copy(), name))

    return change


@pytest.mark.parametrize("name", ["c2.weight", "c2.bias"])
def test_wrong_weight_is_distinguished_from_quantization(quantize, tmp_path, name):
    bad = tiny.edit(quantize("tensors"), tmp_path / "bad.onnx", reverse_weight(f"{name}_quantized"))
    rows = {row.title: row.detail for row in compare(bad).layers if row.verdict == "source"}
    assert name in rows["c2"]
    assert "quantized" in rows["c1"]
    reported = compare(bad, POLICY)  # with this policy quantization is not a fault
    assert reported.first_divergence == "c2"
    assert name in reported.cause


def test_remedy_with_a_quantized_policy_is_calibration(quantize):
    reported = compare(quantize("tensors"), POLICY)
    assert reported.first_divergence == "c1"
    assert "precision" not in reported.remedy
    assert "Calibrate" in reported.remedy
