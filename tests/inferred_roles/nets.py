"""Networks with outputs that resemble logits or are constant, and their exported files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gate
from gate.export.export import export_model
from gate.export.export_warnings import captured
from gate.records.export import ExportSettings

FEATURES = 6


class Net(nn.Module):
    """A small body followed by `head`; the seed determines all weights."""

    def __init__(self, head: Callable[[Net, torch.Tensor], object], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8))
        self.lstm = nn.LSTM(8, 5, num_layers=2, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.anchors = nn.Parameter(torch.rand(7, 4))
        self.head = head

    def forward(self, input: torch.Tensor) -> object:
        return self.head(self, self.body(input))


def coordinates(net: Net, x: torch.Tensor) -> object:
    """Return a latitude around 48 and a longitude around 11."""
    return x[:, :2] + torch.tensor([48.0, 11.0])


def embedding(net: Net, x: torch.Tensor) -> object:
    return nn.functional.normalize(x + torch.tensor([4.0] + 7 * [0.0]), dim=1)


def sorted_scores(net: Net, x: torch.Tensor) -> object:
    return torch.sigmoid(x).topk(5, dim=1).values


def states(net: Net, x: torch.Tensor) -> object:
    """Return LSTM states, whose batch axis is 1."""
    out, (hidden, cell) = net.lstm(x[:, None].repeat(1, 3, 1))
    return out[:, -1], hidden, cell


def similarities(net: Net, x: torch.Tensor) -> object:
    """Return similarity matrices with two batch axes, as CLIP does."""
    first, second = nn.functional.normalize(x, dim=1), nn.functional.normalize(x.tanh(), dim=1)
    per_image = net.scale.exp() * first @ second.t()
    return per_image, per_image.t(), first


def with_scale(net: Net, x: torch.Tensor) -> object:
    return x, net.scale.exp()


def with_constants(net: Net, x: torch.Tensor) -> object:
    """Return anchors, position ids, a mask of true values and an auxiliary loss of zero."""
    indices = torch.arange(5)[None].repeat(x.shape[0], 1)
    return x, net.anchors.exp(), indices, indices >= 0, (x * 0.0).sum()


def with_float_indices(net: Net, x: torch.Tensor) -> object:
    indices = torch.arange(5, dtype=torch.float32)[None] + x[:, :1] * 0.0
    return x, indices


HEADS = (coordinates, embedding, sorted_scores, states, similarities, with_scale, with_constants,
         with_float_indices)  # fmt: skip


def inputs(samples: int) -> np.ndarray:
    """Return inputs so small that the largest column does not change by itself."""
    return np.random.default_rng(samples).normal(size=(samples, FEATURES)).astype(np.float32)


def export(model: nn.Module, path: Path) -> Path:
    settings = ExportSettings(strategy="direct", batch_size=4, input_names=("input",))
    export_model(model.eval(), {"input": inputs(4)}, settings=settings, output=path)
    return path


def export_with_torch(
    model: nn.Module,
    path: Path,
    *examples: torch.Tensor,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    axes: tuple[str, ...] = ("batch",),
) -> Path:
    """Export with PyTorch, because the gate's export converts the model to float32. `axes`: names
    of the first axes of all inputs and outputs, which are dynamic.
    """
    with captured():
        torch.onnx.export(
            model.eval(),
            examples,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: dict(enumerate(axes)) for name in (*inputs, *outputs)},
        )
    return path


def make_policy(task: str = "auto", **fields: object) -> gate.Policy:
    """Return the built-in policy without probes."""
    policy = gate.Policy.default(task=task)
    instruments = policy.instruments.model_copy(update={"probes": False, "search_inputs": 0})
    return policy.model_copy(update={"instruments": instruments, **fields})


def check_file(model, onnx, samples, policy=None):
    return gate.check(onnx, model, {"input": inputs(samples)}, policy)
