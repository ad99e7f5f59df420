"""Modules are matched with tensors in files of all exporters; a single fault has one source."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from gate import Localization, MeasurementJob, SampleSet, TestedFile, locate
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    InputMismatch,
    ModelError,
    OnnxFileError,
    StorageError,
)
from gate.localize.file_graph import SubgraphSession
from tests.localize import nets
from tests.localize.nets import (
    IMAGES,
    INPUTS,
    OUTPUTS,
    TOKENS,
    VECTORS,
    Codes,
    Exporter,
    Flat,
    Residual,
    Shared,
    Tokens,
    change_weight,
    edit_input,
    edit_operator,
    edit_weight,
    layer_rows,
    list_titles,
    localize_file,
    remove_node,
)
from tests.measure import tiny
from tests.modules import Function, Layers

# In order of execution. A folded BatchNorm stands for its convolution. Dropout computes nothing in
# eval mode. The second call of a module has its own row.
ROWS = {
    Residual: {
        "stem.1": "BatchNorm2d",
        "stem.2": "ReLU",
        "block.bn1": "BatchNorm2d",
        "block.relu": "ReLU",
        "block.bn2": "BatchNorm2d",
        "block.relu#1": "ReLU",
        "pool": "AvgPool2d",
        "head": "Linear",
    },
    Tokens: {
        "embed": "Embedding",
        "layer.norm1": "LayerNorm",
        "layer.qkv": "Linear",
        "layer.proj": "Linear",
        "layer.norm2": "LayerNorm",
        "layer.fc1": "Linear",
        "layer.act": "GELU",
        "layer.fc2": "Linear",
        "head": "Linear",
    },
    Shared: {
        "twice": "Linear",
        "act": "Tanh",
        "twice#1": "Linear",
        "act#1": "Tanh",
        "left": "Linear",
        "right": "Linear",
    },
    Codes: {"conv": "Conv2d", "head": "Linear"},
}
ROWS[Flat] = ROWS[Shared]


class TestMapping:
    @pytest.mark.rows(4)
    @pytest.mark.parametrize(
        ("kind", "by"),
        [
            (Residual, "traced"),
            (Residual, "direct"),
            (Residual, "scripted"),
            pytest.param(Residual, "dynamo", marks=pytest.mark.proof),
            (Tokens, "traced"),
            (Tokens, "direct"),
            (Tokens, "scripted"),
            (Shared, "direct"),
            (Shared, "dynamo"),
            (Flat, "traced"),
            (Flat, "direct"),
            (Flat, "scripted"),
            (Codes, "traced"),
            (Codes, "direct"),
        ],
    )
    def test_each_module_call_has_its_tensor_and_no_source(self, export_net, kind, by):
        model, candidate = export_net(kind, by)
        reported = localize_file(model, candidate, INPUTS[kind])
        rows = layer_rows(reported)
        assert {title: row.kind for title, row in rows.items()} == ROWS[kind]
        assert list(rows) == list(ROWS[kind])
        tensors = [row.tensor for row in rows.values()]
        assert None not in tensors
        assert len(set(tensors)) == len(tensors)
        assert reported.unmapped == ()
        assert (reported.first_divergence, reported.remedy, reported.diverges) == (
            None,
            None,
            False,
        )
        assert reported.cause == "No layer diverges on 6 samples."
        assert {row.verdict for row in reported.layers} == {"ok"}
        assert (reported.subject_sha256, reported.samples) == (candidate.subject.sha256, 6)

    @pytest.mark.parametrize(
        ("kind", "by", "tensors"),
        [
            (Residual, "direct", {
                "stem.1": "/stem/stem.0/Conv_output_0",
                "block.relu": "/block/relu/Relu_output_0",
                "block.relu#1": "/block/relu_1/Relu_output_0",
                "head": "logits",
            }),
            (Residual, "traced", {
                "stem.1": "/stem/0/Conv_output_0",
                "block.relu": "/block/relu/Relu_output_0",
                "block.relu#1": "/block/Relu_output_0",
            }),
            (Shared, "direct", {
                "twice": "/twice/Gemm_output_0",
                "twice#1": "/twice_1/Gemm_output_0",
                "left": "left",
                "right": "right",
            }),
            (Tokens, "direct", {
                "layer.fc1": "/layer/fc1/Add_output_0",
                "layer.act": "/layer/act/Mul_1_output_0",
            }),
        ],
    )  # fmt: skip
    def test_tensor_is_the_output_of_the_module(self, export_net, kind, by, tensors):
        rows = layer_rows(localize_file(*export_net(kind, by), INPUTS[kind]))
        assert {title: rows[title].tensor for title in tensors} == tensors

    def test_code_outputs_and_folded_layers_have_rows(self, export_net):
        reported = localize_file(*export_net(Residual), IMAGES)
        code = {row.kind: row.module for row in reported.layers if row.kind.startswith("code")}
        assert code == {"code: Add": "block", "code: Flatten": ""}
        rows = layer_rows(reported)
        assert rows["stem.1"].detail == "with stem.0 folded in"
        assert rows["block.bn2"].detail == "with block.conv2 folded in"
        assert rows["block.relu"].detail is None
        reported = localize_file(*export_net(Shared), VECTORS)
        assert [row.tensor for row in reported.layers if row.kind == "code: ArgMax"] == ["most"]
        output_rows = [
            (row.kind, row.tensor) for row in reported.layers if row.kind.startswith("output")
        ]
        assert output_rows == [
            (f"output of the whole file, {level}", name)
            for level in ("optimized", "not optimized")
            for name in ("left", "right", "most")
        ]

    def test_unfolded_batch_norm_has_its_own_row(self, tmp_path):
        model = nets.build(Residual)
        candidate = nets.export(
            model, tmp_path / "m.onnx", IMAGES, training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )  # fmt: skip
        reported = localize_file(model, candidate, IMAGES)
        assert list(layer_rows(reported))[:3] == ["stem.0", "stem.1", "stem.2"]
        assert not reported.diverges

    def test_inputs_in_a_different_order_than_the_samples(self, tmp_path):
        pair = _Pair().eval()
        left, right = VECTORS, VECTORS[::-1].copy()
        candidate = tiny.export(
            pair, tmp_path / "m.onnx", example={"left": left[:2], "right": right[:2]}
        )
        reported = localize_file(pair, candidate, {"right": right, "left": left})
        assert [row.verdict for row in layer_rows(reported).values()] == ["ok", "ok"]
        assert not reported.diverges

    def test_fused_attention_is_compared_inside(self, tmp_path):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        example = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            candidate = nets.export(model, tmp_path / "m.onnx", example)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)
        reported = localize_file(model, candidate, example)
        inside = {"self_attn", "norm1", "linear1", "linear2", "norm2"}
        assert {f"layers.0.{name}" for name in inside} <= set(layer_rows(reported))
        assert not reported.diverges

    def test_fixed_batch_file_uses_whole_batches(self, tmp_path):
        model = nets.build(Shared)
        candidate = nets.export(
            model, tmp_path / "m.onnx", VECTORS, outputs=OUTPUTS[Shared], dynamic_axes=None
        )
        assert candidate.subject.inputs[0].shape == (2, 6)
        assert localize_file(model, candidate, VECTORS, limit=3).samples == 4

    @pytest.mark.parametrize(("limit", "count", "samples"), [(3, 6, 3), (8, 1, 1)])
    def test_first_samples_are_used(self, export_net, limit, count, samples):
        reported = localize_file(*export_net(Shared), VECTORS[:count], limit=limit)
        assert (reported.samples, reported.diverges) == (samples, False)

    def test_module_that_returns_a_scalar(self, tmp_path):
        model = _tempered().eval()
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
        reported = localize_file(model, candidate, VECTORS)
        assert layer_rows(reported)["most"].verdict == "ok"
        assert not reported.diverges


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, left, right):
        return self.first(left) - 2 * self.second(right)


def _tempered() -> nn.Module:
    return Layers(
        lambda m, x: (y := m.layer(x)) / m.most(y),
        layer=lambda: nn.Linear(6, 4),
        most=lambda: Function(lambda y: y.abs().max()),
    )


class TestSingleFault:
    """A single fault is the only source; earlier rows are right, later rows are propagated."""

    @pytest.mark.rows(4)
    @pytest.mark.parametrize(
        ("kind", "by", "spoil", "source"),
        [
            (Residual, "direct", edit_input("Conv", 0), "stem.0"),
            (Residual, "traced", edit_input("Conv", 1), "block.conv1"),
            (Residual, "scripted", edit_input("Conv", 2), "block.conv2"),
            (Residual, "dynamo", edit_weight("head.weight"), "head"),
            (Residual, "dynamo", remove_node("Relu", 1), "block.relu"),
            (Residual, "direct", edit_input("Conv", 1, 2), "block.bn1"),
            (Residual, "direct", remove_node("Relu", 1), "block.relu"),
            (Residual, "direct", remove_node("Relu", 2), "block.relu#1"),
            (Residual, "scripted", edit_weight("head.bias"), "head"),
            (Tokens, "direct", edit_weight("embed.weight", lambda w: w * 1.1), "embed"),
            (Tokens, "traced", edit_input("LayerNormalization", 1), "layer.norm2"),
            (Tokens, "scripted", edit_input("MatMul", 0), "layer.qkv"),
            (Tokens, "direct", edit_input("MatMul", 5), "layer.fc2"),
            (Shared, "direct", edit_weight("left.weight"), "left"),
            (Shared, "dynamo", edit_weight("right.weight"), "right"),
        ],
    )  # fmt: skip
    def test_single_fault_has_one_source(self, export_net, kind, by, spoil, source):
        model, candidate = export_net(kind, by)
        reported = localize_file(model, candidate, INPUTS[kind], edit=spoil)
        assert reported.first_divergence == source.partition("#")[0]
        assert reported.diverges
        (row,) = (row for row in reported.layers if row.verdict == "source")
        assert row.title == source
        assert row.detail
        assert row.detail in reported.cause
        assert reported.remedy
        _assert_propagated(reported)

    @pytest.mark.parametrize("by", ["direct", "dynamo"])
    @pytest.mark.parametrize("kind", [nn.Sigmoid, nn.SiLU])
    def test_saturated_sigmoid_before_the_fault_is_ok(self, tmp_path, kind, by: Exporter):
        """Accept the absolute error of ONNX Runtime's sigmoid, which exceeds PyTorch's for small
        values.
        """
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6)).eval()
        nn.init.constant_(model[0].bias, -15.0)
        nn.init.constant_(model[0].weight[0], 9.0)
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, by=by)
        assert list_titles(
            localize_file(model, candidate, VECTORS, edit=edit_weight("2.weight")),
            "source",
        ) == ["2"]

    def test_optimized_runtime_has_the_same_source(self, export_net):
        model, candidate = export_net(Residual)
        reported = localize_file(
            model, candidate, IMAGES, runtime="ort-cpu-optimized", edit=edit_input("Conv", 1)
        )
        assert (reported.first_divergence, reported.runtime) == ("block.conv1", "ort-cpu-optimized")
        assert not localize_file(model, candidate, IMAGES, runtime="ort-cpu-optimized").diverges

    def test_amplification_is_relative_to_the_previous_row(self, export_net):
        model, candidate = export_net(Tokens)
        rows = [
            row
            for row in localize_file(model, candidate, TOKENS, edit=edit_input("MatMul", 0)).layers
            if row.local_ratio is not None
        ]
        assert rows[0].amplification is None
        for before, row in itertools.pairwise(rows):
            if before.noise_ratio:
                assert row.amplification == row.noise_ratio / before.noise_ratio
        (source,) = (row for row in rows if row.verdict == "source")
        assert source.amplification > 100
        assert all(row.local_ratio < 8 for row in rows if row is not source)

    def test_wrong_checkpoint_is_one_fault(self, export_net):
        model, candidate = export_net(Residual)

        def spoil(proto: onnx.ModelProto) -> None:
            for tensor in list(proto.graph.initializer):
                change_weight(proto, tensor.name, lambda values: values * 1.1)

        reported = localize_file(model, candidate, IMAGES, edit=spoil)
        assert reported.first_divergence == "stem.1"
        assert "3 other modules differ too: the file is of another checkpoint." in reported.cause
        assert "checkpoint" in reported.remedy


def _assert_propagated(record: Localization) -> None:
    """Assert that rows before the source are ok and that an output after it is propagated."""
    listed = [row.verdict for row in record.layers]
    at = listed.index("source")
    assert set(listed[:at]) <= {"ok"}
    assert set(listed[at + 1 :]) <= {"ok", "propagated"}
    assert "propagated" in [
        row.verdict for row in record.layers if row.kind.startswith("output of the whole")
    ]


class _Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such branch")


class _Text(nn.Module):
    def forward(self, x):
        return {"logits": x, "label": "cat"}


class _Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [(torch.ones(2, requires_grad=True) * 2) + 1]

    def forward(self, x):
        return x


_MORE_AXES = Layers(lambda m, x: m.layer(x.unsqueeze(-1)), layer=lambda: nn.Conv1d(6, 7, 1))
"""A model whose values have more axes than any tensor of the file."""


_ALL_NAN = Layers(lambda m, x: torch.log(-m.layer(x).abs() - 1), layer=lambda: nn.Linear(6, 3))
"""A model that returns the logarithm of negative numbers."""


_CAST_TO_BFLOAT16 = Layers(
    lambda m, x: m.layer(x.bfloat16()).float(), layer=lambda: nn.Linear(6, 3).bfloat16()
)
"""A model that casts its input to bfloat16, as its weights were."""


@pytest.fixture
def linear_file(tmp_path):
    """The file of two linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval()
    return nets.export(model, tmp_path / "plain.onnx", VECTORS)


class TestErrors:
    """Errors name the problem and the remedy."""

    @pytest.mark.parametrize(
        ("model", "error", "said"),
        [
            (_Broken(), EvidenceError, ["no such branch", "Check that it is the model of"]),
            (_Text(), ModelError, ["returned str", "wrap the model"]),
            (_Uncopyable(), ModelError, ["can't be copied", "gradient history"]),
            (nn.Linear(5, 3), EvidenceError, ["can't compute", "accepts these inputs"]),
            (_CAST_TO_BFLOAT16, EvidenceError, ["can't compute", "not to float16 or bfloat16"]),
            (_MORE_AXES, EvidenceError, ["mapped 0 of 1 module calls (Conv1d)",
                                        "use the factory and the checkpoint"]),
            (_ALL_NAN, EvidenceError, ["no finite number", "Use samples"]),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )  # fmt: skip
    def test_model_errors(self, linear_file, model, error, said):
        with pytest.raises(error) as raised:
            localize_file(model.eval(), linear_file, VECTORS)
        for part in said:
            assert part in str(raised.value)

    def test_runtime_without_outputs_is_an_error(self, linear_file, monkeypatch):
        def fail(*_args, **_more):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(SubgraphSession, "__call__", fail)
        with pytest.raises(EvidenceError, match=r"plain\.onnx.*layer by layer: .*no kernel"):
            localize_file(
                nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval(), linear_file, VECTORS
            )

    def test_model_with_other_widths_is_described(self, linear_file):
        wider = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)).eval()
        reported = localize_file(wider, linear_file, VECTORS)
        assert reported.first_divergence == "0"
        assert "no tensor of the file has its values" in reported.cause

    @pytest.mark.parametrize(
        ("inputs", "error"),
        [
            ({"input": VECTORS.astype(np.float64)}, InputMismatch),
            ({"input": VECTORS[:, :5]}, InputMismatch),
            ({"a": VECTORS, "b": VECTORS}, InputMismatch),
        ],
        ids=["dtype", "size", "number"],
    )
    def test_sample_errors(self, linear_file, inputs, error):
        with pytest.raises(error):
            localize_file(nn.Linear(6, 3), linear_file, inputs)

    @pytest.mark.parametrize(
        ("spoil", "error"),
        [
            (lambda path: path.write_bytes(path.read_bytes()[:-9]), DigestMismatch),
            (lambda path: path.unlink(), StorageError),
        ],
        ids=["changed", "gone"],
    )
    def test_file_not_matching_its_subject_is_refused(self, linear_file, spoil, error):
        spoil(linear_file.path)
        with pytest.raises(error):
            localize_file(nn.Linear(6, 3), linear_file, VECTORS)

    def test_invalid_graph_is_refused(self, linear_file):
        linear_file.path.write_bytes(b"\xff" * 40)
        subject = linear_file.subject.model_copy(
            update={"sha256": tiny.Digest.from_file(linear_file.path)}
        )
        with pytest.raises(OnnxFileError, match="can't be read as an ONNX graph.*export it again"):
            localize_file(nn.Linear(6, 3), TestedFile(linear_file.path, subject), VECTORS)

    def test_file_that_changes_while_reading_is_refused(self, export_net, tmp_path):
        model, candidate = export_net(Shared)
        copied = tiny.edit(candidate, tmp_path / "m.onnx", lambda proto: None)

        class Changes(type(model)):
            def forward(self, x):
                copied.path.write_bytes(b"another")
                return super().forward(x)

        changing = copy.deepcopy(model)
        changing.__class__ = Changes
        with pytest.raises(DigestMismatch):
            localize_file(changing, copied, VECTORS)

    def test_file_that_the_runtime_cannot_open(self, linear_file):
        with pytest.raises(EvidenceError, match="edited.onnx can't compute.*Glue"):
            localize_file(
                nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)),
                linear_file,
                VECTORS,
                edit=edit_operator("Gemm", "Glue"),
            )


class TestNonfiniteValues:
    """NaN and infinity are a fault only if one side alone has them."""

    @pytest.mark.parametrize(
        ("shift", "detail"),
        [(0.0, None), (100.0, "no finite number in the file, nor in PyTorch")],
        ids=["some values", "all values"],
    )
    def test_nonfinite_values_of_code(self, tmp_path, shift, detail):
        model = _logarithm(shift=shift).eval()
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
        reported = localize_file(model, candidate, VECTORS)
        assert not reported.diverges
        assert layer_rows(reported)["log"].detail == detail
        reported = localize_file(model, candidate, VECTORS, edit=edit_operator("Log", "Exp"))
        assert reported.first_divergence == "log"
        assert layer_rows(reported)["log"].max_abs_diff == np.inf

    @pytest.mark.parametrize(("name", "value"), [("head.bias", np.nan), ("head.weight", -np.inf)])
    def test_nonfinite_weight_of_the_file(self, export_net, name, value):
        def spoil(values):
            values.flat[2] = value
            return values

        model, candidate = export_net(Residual)
        reported = localize_file(model, candidate, IMAGES, edit=edit_weight(name, spoil))
        assert reported.first_divergence == "head"
        assert name in reported.cause
        assert list_titles(reported, "propagated") == ["(model)", "(model)"]
        Localization.from_json(reported.to_json())


def _logarithm(shift: float) -> nn.Module:
    return Layers(
        lambda m, x: m.head(torch.nan_to_num(m.log(m.layer(x) - shift)) + x),
        layer=lambda: nn.Linear(6, 6),
        log=lambda: Function(torch.log),
        head=lambda: nn.Linear(6, 3),
    )


class TestOutputs:
    """Faults in the outputs are found although all layers are right."""

    def test_outputs_in_a_different_order(self, tmp_path):
        model = nets.build(Flat)
        model.right = copy.deepcopy(model.left)
        nn.init.normal_(model.right.weight)
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, outputs=OUTPUTS[Flat])

        def swap(proto: onnx.ModelProto) -> None:
            listed = list(proto.graph.output)
            del proto.graph.output[:]
            proto.graph.output.extend([listed[1], listed[0], listed[2]])

        reported = localize_file(model, candidate, VECTORS, edit=swap)
        assert reported.first_divergence == ""
        assert "the outputs are in another order" in reported.cause
        assert "output_names" in reported.remedy
        sources = [row.tensor for row in reported.layers if row.verdict == "source"]
        assert set(sources) == {"left", "right"}

    def test_additional_node_behind_the_last_module(self, export_net):
        model, candidate = export_net(Residual)

        def append_negation(proto: onnx.ModelProto) -> None:
            (last,) = (item for item in proto.graph.node if "logits" in item.output)
            last.output[0] = "inner"
            proto.graph.node.append(helper.make_node("Neg", ["inner"], ["logits"], name="minus"))

        reported = localize_file(model, candidate, IMAGES, edit=append_negation)
        assert reported.first_divergence == ""
        assert reported.cause == (
            "The model itself is wrong although its inputs are right: output logits is not what "
            "the model returns; the tensor inner is, and Neg minus follows it."
        )
        assert layer_rows(reported)["head"].verdict == "ok"
        assert [row.tensor for row in reported.layers if row.verdict == "source"] == ["logits"] * 2


def _read_state() -> dict[str, object]:
    """Return all global switches and random states that a measurement might change."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "errors": np.geterr(),
    }


def _read_model_state(model: nn.Module) -> list[object]:
    """Return all state of a model that a measurement might change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        *((n, t.data_ptr(), t.dtype, t.requires_grad, t._version, t.tolist()) for n, t in tensors),
        *((path, item.training, type(item)) for path, item in model.named_modules()),
        *((len(item._forward_hooks), len(item._forward_pre_hooks)) for item in model.modules()),
        *(parameter.grad for parameter in model.parameters()),
        *(sorted(vars(item)) for item in model.modules()),
    ]


class _Noisy(nn.Module):
    """A model that draws from all random states, changes a buffer in forward, and may raise."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.breaks = breaks
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        torch.rand(3)
        np.random.rand(3)
        random.random()
        if self.breaks:
            raise RuntimeError("broken")
        return self.layer(x)


@pytest.fixture(params=[True, False], ids=["usual", "unusual"])
def switches(request):
    """Set all switches to one or the other position, and restore them."""
    mha, cudnn = torch.backends.mha, torch.backends.cudnn
    before = torch.get_num_threads(), mha.get_fastpath_enabled(), cudnn.benchmark
    mha.set_fastpath_enabled(request.param)
    cudnn.benchmark = not request.param
    torch.set_num_threads(2 if request.param else 3)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        mha.set_fastpath_enabled(before[1])
        cudnn.benchmark = before[2]


@pytest.mark.parametrize("breaks", [False, True], ids=["locates", "raises"])
def test_model_switches_and_random_states_are_restored(switches, tmp_path, breaks):
    model = _Noisy(breaks=False)
    candidate = nets.export(model.eval(), tmp_path / "m.onnx", VECTORS)
    model.breaks = breaks
    model.train()
    model.layer.eval()
    model.layer.bias.requires_grad_(False)
    model.layer.register_forward_hook(lambda *_: None)
    inputs = VECTORS.copy()
    before = _read_model_state(model), _read_state()
    if breaks:
        with pytest.raises(EvidenceError, match="broken"):
            localize_file(model, candidate, inputs)
    else:
        assert not localize_file(model, candidate, inputs).diverges
    assert (_read_model_state(model), _read_state()) == before
    np.testing.assert_array_equal(inputs, VECTORS)


def test_state_is_restored_after_an_interrupt(switches, export_net, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gate.localize.layer_deviations.Measuring._compare", stop)
    model, candidate = export_net(Residual)
    before = _read_model_state(model), _read_state()
    with pytest.raises(KeyboardInterrupt):
        localize_file(model, candidate, IMAGES)
    assert (_read_model_state(model), _read_state()) == before


def test_default_number_of_samples(export_net):
    """Use eight samples by default."""
    model, candidate = export_net(Shared)
    reported = locate(MeasurementJob(model, candidate, SampleSet.from_arrays({"input": np.concatenate([VECTORS, VECTORS])}), policy=nets.POLICY), runtime="ort-cpu")  # fmt: skip
    assert reported.samples == 8


def test_model_of_one_layer(tmp_path):
    """Name the model itself if it is a single layer, whose path is empty."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS, edit=edit_input("Gemm", 0))
    assert reported.first_divergence == ""
    assert reported.cause.startswith(
        "The model itself is wrong although its inputs are right: weight"
    )
    assert list_titles(reported, "source") == ["(model)"]
