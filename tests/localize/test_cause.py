"""Module, cause and remedy of each kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import Localization, MeasurementJob, SampleSet, TestedFile, locate
from gate.localize import layer_deviations
from gate.localize.diagnosis import Diagnoser, DivergentValue
from gate.localize.file_graph import FileGraph
from gate.localize.layer_deviations import Deviation
from gate.localize.model_runner import ComputedValue
from gate.localize.value_matching import ValueLayout
from tests.localize import nets
from tests.localize.nets import (
    IMAGES,
    TOKENS,
    VECTORS,
    Codes,
    Residual,
    Shared,
    Tokens,
    bypass,
    change,
    found,
    layers,
    node,
)
from tests.measure import tiny

Spoil = Callable[[onnx.ModelProto], object]
UNFOLDED = {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
INPUTS = {Residual: IMAGES, Codes: IMAGES, Shared: VECTORS, Tokens: TOKENS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A net with its file, exported once; unfolded: BatchNorm has nodes of its own."""
    kept: dict[tuple, tuple[nn.Module, TestedFile]] = {}
    folder = tmp_path_factory.mktemp("files")

    def make(kind: type[nn.Module], *, unfolded: bool = False) -> tuple[nn.Module, TestedFile]:
        if (kind, unfolded) not in kept:
            model, path = nets.made(kind), folder / f"{kind.__name__}-{unfolded}.onnx"
            names = ("left", "right", "most") if kind is Shared else ("logits",)
            settings = UNFOLDED if unfolded else {}
            candidate = nets.export(model, path, INPUTS[kind], outputs=names, **settings)
            kept[kind, unfolded] = model, candidate
        return kept[kind, unfolded]

    return make


def through_float16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def through_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def tf32(values: np.ndarray) -> np.ndarray:
    """So small that float16 has fewer bits."""
    bits = values.view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def scale_up(values: np.ndarray) -> np.ndarray:
    return values * np.float32(1.1)


def transpose(values: np.ndarray) -> np.ndarray:
    return values.T


def initializer(name: str, how: Callable) -> Spoil:
    return lambda proto: change(proto, name, how)


def read_by(op: str, place: int, argument: int, how: Callable) -> Spoil:
    return lambda proto: change(proto, node(proto, op, place).input[argument], how)


def setting(op: str, place: int = 0, **values: object) -> Spoil:
    """Attributes of a node."""

    def spoil(proto: onnx.ModelProto) -> None:
        changed = node(proto, op, place)
        kept = [item for item in changed.attribute if item.name not in values]
        del changed.attribute[:]
        changed.attribute.extend(kept)
        changed.attribute.extend(helper.make_attribute(*pair) for pair in values.items())

    return spoil


def replace_operator(op: str, other: str, place: int = 0) -> Spoil:
    return lambda proto: setattr(node(proto, op, place), "op_type", other)


def remove_node(op: str, place: int = 0) -> Spoil:
    return lambda proto: bypass(proto, node(proto, op, place))


def trained_norm(proto: onnx.ModelProto) -> None:
    setting("BatchNormalization", 1, training_mode=1)(proto)
    node(proto, "BatchNormalization", 1).output.extend(["mean", "variance"])


def scaled_fold(proto: onnx.ModelProto) -> None:
    """As another scale of the BatchNorm folds: weights and offset."""
    for argument in (1, 2):
        read_by("Conv", 1, argument, scale_up)(proto)


def cast_through(kind: int) -> Spoil:
    """A detour through another type before the pooling."""

    def spoil(proto: onnx.ModelProto) -> None:
        pool = node(proto, "AveragePool")
        index = list(proto.graph.node).index(pool)
        there = helper.make_node("Cast", [pool.input[0]], ["narrow"], to=kind, name="narrows")
        back = helper.make_node("Cast", ["narrow"], ["wide"], to=TensorProto.FLOAT, name="widens")
        pool.input[0] = "wide"
        proto.graph.node.insert(index, back)
        proto.graph.node.insert(index, there)

    return spoil


def eight_bits(proto: onnx.ModelProto) -> None:
    """A detour through int8 before the pooling."""
    pool = node(proto, "AveragePool")
    index = list(proto.graph.node).index(pool)
    proto.graph.initializer.extend(
        [
            numpy_helper.from_array(np.float32(0.05), "step"),
            numpy_helper.from_array(np.int8(0), "zero"),
        ]
    )
    there = helper.make_node("QuantizeLinear", [pool.input[0], "step", "zero"], ["narrow"])
    back = helper.make_node("DequantizeLinear", ["narrow", "step", "zero"], ["wide"], name="widens")
    pool.input[0] = "wide"
    proto.graph.node.insert(index, back)
    proto.graph.node.insert(index, there)


def wide_resize(proto: onnx.ModelProto) -> None:
    scales = node(proto, "Constant").attribute[0].t
    scales.CopyFrom(numpy_helper.from_array(np.array([1, 1, 3, 3], np.float32)))


REDUCED, WEIGHTS, OTHER = "--precision reduced", "from the checkpoint", "of another model"
EVAL, OPERATOR, CODE = "model.eval()", "another opset", "functions that forward calls"
CAUSES = {
    "weight to float16": (
        Residual, initializer("head.weight", through_float16), "head",
        "head.weight is rounded to float16 in the file", REDUCED),
    "weight to bfloat16": (
        Residual, initializer("head.weight", through_bfloat16), "head",
        "head.weight is rounded to bfloat16 in the file", REDUCED),
    "embedding to float16": (
        Tokens, initializer("embed.weight", through_float16), "embed",
        "embed.weight is rounded to float16 in the file", REDUCED),
    "folded weight to float16": (
        Residual, read_by("Conv", 1, 1, through_float16), "block.conv1",
        "block.conv1.weight is rounded to float16 in the file", REDUCED),
    "another weight": (
        Residual, initializer("head.weight", scale_up), "head",
        "head.weight differs from the model's in 360 of 360 elements", WEIGHTS),
    "another folded weight": (
        Residual, read_by("Conv", 1, 1, nets.middle), "block.conv1",
        "block.conv1.weight differs from the model's in 1 of 576 elements", WEIGHTS),
    "another folded scale": (
        Residual, scaled_fold, "block.bn1",
        "the folded scale of block.bn1 (weight, running_var, eps) differs from the model's",
        WEIGHTS),
    "another folded offset": (
        Residual, read_by("Conv", 1, 2, scale_up), "block.bn1",
        "the folded offset of block.bn1 (bias, running_mean) differs from the model's", WEIGHTS),
    "another variance": (
        "unfolded", initializer("block.bn1.running_var", scale_up), "block.bn1",
        "block.bn1.running_var differs from the model's in 8 of 8", WEIGHTS),
    "another parameter of the model's own": (
        Codes, initializer("gain", scale_up), "",
        "gain differs from the model's in 1 of 1 elements", WEIGHTS),
    "transposed weight of Gemm": (
        Shared, initializer("twice.weight", transpose), "twice",
        "twice.weight is transposed in the file", WEIGHTS),
    "transposed weight of MatMul": (
        Tokens, read_by("MatMul", 3, 1, transpose), "layer.proj",
        "layer.proj.weight is transposed in the file", WEIGHTS),
    "another epsilon of BatchNorm": (
        "unfolded", setting("BatchNormalization", 1, epsilon=1e-3), "block.bn1",
        "epsilon is 0.001 in the file, eps is 1e-05 in the model", OTHER),
    "another dilation": (
        Residual, setting("Conv", 1, dilations=[2, 2], pads=[2, 2, 2, 2]), "block.conv1",
        "dilations is [2, 2] in the file, dilation is (1, 1) in the model", OTHER),
    "BatchNorm as in training": (
        "unfolded", trained_norm, "block.bn1", "it runs in training mode", EVAL),
    "missing activation": (
        Residual, remove_node("Relu", 1), "block.relu",
        "no node of the file computes it; later nodes read /block/conv1/Conv_output_0", OTHER),
    "another activation": (
        Shared, replace_operator("Tanh", "Sigmoid", 1), "act",
        "it computes Sigmoid instead of Tanh: Sigmoid /act_1/Tanh",
        OTHER),
    "another part of an activation": (
        Tokens, replace_operator("Erf", "Tanh"), "layer.act", "1 node and Tanh /layer/act/Erf, Add",
        OPERATOR),
    "float16 inside": (
        Residual, cast_through(TensorProto.FLOAT16), "pool",
        "the file casts to float16 in it (Cast narrows)", REDUCED),
    "bfloat16 inside": (
        Residual, cast_through(TensorProto.BFLOAT16), "pool",
        "the file casts to bfloat16 in it (Cast narrows)", REDUCED),
    "eight bits inside": (
        Residual, eight_bits, "pool", "computes this layer from 8 bits", "precision: quantized"),
    "code of a module": (
        Tokens, setting("Softmax", axis=2), "layer",
        "code in the forward of layer before layer.proj differs in the file", CODE),
    "code of the model": (
        Codes, setting("Resize", coordinate_transformation_mode="asymmetric"), "",
        "code in the model's own forward before head differs in the file: Resize /Resize, "
        "Sigmoid /Sigmoid, Mul /Mul, ReduceMean /ReduceMean, between /conv/Conv_output_0 and "
        "/ReduceMean_output_0", CODE),
    "another size inside of code": (
        Codes, wide_resize, "", "code in the model's own forward before head", CODE),
}  # fmt: skip


@pytest.mark.rows(5)
@pytest.mark.parametrize("fault", CAUSES)
def test_cause_and_remedy(made, tmp_path, fault):
    kind, spoil, module, cause, remedy = CAUSES[fault]
    model, candidate = made(Residual, unfolded=True) if kind == "unfolded" else made(kind)
    inputs = INPUTS[Residual if kind == "unfolded" else kind]
    reported = found(model, tiny.edit(candidate, tmp_path / "bad.onnx", spoil), inputs)
    assert reported.first_divergence == module
    assert cause in reported.cause
    assert remedy in reported.remedy
    name = module or "The model itself"
    assert reported.cause.startswith(f"{name} is wrong although its inputs are right: ")
    assert reported.cause.endswith(".")


def convert_to_float16(proto: onnx.ModelProto) -> None:
    """Every weight, and the values before the pooling."""
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(through_float16(values), tensor.name))
    cast_through(TensorProto.FLOAT16)(proto)


@pytest.mark.parametrize(
    ("kind", "spoil", "module", "cause"),
    [
        (Residual, setting("Conv", 1, dilations=[2, 2], pads=[2, 2, 2, 2]), "block.conv1",
         "dilations is [2, 2] in the file"),
        (Residual, scaled_fold, "block.bn1", "the folded scale of block.bn1"),
        (Residual, initializer("head.weight", lambda w: w * 3), "head", "head.weight differs from the model's"),
        ("unfolded", setting("BatchNormalization", 1, epsilon=10.0), "block.bn1",
         "epsilon is 10 in the file"),
    ],
)  # fmt: skip
def test_float16_rounding_is_no_cause_with_a_reduced_policy(
    made, tmp_path, kind, spoil, module, cause
):
    model, candidate = made(Residual, unfolded=True) if kind == "unfolded" else made(kind)
    policy = nets.POLICY.model_copy(update={"precision": "reduced"})

    def located(spoil: Spoil) -> Localization:
        edited = tiny.edit(candidate, tmp_path / "bad.onnx", spoil)
        case = MeasurementJob(model, edited, SampleSet.from_arrays({"input": IMAGES}), policy)
        return locate(case, runtime="ort-cpu", limit=6)

    assert located(convert_to_float16).first_divergence is None
    result = located(lambda proto: (spoil(proto), convert_to_float16(proto)))
    assert (result.first_divergence, cause in result.cause) == (module, True), result.cause


def test_bfloat16_is_a_cause_with_a_reduced_policy(made, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_deviations, "REDUCED_UNIT", 16.0)  # else this net hardly minds
    model, candidate = made(Residual)
    policy = nets.POLICY.model_copy(update={"precision": "reduced"})
    edited = tiny.edit(
        candidate, tmp_path / "bad.onnx", initializer("head.weight", through_bfloat16)
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
    spoil = setting("Conv", pads=[1, 1, 1, 1])
    reported = found(model, tiny.edit(candidate, tmp_path / "bad.onnx", spoil), IMAGES)
    assert reported.first_divergence == "0"
    row = layers(reported)["0"]
    assert (row.max_abs_diff, row.local_ratio, row.verdict) == (None, np.inf, "source")
    assert "pads is [1, 1, 1, 1] in the file, padding is (0, 0) in the model" in reported.cause


def test_wrong_shape_without_setting_is_described(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(_Doubled(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    candidate = nets.export(model.eval(), tmp_path / "m.onnx", IMAGES)
    reported = found(model, tiny.edit(candidate, tmp_path / "bad.onnx", wide_resize), IMAGES)
    assert reported.first_divergence == "0"
    assert "its shape is (2, 3, 24, 24) in the file, (2, 3, 16, 16) in PyTorch" in reported.cause
    assert "Resize /0/Resize" in reported.cause


class _Doubled(nn.Module):
    def forward(self, x):
        return nn.functional.interpolate(x, scale_factor=2, mode="nearest")


@pytest.mark.parametrize(("runtime", "rounding", "named"), [
    ("ort-cuda", 2.0**-11, True),
    ("ort-cuda", 1e-6, False),
    ("ort-cuda", 0.1, False),
    ("ort-cpu", 2.0**-11, False),
])  # fmt: skip
def test_tf32_sized_error_is_named_on_cuda_only(tmp_path, runtime, rounding, named):
    """Without the device: from the numbers that such a layer would have."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).eval()
    graph = FileGraph(nets.export(model, tmp_path / "m.onnx", VECTORS))
    right = VECTORS.astype(np.float32)
    wrong = right * (1 + rounding * np.random.default_rng(0).uniform(-1, 1, right.shape))
    alone = Deviation()
    alone.update(right, wrong.astype(np.float32))
    alone.update_noise(right, wrong.astype(np.float32), right.astype(np.float64).ravel())
    value = ComputedValue(1, "", "Linear", 0, None, (0,), right.shape, right.reshape(-1), None)
    suspect = DivergentValue(value, "logits", missing=False, folded=None, alone=alone)
    cause = Diagnoser(model, graph, ValueLayout(), cuda="cuda" in runtime).cause(suspect)
    assert (cause.code == "tf32") == named
