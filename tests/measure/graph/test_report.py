"""Graph reports of correct exports have no forbidden finding."""

import warnings

import numpy as np
import onnx
import pytest
import torch
import torchvision
from torch import nn

from gate import Digest, TestedFile
from gate.errors import OnnxFileError
from gate.onnx_file.reading import read_subject
from gate.policy.sections import Instruments
from gate.weights.instrument import read_graph
from tests.measure import tiny
from tests.measure.graph.build import model, node, reference_run, report
from tests.modules import Layers


class Causal(nn.Module):
    """A transformer with a causal mask of -inf that returns the mean over tokens."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x):
        return self.layers(x, mask=self.mask, is_causal=True).mean(1)


def make_tokens() -> nn.Module:
    """Return an embedding with a zero padding row, and an LSTM with a zero initial state."""
    return Layers(
        lambda m, x: m.lstm(m.embedding(x))[0],
        embedding=lambda: nn.Embedding(9, 4, padding_idx=0),
        lstm=lambda: nn.LSTM(4, 5, batch_first=True),
    )


def make_vit():
    """Return an untrained ViT, whose class token and head are zero."""
    return torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=5)


def make_swin():
    """Return a Swin transformer, whose shifted windows have masks that are mostly zero."""
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[2], num_heads=[2], window_size=[4, 4],
        num_classes=5,
    )  # fmt: skip


class ZeroResidual(nn.Module):
    """A residual branch whose BatchNorm scale is zero; folding makes the weights of its convolution
    zero.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return (x + self.norm(self.conv(x))).mean((2, 3))


IMAGES = tiny.images(3)
MODELS = {
    "net": (tiny.net, IMAGES),
    "causal": (Causal, np.ones((3, 5, 16), np.float32)),
    "tokens": (make_tokens, np.arange(18).reshape(3, 6) % 9),
    "vit": (make_vit, np.ones((3, 3, 16, 16), np.float32)),
    "swin": (make_swin, np.ones((3, 3, 32, 32), np.float32)),
    "zero residual": (ZeroResidual, IMAGES),
}


@pytest.fixture(autouse=True)
def disable_fused_attention():
    """Disable fused attention, which PyTorch uses without gradients and which can't be exported."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was_enabled)


def export(reference, batch, path, *, dynamo):
    warnings.simplefilter("ignore")
    arguments = (torch.from_numpy(batch),)
    if dynamo:
        batches = {0: torch.export.Dim("batch")}
        torch.onnx.export(
            reference, arguments, str(path), dynamo=True, verbose=False, dynamic_shapes=(batches,)
        )
    else:
        axes = {"x": {0: "batch"}, "y": {0: "batch"}}
        torch.onnx.export(
            reference, arguments, str(path), dynamo=False, opset_version=14,
            input_names=["x"], output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip
    return path


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize(("name", "dynamo"), [
    *((name, False) for name in MODELS),
    ("causal", True),
    pytest.param("vit", True, marks=pytest.mark.proof),
])  # fmt: skip
def test_correct_export_has_no_forbidden_finding(tmp_path, name, dynamo):
    build, batch = MODELS[name]
    torch.manual_seed(0)
    reference = build().eval()
    with warnings.catch_warnings():
        path = export(reference, batch, tmp_path / "model.onnx", dynamo=dynamo)
    observed = report(path, tmp_path, reference, batch={"x": batch})
    forbidden = Instruments().graph_forbid
    assert [finding for finding in observed.findings if finding.code in forbidden] == []
    assert observed.nodes == sum(observed.operators.values()) > 0
    assert observed.initializers > 0
    assert bool(observed.external_data) is dynamo


def test_report_of_a_small_export(tmp_path):
    reference = tiny.net()
    candidate = tiny.export(reference, tmp_path / "model.onnx")
    requested = reference_run(reference, {"input": tiny.images(3)})
    requested.run = lambda _batch: pytest.fail(
        "nothing in the file gives a reason to run the model"
    )
    observed = read_graph(candidate, requested)
    assert observed.operators == {"Conv": 1, "Gemm": 1, "ReduceMax": 1, "Relu": 1}
    assert (observed.nodes, observed.initializers) == (4, 4)
    assert (observed.external_data, observed.findings) == ({}, ())


def test_graph_with_undefined_tensor_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model([node("Relu", ["x"], ["y"])]), path)
    subject = read_subject(path)
    proto = onnx.load(path)
    proto.graph.node[0].input[0] = "z"
    data = proto.SerializeToString()
    path.with_name("bad.onnx").write_bytes(data)
    bad = subject.model_copy(update={"sha256": Digest.from_bytes(data)})
    with pytest.raises(OnnxFileError, match="nothing in the graph makes"):
        read_graph(TestedFile(path.with_name("bad.onnx"), bad), reference_run())
