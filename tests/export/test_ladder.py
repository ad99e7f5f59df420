"""Models of many kinds pass the default policy after an export with `strategy: ladder`."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.maxvit import MaxVit
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks import torchvision_models
from gate import EvaluationData, EvaluationResult, Reference, SampleSet, Verdict, check
from gate.export.export import Exported, export_model
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.summary.render import render_check
from tests.exhaustive import exhaustive

SAMPLES, BATCH, SIDE = 8, 2, 32


def export_and_check(model, arrays, folder, **settings):
    output = folder / "model.onnx"
    requested = ExportSettings(**{"batch_size": BATCH, "opset": "auto", **settings})
    exported = export_model(model, arrays, settings=requested, output=output)
    verdicted = check(
        output,
        reference=Reference(model, Source(factory="tests:model"), exported.record),
        data=EvaluationData(SampleSet.from_arrays(arrays), batch_size=4),
    )
    return exported, verdicted


def assert_passes(verdicted: EvaluationResult) -> None:
    problems = [f"{c.name}: {c.observed} {render_check(c)}" for c in verdicted.decision.problems]
    assert verdicted.decision.verdict is Verdict.PASS, problems


@pytest.mark.proof
@pytest.mark.parametrize(
    "name",
    ["resnet18", pytest.param("googlenet", marks=exhaustive)],  # with auxiliary heads
)
def test_torchvision(tmp_path, name):
    model = torchvision_models.build(name, side=SIDE)
    images = torchvision_models.images(SAMPLES, name, seed=2, side=SIDE)
    exported, verdicted = export_and_check(model, {"input": images}, tmp_path)
    assert (exported.record.strategy, exported.subject.opset) == ("traced", 13)
    assert_passes(verdicted)


def check_on_images(model: nn.Module, folder: Path) -> tuple[Exported, EvaluationResult]:
    observed = torchvision_models.images(16, "a small one", seed=1, side=SIDE)
    images = torchvision_models.images(SAMPLES, "a small one", seed=2, side=SIDE)
    return export_and_check(
        torchvision_models.calibrated(model, observed), {"input": images}, folder
    )


@pytest.mark.proof
def test_small_vision_transformer(tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=SIDE, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    exported, verdicted = check_on_images(model, tmp_path)
    assert (exported.record.strategy, exported.subject.opset) == ("direct", 14)
    assert_passes(verdicted)


@exhaustive
@pytest.mark.proof
def test_small_maxvit(tmp_path):
    torch.manual_seed(0)
    model = MaxVit(
        input_size=(SIDE, SIDE), stem_channels=16, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.2, partition_size=2,
    )  # fmt: skip
    exported, verdicted = check_on_images(model, tmp_path)
    assert exported.record.strategy == "direct"
    assert exported.record.rungs == (
        "traced: the operator aten::swapaxes can't be exported at opset 13",
    )
    assert_passes(verdicted)


@pytest.mark.proof
def test_detector_backbone_keeps_level_names(tmp_path):
    torch.manual_seed(0)
    widths = [3, 8, 12, 16, 20]
    body = nn.Sequential(*(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths)))
    names = {str(index): str(index) for index in range(4)}
    model = BackboneWithFPN(body, names, widths[1:], 16).eval()
    images = torchvision_models.images(SAMPLES, "a small one", seed=2, side=SIDE)
    exported, verdicted = export_and_check(
        model, {"x": images}, tmp_path, dynamic_axes={"x": {2: "height", 3: "width"}}
    )
    assert [spec.name for spec in exported.subject.outputs] == ["0", "1", "2", "3", "pool"]
    assert all(
        isinstance(axis, int) == (index == 1)
        for spec in exported.subject.outputs
        for index, axis in enumerate(spec.shape)
    )
    assert_passes(verdicted)


class Question(nn.Module):
    """Return an answer and an attention map for an image and the words of a question, which are a
    keyword-only input."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 8, 3, stride=2)
        self.read = nn.Embedding(16, 8)
        self.answer = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, *, words: torch.Tensor) -> dict[str, Any]:
        observed = self.see(image).flatten(2)
        requested = self.read(words).mean(1, keepdim=True)
        look = (requested @ observed).softmax(-1)
        return {"logits": self.answer((look @ observed.transpose(1, 2)).squeeze(1)), "look": look}


def test_keyword_only_input(tmp_path):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    arrays = {
        "words": rng.integers(0, 16, (SAMPLES, 6)),
        "image": rng.standard_normal((SAMPLES, 3, 10, 10)).astype(np.float32),
    }
    exported, verdicted = export_and_check(
        Question().eval(), arrays, tmp_path, dynamic_axes={"words": {1: "sequence"}}
    )
    assert [spec.name for spec in exported.subject.inputs] == ["image", "words"]
    assert [spec.name for spec in exported.subject.outputs] == ["logits", "look"]
    assert exported.subject.inputs[1].shape == ("batch", "sequence")
    assert_passes(verdicted)


class Halving(nn.Module):
    """Halve the input until all values are small: the number of steps depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.abs().amax() > 1.0):
            x = x * 0.5
        return self.fc(x)


def test_data_dependent_loop_is_scripted(tmp_path):
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
    # Export single samples, because in a batch the other samples change the number of steps.
    exported, verdicted = export_and_check(
        Halving().eval(), {"x": x}, tmp_path, batch_size=1, dynamic_batch=False
    )
    assert exported.record.strategy == "scripted"
    traced, direct = exported.record.rungs
    assert traced.startswith("traced: refused by TRC008 at ")
    assert direct.startswith("direct: refused by TRC008 at ")
    assert_passes(verdicted)
    unsafe, _ = export_and_check(
        Halving().eval(), {"x": x}, tmp_path, batch_size=1, dynamic_batch=False, lint="off"
    )
    assert unsafe.record.strategy == "scripted"
    traced, direct = unsafe.record.rungs
    assert re.match(r"traced: wrote a file that differs by \S+ from the model in output", traced)
    assert direct.startswith("direct: ")


class Wrapper(nn.Module):
    """A module around a part that may be TorchScript."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(2 * x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("around", [lambda part: part, Wrapper], ids=["whole", "part"])
def test_torchscript_model(tmp_path, around):
    torch.manual_seed(0)
    model = around(torch.jit.script(Halving())).eval()
    x = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
    exported, verdicted = export_and_check(
        model, {"x": x}, tmp_path, batch_size=1, dynamic_batch=False
    )
    assert exported.record.lint_unread
    assert_passes(verdicted)
    assert all(parameter.requires_grad for parameter in model.parameters())


@dataclass
class Boxes:
    corners: torch.Tensor
    scores: torch.Tensor


class Nested(nn.Module):
    """Take a dict and a tuple, return a dict with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, batch, pair):
        mixed = self.fc(batch["image"] * batch["mask"])
        return {"boxes": Boxes(mixed + pair[0], mixed.exp()), "rest": (mixed - pair[1], None)}


@pytest.mark.parametrize(
    "strategy", ["traced", "direct", pytest.param("dynamo", marks=pytest.mark.proof)]
)
def test_nested_inputs_and_outputs_keep_names(tmp_path, strategy):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    widths = {"pair.0": 3, "pair.1": 3, "batch.image": 4, "batch.mask": 4}
    arrays = {
        name: rng.standard_normal((SAMPLES, width)).astype(np.float32)
        for name, width in widths.items()
    }
    exported, verdicted = export_and_check(Nested().eval(), arrays, tmp_path, strategy=strategy)
    assert [spec.name for spec in exported.subject.inputs] == [
        "batch.image", "batch.mask", "pair.0", "pair.1"
    ]  # fmt: skip
    assert [spec.name for spec in exported.subject.outputs] == [
        "boxes.corners", "boxes.scores", "rest.0"
    ]  # fmt: skip
    assert_passes(verdicted)
