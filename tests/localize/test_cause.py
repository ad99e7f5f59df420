"""Each kind of fault gets its module, cause and remedy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import Localization, MeasurementJob, SampleSet, locate
from gate.localize import layer_deviations
from gate.localize.diagnosis import Diagnoser, DivergentValue
from gate.localize.file_graph import FileGraph
from gate.localize.layer_deviations import Deviation
from gate.localize.model_runner import ComputedValue
from gate.localize.value_matching import ValueLayout
from tests.localize import nets
from tests.localize.nets import (
    IMAGES,
    INPUTS,
    VECTORS,
    Codes,
    Edit,
    Residual,
    Shared,
    Tokens,
    edit_attributes,
    edit_input,
    edit_operator,
    edit_weight,
    find_node,
    layer_rows,
    localize_file,
    remove_node,
)
from tests.measure import tiny
from tests.modules import Function


def round_to_float16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """Round to TF32, for numbers so small that float16 has fewer bits."""
    bits = values.view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def scale_up(values: np.ndarray) -> np.ndarray:
    return values * np.float32(1.1)


def transpose(values: np.ndarray) -> np.ndarray:
    return values.T


def set_training_mode(proto: onnx.ModelProto) -> None:
    edit_attributes("BatchNormalization", 1, training_mode=1)(proto)
    find_node(proto, "BatchNormalization", 1).output.extend(["mean", "variance"])


def scale_folded(proto: onnx.ModelProto) -> None:
    """Scale weights and offset, as a wrong BatchNorm scale does when it is folded."""
    for argument in (1, 2):
        edit_input("Conv", 1, argument, scale_up)(proto)


def cast_and_back(kind: int) -> Edit:
    """Return an edit that casts the input of the pooling to another type and back."""

    def spoil(proto: onnx.ModelProto) -> None:
        pool = find_node(proto, "AveragePool")
        index = list(proto.graph.node).index(pool)
        to_narrow = helper.make_node("Cast", [pool.input[0]], ["narrow"], to=kind, name="narrows")
        to_float = helper.make_node(
            "Cast", ["narrow"], ["wide"], to=TensorProto.FLOAT, name="widens"
        )
        pool.input[0] = "wide"
        proto.graph.node.insert(index, to_float)
        proto.graph.node.insert(index, to_narrow)

    return spoil


def quantize_and_back(proto: onnx.ModelProto) -> None:
    """Quantize the input of the pooling to int8 and back."""
    pool = find_node(proto, "AveragePool")
    index = list(proto.graph.node).index(pool)
    proto.graph.initializer.extend(
        [
            numpy_helper.from_array(np.float32(0.05), "step"),
            numpy_helper.from_array(np.int8(0), "zero"),
        ]
    )
    quantize = helper.make_node("QuantizeLinear", [pool.input[0], "step", "zero"], ["narrow"])
    dequantize = helper.make_node(
        "DequantizeLinear", ["narrow", "step", "zero"], ["wide"], name="widens"
    )
    pool.input[0] = "wide"
    proto.graph.node.insert(index, dequantize)
    proto.graph.node.insert(index, quantize)


def change_resize_scale(proto: onnx.ModelProto) -> None:
    scales = find_node(proto, "Constant").attribute[0].t
    scales.CopyFrom(numpy_helper.from_array(np.array([1, 1, 3, 3], np.float32)))


PRECISION_REMEDY, WEIGHTS_REMEDY, MODEL_REMEDY = (
    "--precision reduced",
    "from the checkpoint",
    "of another model",
)
EVAL_REMEDY, OPERATOR_REMEDY, CODE_REMEDY = (
    "model.eval()",
    "another opset",
    "functions that forward calls",
)
CAUSES = {
    "weight to float16": (
        Residual, edit_weight("head.weight", round_to_float16), "head",
        "head.weight is rounded to float16 in the file", PRECISION_REMEDY),
    "weight to bfloat16": (
        Residual, edit_weight("head.weight", round_to_bfloat16), "head",
        "head.weight is rounded to bfloat16 in the file", PRECISION_REMEDY),
    "embedding to float16": (
        Tokens, edit_weight("embed.weight", round_to_float16), "embed",
        "embed.weight is rounded to float16 in the file", PRECISION_REMEDY),
    "folded weight to float16": (
        Residual, edit_input("Conv", 1, 1, round_to_float16), "block.conv1",
        "block.conv1.weight is rounded to float16 in the file", PRECISION_REMEDY),
    "another weight": (
        Residual, edit_weight("head.weight", scale_up), "head",
        "head.weight differs from the model's in 360 of 360 elements", WEIGHTS_REMEDY),
    "another folded weight": (
        Residual, edit_input("Conv", 1), "block.conv1",
        "block.conv1.weight differs from the model's in 1 of 576 elements", WEIGHTS_REMEDY),
    "another folded scale": (
        Residual, scale_folded, "block.bn1",
        "the folded scale of block.bn1 (weight, running_var, eps) differs from the model's",
        WEIGHTS_REMEDY),
    "another folded offset": (
        Residual, edit_input("Conv", 1, 2, scale_up), "block.bn1",
        "the folded offset of block.bn1 (bias, running_mean) differs from the model's", WEIGHTS_REMEDY),
    "another variance": (
        "unfolded", edit_weight("block.bn1.running_var", scale_up), "block.bn1",
        "block.bn1.running_var differs from the model's in 8 of 8", WEIGHTS_REMEDY),
    "another parameter of the model's own": (
        Codes, edit_weight("gain", scale_up), "",
        "gain differs from the model's in 1 of 1 elements", WEIGHTS_REMEDY),
    "transposed weight of Gemm": (
        Shared, edit_weight("twice.weight", transpose), "twice",
        "twice.weight is transposed in the file", WEIGHTS_REMEDY),
    "transposed weight of MatMul": (
        Tokens, edit_input("MatMul", 3, 1, transpose), "layer.proj",
        "layer.proj.weight is transposed in the file", WEIGHTS_REMEDY),
    "another epsilon of BatchNorm": (
        "unfolded", edit_attributes("BatchNormalization", 1, epsilon=1e-3), "block.bn1",
        "epsilon is 0.001 in the file, eps is 1e-05 in the model", MODEL_REMEDY),
    "another dilation": (
        Residual, edit_attributes("Conv", 1, dilations=[2, 2], pads=[2, 2, 2, 2]), "block.conv1",
        "dilations is [2, 2] in the file, dilation is (1, 1) in the model", MODEL_REMEDY),
    "BatchNorm as in training": (
        "unfolded", set_training_mode, "block.bn1", "it runs in training mode", EVAL_REMEDY),
    "missing activation": (
        Residual, remove_node("Relu", 1), "block.relu",
        "no node of the file computes it; later nodes read /block/conv1/Conv_output_0", MODEL_REMEDY),
    "another activation": (
        Shared, edit_operator("Tanh", "Sigmoid", 1), "act",
        "it computes Sigmoid instead of Tanh: Sigmoid /act_1/Tanh",
        MODEL_REMEDY),
    "another part of an activation": (
        Tokens, edit_operator("Erf", "Tanh"), "layer.act", "1 node and Tanh /layer/act/Erf, Add",
        OPERATOR_REMEDY),
    "float16 inside": (
        Residual, cast_and_back(TensorProto.FLOAT16), "pool",
        "the file casts to float16 in it (Cast narrows)", PRECISION_REMEDY),
    "bfloat16 inside": (
        Residual, cast_and_back(TensorProto.BFLOAT16), "pool",
        "the file casts to bfloat16 in it (Cast narrows)", PRECISION_REMEDY),
    "eight bits inside": (
        Residual, quantize_and_back, "pool", "computes this layer from 8 bits", "precision: quantized"),
    "code of a module": (
        Tokens, edit_attributes("Softmax", axis=2), "layer",
        "code in the forward of layer before layer.proj differs in the file", CODE_REMEDY),
    "code of the model": (
        Codes, edit_attributes("Resize", coordinate_transformation_mode="asymmetric"), "",
        "code in the model's own forward before head differs in the file: Resize /Resize, "
        "Sigmoid /Sigmoid, Mul /Mul, ReduceMean /ReduceMean, between /conv/Conv_output_0 and "
        "/ReduceMean_output_0", CODE_REMEDY),
    "another size inside of code": (
        Codes, change_resize_scale, "", "code in the model's own forward before head", CODE_REMEDY),
}  # fmt: skip


def export_kind(export_net, kind):
    return export_net(Residual, unfolded=True) if kind == "unfolded" else export_net(kind)


@pytest.mark.rows(5)
@pytest.mark.parametrize("fault", CAUSES)
def test_cause_and_remedy(export_net, fault):
    kind, spoil, module, cause, remedy = CAUSES[fault]
    model, candidate = export_kind(export_net, kind)
    inputs = IMAGES if kind == "unfolded" else INPUTS[kind]
    reported = localize_file(model, candidate, inputs, edit=spoil)
    assert reported.first_divergence == module
    assert cause in reported.cause
    assert remedy in reported.remedy
    name = module or "The model itself"
    assert reported.cause.startswith(f"{name} is wrong although its inputs are right: ")
    assert reported.cause.endswith(".")


def convert_to_float16(proto: onnx.ModelProto) -> None:
    """Round every weight to float16, and cast the input of the pooling."""
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(round_to_float16(values), tensor.name))
    cast_and_back(TensorProto.FLOAT16)(proto)


@pytest.mark.parametrize(
    ("kind", "spoil", "module", "cause"),
    [
        (Residual, edit_attributes("Conv", 1, dilations=[2, 2], pads=[2, 2, 2, 2]), "block.conv1",
         "dilations is [2, 2] in the file"),
        (Residual, scale_folded, "block.bn1", "the folded scale of block.bn1"),
        (Residual, edit_weight("head.weight", lambda w: w * 3), "head", "head.weight differs from the model's"),
        ("unfolded", edit_attributes("BatchNormalization", 1, epsilon=10.0), "block.bn1",
         "epsilon is 10 in the file"),
    ],
)  # fmt: skip
def test_float16_rounding_is_no_cause_with_a_reduced_policy(
    export_net, tmp_path, kind, spoil, module, cause
):
    model, candidate = export_kind(export_net, kind)
    policy = nets.POLICY.model_copy(update={"precision": "reduced"})

    def locate_edited(spoil: Edit) -> Localization:
        edited = tiny.edit(candidate, tmp_path / "bad.onnx", spoil)
        case = MeasurementJob(model, edited, SampleSet.from_arrays({"input": IMAGES}), policy)
        return locate(case, runtime="ort-cpu", limit=6)

    assert locate_edited(convert_to_float16).first_divergence is None
    result = locate_edited(lambda proto: (spoil(proto), convert_to_float16(proto)))
    assert (result.first_divergence, cause in result.cause) == (module, True), result.cause


def test_bfloat16_is_a_cause_with_a_reduced_policy(export_net, tmp_path, monkeypatch):
    # Raise the unit, because this network is not sensitive enough.
    monkeypatch.setattr(layer_deviations, "REDUCED_UNIT", 16.0)
    model, candidate = export_net(Residual)
    policy = nets.POLICY.model_copy(update={"precision": "reduced"})
    edited = tiny.edit(
        candidate, tmp_path / "bad.onnx", edit_weight("head.weight", round_to_bfloat16)
    )
    case = MeasurementJob(model, edited, SampleSet.from_arrays({"input": IMAGES}), policy)
    result = locate(case, runtime="ort-cpu", limit=6)
    assert "bfloat16" in result.cause
    assert result.remedy.startswith("Convert to float16")


def test_wrong_shape_is_described(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    candidate = nets.export(model.eval(), tmp_path / "m.onnx", IMAGES)
    spoil = edit_attributes("Conv", pads=[1, 1, 1, 1])
    reported = localize_file(model, candidate, IMAGES, edit=spoil)
    assert reported.first_divergence == "0"
    row = layer_rows(reported)["0"]
    assert (row.max_abs_diff, row.local_ratio, row.verdict) == (None, np.inf, "source")
    assert "pads is [1, 1, 1, 1] in the file, padding is (0, 0) in the model" in reported.cause


def test_wrong_shape_without_setting_is_described(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Function(_double), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    candidate = nets.export(model.eval(), tmp_path / "m.onnx", IMAGES)
    reported = localize_file(model, candidate, IMAGES, edit=change_resize_scale)
    assert reported.first_divergence == "0"
    assert "its shape is (2, 3, 24, 24) in the file, (2, 3, 16, 16) in PyTorch" in reported.cause
    assert "Resize /0/Resize" in reported.cause


def _double(x):
    return nn.functional.interpolate(x, scale_factor=2, mode="nearest")


@pytest.mark.parametrize(("runtime", "rounding", "named"), [
    ("ort-cuda", 2.0**-11, True),
    ("ort-cuda", 1e-6, False),
    ("ort-cuda", 0.1, False),
    ("ort-cpu", 2.0**-11, False),
])  # fmt: skip
def test_tf32_sized_error_is_named_on_cuda_only(tmp_path, runtime, rounding, named):
    """Name TF32 for CUDA, tested without a device on errors of the size of TF32 rounding."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).eval()
    graph = FileGraph(nets.export(model, tmp_path / "m.onnx", VECTORS))
    expected = VECTORS.astype(np.float32)
    wrong = expected * (1 + rounding * np.random.default_rng(0).uniform(-1, 1, expected.shape))
    deviation = Deviation()
    deviation.update(expected, wrong.astype(np.float32))
    deviation.update_noise(expected, wrong.astype(np.float32), expected.astype(np.float64).ravel())
    value = ComputedValue(
        1, "", "Linear", 0, None, (0,), expected.shape, expected.reshape(-1), None
    )
    suspect = DivergentValue(value, "logits", missing=False, folded=None, alone=deviation)
    cause = Diagnoser(model, graph, ValueLayout(), cuda="cuda" in runtime).cause(suspect)
    assert (cause.code == "tf32") == named


class Rescaled(nn.Module):
    """Two outputs, of which the second is scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        shares = self.layer(x) / 5.0
        return shares, shares.sum(1) * self.log_scale.exp()


def divide_by_seven(proto: onnx.ModelProto) -> None:
    constant = next(n for n in proto.graph.node if n.output[0] == find_node(proto, "Div").input[1])
    constant.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(7.0)))


def test_another_number_of_code_is_no_weight(tmp_path):
    settings = {"outputs": ("shares", "total")}
    candidate = nets.export(Rescaled().eval(), tmp_path / "m.onnx", VECTORS, **settings)
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", divide_by_seven)
    record = localize_file(Rescaled().eval(), bad, VECTORS)
    (detail,) = record.fault_params["details"]
    assert (record.first_divergence, record.fault_code) == ("", "settings")
    assert (detail["setting"], detail["want"]) == ("constant of Div /Div", "5")
