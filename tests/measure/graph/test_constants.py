"""Constants of real exports match the model; a changed element is found."""

import contextlib
import copy
import functools
import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel
from torch import nn

from tests.measure.graph.build import model, node, report, value
from tests.modules import Layers

CODES = ("other_weights", "rounded_weights")


class Convolutions(nn.Module):
    """A model with every kind of layer into which an exporter folds a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.up, self.norm3 = nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6)
        self.grouped, self.norm4 = nn.ConvTranspose2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)
        self.dense, self.norm5 = nn.Linear(4, 7), nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        x = self.norm2(self.depthwise(self.norm1(self.first(x)).relu())).relu()
        x = self.norm4(self.grouped(self.norm3(self.up(x)))).mean((2, 3))
        return self.head(self.norm5(self.dense(x)))


class Encoder(nn.Module):
    """A transformer with an embedding tied to the head and a slice of its position table."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, 12, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.layer(self.words(x) + self.positions[:, : x.shape[1]]))


class Computing(nn.Module):
    """A model whose forward computes weights from parameters."""

    def __init__(self):
        super().__init__()
        parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 9))
        self.normed = parametrized
        self.spectral = torch.nn.utils.spectral_norm(nn.Linear(9, 4))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.masked = nn.Parameter(torch.randn(4, 4))
        self.mixture = nn.Parameter(torch.randn(4))
        self.gain = torch.rand(4)

    def forward(self, x):
        x = nn.functional.linear(self.spectral(self.normed(x)), self.masked * self.mask)
        return x * nn.functional.softmax(self.mixture, 0) + self.gain


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.cells = kind(6, 5, batch_first=True, **settings)
        self.head = nn.Linear(10 if settings.get("bidirectional") else 5, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def sequences():
    return torch.randn(2, 4, 6)


CASES = {
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 9, 9)),
    "encoder": (Encoder, lambda: torch.arange(12).reshape(2, 6) % 11),
    "computing": (Computing, lambda: torch.randn(2, 5, 6)),
    "deep lstm": (
        functools.partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True),
        sequences,
    ),
    "gru": (functools.partial(Recurrent, nn.GRU, bidirectional=True), sequences),
    "rnn": (functools.partial(Recurrent, nn.RNN), sequences),
}
MODES = ("folded", "unfolded", pytest.param("dynamo", marks=pytest.mark.proof))


@pytest.fixture(autouse=True)
def disable_fused_attention():
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was_enabled)


@functools.cache
def exported(name, mode):
    """Return the reference with random weights, a batch and a correct export."""
    build, batch = CASES[name]
    torch.manual_seed(7)
    reference, samples = build().eval(), batch()
    with torch.no_grad():
        for key, tensor in reference.state_dict().items():
            if tensor.is_floating_point() and not key.endswith("mask"):
                fresh = torch.rand_like(tensor) + 0.1 if "var" in key else torch.randn_like(tensor)
                tensor.copy_(fresh)
    return reference, samples, export(copy.deepcopy(reference), samples, mode)


def export(net, samples, mode):
    target = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        if mode == "dynamo":
            shapes = ({0: torch.export.Dim("batch")},)
            program = torch.onnx.export(
                net, (samples,), dynamo=True, verbose=False, dynamic_shapes=shapes
            )
            return program.model_proto.SerializeToString()
        torch.onnx.export(
            net, (samples,), target, dynamo=False, opset_version=17, input_names=["x"],
            do_constant_folding=mode == "folded", dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    return target.getvalue()


def weights_report(reference, samples, proto, folder):
    """Return the weights report and the findings about weights."""
    observed = report(proto, folder, reference, batch={"x": samples.numpy()})
    return observed.weights, [item for item in observed.findings if item.code in CODES]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_each_constant_of_a_correct_export_matches(name, mode, tmp_path):
    reference, samples, data = exported(name, mode)
    weights, result = weights_report(reference, samples, onnx.load_from_string(data), tmp_path)
    assert result == []
    assert (weights.unmatched, weights.unmatched_names) == (0, ())
    assert sum(weights.matched.values()) == weights.constants > 0
    if name in ("deep lstm", "gru") and mode != "unfolded":
        assert set(weights.matched) == {"as it is", "packed"}


@pytest.mark.rows(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_one_changed_element_of_any_constant_is_found(name, mode, tmp_path):
    reference, samples, data = exported(name, mode)
    missed = []
    initializers = onnx.load_from_string(data).graph.initializer
    floats = [at for at, tensor in enumerate(initializers) if tensor.data_type == 1 and tensor.dims]
    for at in floats:
        proto = onnx.load_from_string(data)
        tensor = proto.graph.initializer[at]
        changed = numpy_helper.to_array(tensor).copy()
        if changed.size < 4:
            continue
        changed.reshape(-1)[changed.size // 3] += 0.05
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
        _, result = weights_report(reference, samples, proto, tmp_path)
        first_index = [int(at) for at in np.unravel_index(changed.size // 3, changed.shape)]
        expected = {"wrong": 1, "size": changed.size, "first": first_index}
        (item,) = result or (None,)
        if (
            item is None
            or item.place != tensor.name
            or not expected.items() <= item.detail_params.items()
        ):
            missed.append((tensor.name, result))
    assert floats
    assert missed == []


def changed_weights(data, change):
    proto = onnx.load_from_string(data)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.ndim:
            tensor.CopyFrom(numpy_helper.from_array(change(tensor.name, array), tensor.name))
    return proto


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_weights_are_found(dtype, tmp_path):
    reference, samples, data = exported("encoder", "folded")

    def round_trip(_, array):
        return torch.from_numpy(array.copy()).to(dtype).float().numpy()

    weights, result = weights_report(
        reference, samples, changed_weights(data, round_trip), tmp_path
    )
    assert {item.code for item in result} == {"rounded_weights"}
    assert len(result) == weights.constants
    formats = {item.detail_params["format"] for item in result}
    assert formats == {str(dtype).removeprefix("torch.")}


def convert_to_float16(data):
    """Convert a file to float16 with ONNX Runtime's tool."""
    converted = OnnxModel(convert_float_to_float16(onnx.load_from_string(data)))
    converted.topological_sort()
    return converted.model


@pytest.mark.parametrize("name", CASES)
def test_weights_of_a_float16_file_match(name, tmp_path):
    reference, samples, data = exported(name, "folded")
    weights, result = weights_report(reference, samples, convert_to_float16(data), tmp_path)
    assert {item.code for item in result} <= {"rounded_weights"}, result
    if name == "convolutions":
        assert weights.matched["folded"] > 0


def make_half(inner) -> nn.Module:
    """Return a model converted to float16 with float32 inputs and outputs."""
    return Layers(
        lambda m, x: m.inner(x.half() if x.is_floating_point() else x).float(),
        inner=inner.half,
    )


def export_in_float16(name, *, small=1.0, eps=1e-5):
    """Return the float32 reference, samples, and an export of the model converted to float16.

    The export folds in float16. `small`: factor of the convolution weights and running variances.
    """
    reference, samples, _ = exported(name, "folded")
    reference = copy.deepcopy(reference)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps = eps
    with torch.no_grad():
        for key, tensor in reference.state_dict().items():
            if key.endswith("running_var") or ("norm" not in key and tensor.dim() == 4):
                tensor.mul_(small)
    data = export(make_half(copy.deepcopy(reference)).eval(), samples, "folded")
    return reference, samples, onnx.load_from_string(data)


@pytest.mark.parametrize(
    ("name", "small", "eps"),
    [("convolutions", 1.0, 1e-5), ("convolutions", 1e-5, 1e-6), ("encoder", 1.0, 1e-5)],
)
def test_weights_of_a_model_exported_in_float16_match(name, small, eps, tmp_path):
    """Match weights whose values and epsilon are too small for the precision of float16."""
    reference, samples, proto = export_in_float16(name, small=small, eps=eps)
    weights, result = weights_report(reference, samples, proto, tmp_path)
    assert {item.code for item in result} <= {"rounded_weights"}, result
    assert weights.unmatched == 0
    if name == "convolutions":
        assert weights.matched["folded"] > 0


@pytest.mark.parametrize(("made", "dims", "channel", "factor"), [
    ("converted", [8, 3, 3, 3], (1, 0, 0, 0), 1.5),
    ("made half", [8, 3, 3, 3], (1,), 1.0035),
    ("converted", [8], (0,), 1.005),
], ids=["one weight", "one channel by a third of a percent", "an offset"])  # fmt: skip
def test_changed_weight_of_a_folded_float16_file_is_found(made, dims, channel, factor, tmp_path):
    reference, samples, data = exported("convolutions", "folded")
    proto = (
        convert_to_float16(data) if made == "converted" else export_in_float16("convolutions")[2]
    )
    weight = next(t for t in proto.graph.initializer if list(t.dims) == dims)
    array = numpy_helper.to_array(weight).copy()
    array[channel] *= np.float16(factor)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    _, result = weights_report(reference, samples, proto, tmp_path)
    (finding,) = [item for item in result if item.code == "other_weights"]
    assert (finding.place, finding.detail_params["wrong"]) == (weight.name, array[channel].size)


def test_wrong_checkpoint_is_one_finding(tmp_path):
    reference, samples, data = exported("encoder", "unfolded")
    rng = np.random.default_rng(0)
    proto = changed_weights(data, lambda _, a: rng.normal(size=a.shape).astype(np.float32))
    _, (result,) = weights_report(reference, samples, proto, tmp_path)
    assert result.detail_code == "other_checkpoint"
    assert (result.detail_params["count"], result.detail_params["total"]) == (14, 14)


def test_swapped_weights_are_found(tmp_path):
    reference, samples, data = exported("encoder", "folded")
    swapped_names = {
        "layer.norm1.weight": "layer.norm2.weight",
        "layer.norm2.weight": "layer.norm1.weight",
    }
    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    proto = changed_weights(
        data, lambda name, a: state[swapped_names[name]] if name in swapped_names else a
    )
    _, result = weights_report(reference, samples, proto, tmp_path)
    assert sorted(item.place for item in result) == sorted(swapped_names)


def test_unmatched_constant_is_listed_without_finding(tmp_path):
    constant = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(4, 3)
    proto = model(
        [node("MatMul", ["x", "own"], ["y"])], {"own": constant}, outputs=[value("y", ("b", 3))]
    )
    weights, result = weights_report(nn.Linear(4, 3), torch.ones(3, 4), proto, tmp_path)
    assert result == []
    assert (weights.unmatched_names, weights.absent_names) == (("own",), ("weight", "bias"))


def test_unused_constant_is_ignored(tmp_path):
    reference = nn.Linear(4, 4)
    wrong = reference.weight.detach().numpy().copy()
    wrong[0, 0] += 1.0
    proto = model([node("Relu", ["x"], ["y"])], {"weight": wrong})
    weights, result = weights_report(reference, torch.ones(3, 4), proto, tmp_path)
    assert (result, weights.constants) == ([], 0)


class Clamped(nn.Module):
    """A model that clamps half of its weight to zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ self.weight.clamp(min=0.0)


def test_weight_computed_in_forward_matches(tmp_path):
    torch.manual_seed(3)
    reference = Clamped()
    used = reference.weight.detach().clamp(min=0.0).numpy()
    shape = [value("x", ("b", 6))], [value("y", ("b", 6))]
    for changed in (False, True):
        used = used.copy()
        used[2, 2] += changed
        proto = model(
            [node("MatMul", ["x", "w"], ["y"])], {"w": used}, inputs=shape[0], outputs=shape[1]
        )
        weights, result = weights_report(reference, torch.ones(3, 6), proto, tmp_path)
        assert weights.matched == ({} if changed else {"computed": 1})
        assert len(result) == changed


class AdaptedLinear(nn.Linear):
    """A low-rank adapter in the weight, as forward computes it, or beside the layer."""

    def __init__(self, *, in_weight):
        super().__init__(6, 6)
        self.up, self.down = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
        self.in_weight = in_weight

    def merged(self):
        return self.weight + 0.5 * self.up @ self.down

    def forward(self, x):
        if self.in_weight:
            return nn.functional.linear(x, self.merged(), self.bias)
        return super().forward(x) + 0.5 * (x @ self.down.T @ self.up.T)


class AdaptedConv(nn.Conv1d):
    def __init__(self):
        super().__init__(6, 6, 3, padding=1)
        self.down, self.up = nn.Conv1d(6, 2, 3, padding=1, bias=False), nn.Conv1d(2, 6, 1)

    def merged(self):
        return self.weight + torch.einsum("or,rik->oik", self.up.weight[:, :, 0], self.down.weight)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x)) - self.up.bias[:, None]


@pytest.mark.parametrize("fault", [None, "one element", "adapter of another layer"])
@pytest.mark.parametrize("build", [
    functools.partial(AdaptedLinear, in_weight=True),
    functools.partial(AdaptedLinear, in_weight=False),
    AdaptedConv,
], ids=["in the weight", "beside a Linear", "beside a convolution"])  # fmt: skip
def test_merged_adapter_under_the_old_name_matches(build, fault, tmp_path):
    torch.manual_seed(2)
    reference, samples = nn.Sequential(build(), nn.Tanh(), build(), build()), torch.randn(4, 6, 6)
    plain = nn.Conv1d(6, 6, 3, padding=1) if build is AdaptedConv else nn.Linear(6, 6)
    layers = [copy.deepcopy(plain) for _ in range(3)]
    for layer, adapted in zip(layers, (reference[0], *reference[2:]), strict=True):
        layer.bias.data, layer.weight.data = adapted.bias.data, adapted.merged().detach()
    if fault == "one element":
        layers[1].weight.data.view(-1)[5] += 0.05
    elif fault is not None:
        layers[1].weight.data = layers[2].weight.data.clone()
    net = nn.Sequential(layers[0], nn.Tanh(), *layers[1:])
    file = onnx.load_from_string(export(net, samples, "unfolded"))
    weights, result = weights_report(reference, samples, file, tmp_path)
    assert [item.place for item in result] == ([] if fault is None else ["2.weight"])
    assert (weights.unmatched, weights.absent == 0) == (0, fault is None)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_norm_that_was_merged_into_the_next_linear_matches(norm, fault, tmp_path):
    torch.manual_seed(4)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), norm(8), nn.Linear(8, 5)).eval()
    for _, tensor in (*reference[2].named_parameters(), *reference[2].named_buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(8) + 0.5
    plain, layer = copy.deepcopy(reference), reference[3]
    scale, shift = reference[2].weight, reference[2].bias
    if norm is nn.BatchNorm1d:
        scale = scale / torch.sqrt(reference[2].running_var + reference[2].eps)
        shift = shift - reference[2].running_mean * scale
        plain[2] = nn.Identity()
    else:
        plain[2].weight.data, plain[2].bias.data = torch.ones(8), torch.zeros(8)
    plain[3].weight.data = (layer.weight * scale).detach()
    plain[3].bias.data = (layer.bias + layer.weight @ shift).detach()
    plain[3].weight.data[1, 2] += 0.05 * fault
    file = onnx.load_from_string(export(plain, torch.randn(4, 6), "unfolded"))
    _, result = weights_report(reference, torch.randn(4, 6), file, tmp_path)
    assert [item.place for item in result] == (["3.weight"] if fault else [])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_changed_weight_of_a_traced_model_is_found(tmp_path):
    torch.manual_seed(2)
    net, samples = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6)
    reference = torch.jit.trace(copy.deepcopy(net), samples)
    net[2].weight.data.view(-1)[5] += 0.05
    file = onnx.load_from_string(export(net, samples, "unfolded"))
    _, result = weights_report(reference, samples, file, tmp_path)
    assert [item.place for item in result] == ["2.weight"]


class ScaledEmbedding(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * 3.0


@pytest.mark.parametrize("fault", [False, True])
def test_embedding_with_a_merged_scale_matches(fault, tmp_path):
    reference, words = nn.Sequential(ScaledEmbedding(11, 4)), torch.arange(6).reshape(2, 3)
    plain = nn.Sequential(nn.Embedding(11, 4))
    plain[0].weight.data = 3.0 * reference[0].weight.data
    plain[0].weight.data[10, 1] += 0.1 * fault
    file = onnx.load_from_string(export(plain, words, "unfolded"))
    weights, _ = weights_report(reference, words, file, tmp_path)
    assert weights.matched == ({} if fault else {"computed": 1})


class Unobservable(Clamped):
    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return super().forward(x)


def test_unobservable_forward_compares_by_name_only(tmp_path):
    torch.manual_seed(3)
    reference = Unobservable()
    used = reference.weight.detach().clamp(min=0.0).numpy()
    shape = [value("x", ("b", 6))], [value("y", ("b", 6))]
    for name, change, count in (("w", 1, 0), ("weight", 0, 0), ("weight", 1, 1)):
        constants = {name: used + np.float32(change)}
        proto = model(
            [node("MatMul", ["x", name], ["y"])], constants, inputs=shape[0], outputs=shape[1]
        )
        _, result = weights_report(reference, torch.ones(3, 6), proto, tmp_path)
        assert len(result) == count


def make_dense_with_norm() -> nn.Module:
    return Layers(
        lambda m, x: m.norm(m.dense(x)),
        dense=lambda: nn.Linear(4, 4),
        norm=lambda: nn.BatchNorm1d(4),
    )


@pytest.mark.parametrize("with_weight", [True, False])
def test_changed_bias_is_found_only_when_its_weight_is_unfolded(with_weight, tmp_path):
    reference = make_dense_with_norm().eval()
    weight = reference.dense.weight.detach().numpy()
    constants = {
        "dense.weight" if with_weight else "dense.weight_quantized": weight
        * (1 if with_weight else 0.3),
        "dense.bias": np.asarray([3.3, 1.1, 2.2, 4.4], np.float32),
    }
    gemm = node("Gemm", ["x", *constants], ["y"], transB=1)
    _, result = weights_report(reference, torch.ones(3, 4), model([gemm], constants), tmp_path)
    assert [item.place for item in result] == (["dense.bias"] if with_weight else [])


class Small(nn.Module):
    """A model with weights below the smallest float16 and below the limits of the converters."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 9), nn.Linear(9, 4)
        with torch.no_grad():
            self.layer.weight[0] = torch.tensor([3e-8, -3e-8, 6e-8, -9e-8, 1e-9, -2.5e-8])
            self.layer.weight[4] *= 1e-7
            self.layer.bias[3] = -4e-8

    def forward(self, x):
        return self.head(self.layer(x).relu())


def clamp_to_float16(array, least, most):
    """Clamp and convert to float16 as onnxconverter-common and ONNX Runtime do.

    Limits of `convert_np_to_float16` on 2026-11-28: (1e-7, 1e4) in onnxconverter-common, (5.96e-8,
    65504) in ONNX Runtime.
    """
    size = np.clip(np.abs(array), least, most)
    return np.float16(np.where(array == 0.0, 0.0, np.copysign(size, array)))


def make_float16_codes(change):
    """Return a function that gives the finding codes of a float16 file of `Small`.

    `change` maps a name and an array to the weight in the file.
    """

    def find_codes(tmp_path):
        torch.manual_seed(0)
        reference = Small().eval()
        weights = {
            name: change(name, array.detach().numpy().copy())
            for name, array in reference.named_parameters()
        }
        nodes = [node("Cast", ["x"], ["h"], to=10)]
        source = "h"
        for name in ("layer", "head"):
            inputs = [source, f"{name}.weight", f"{name}.bias"]
            nodes.append(node("Gemm", inputs, [f"{name}_out"], transB=1))
            source = f"{name}_out"
            if name == "layer":
                nodes.append(node("Relu", [source], ["r"]))
                source = "r"
        nodes.append(node("Cast", [source], ["y"], to=1))
        sizes = {"inputs": [value("x", ("b", 6))], "outputs": [value("y", ("b", 4))]}
        file = model(nodes, weights, **sizes)
        _, result = weights_report(reference, torch.ones(2, 6), file, tmp_path)
        return {item.code for item in result}

    return find_codes


@pytest.mark.parametrize("limits", [(1e-7, 1e4), (5.96e-8, 65504.0), (0.0, 65504.0)])
def test_small_float16_weights_may_be_rounded_or_clamped(limits, tmp_path):
    assert "other_weights" not in make_float16_codes(
        lambda _, array: clamp_to_float16(array, *limits)
    )(tmp_path)


@pytest.mark.parametrize(
    ("place", "altered"), [((0, 0), 2.4e-7), ((0, 3), 1.8e-7), ((4, 2), 0.0), ((0, 0), -1.2e-7)]
)
def test_changed_small_float16_weight_is_found(place, altered, tmp_path):
    def change(name, array):
        clamped = clamp_to_float16(array, 1e-7, 1e4)
        if name == "layer.weight":
            sign = np.sign(array[place])
            clamped[place] = np.float16(sign * altered)
        return clamped

    assert "other_weights" in make_float16_codes(change)(tmp_path)


@pytest.mark.parametrize("number", [2e4, -6e4])
def test_clamped_large_weight_is_found(number, tmp_path, monkeypatch):
    class Large(Small):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.layer.weight[1, 1] = number

    monkeypatch.setitem(globals(), "Small", Large)
    keeping_limits, clamping_limits = ((1e-7, 65504.0), (1e-7, 1e4))
    assert "other_weights" not in make_float16_codes(
        lambda _, array: clamp_to_float16(array, *keeping_limits)
    )(tmp_path)
    assert "other_weights" in make_float16_codes(
        lambda _, array: clamp_to_float16(array, *clamping_limits)
    )(tmp_path)
