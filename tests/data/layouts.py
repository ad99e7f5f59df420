"""Small models with the batch on an axis other than 0, or without a batch axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.export.export_warnings import captured

Arrays = dict[str, NDArray[Any]]
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


class Recurrent(nn.Module):
    """A GRU with its state (layers, batch, hidden) as an input and an output."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 6, 2, batch_first=True), nn.Linear(6, 3)
        self.right = right

    def forward(self, x: torch.Tensor, h0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = self.gru(x, h0 if self.right else h0 * 1.001)
        return self.head(y[:, -1]), h


class Voice(nn.Module):
    """A voice activity detector with a state and a sampling rate as inputs."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 1)
        self.right = right

    def forward(
        self, x: torch.Tensor, state: torch.Tensor, sr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = self.cell(x * (16000 / sr), (state[0], state[1]))
        return self.head(h if self.right else h.relu()).sigmoid(), torch.stack([h, c])


class Graph(nn.Module):
    """Two rounds of message passing on one graph."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.right = right

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index[0], edge_index[1]
        if not self.right:
            source, target = target, source
        h = self.first(x).relu()
        reached = target[None] == torch.arange(x.shape[0])[:, None]
        return self.second(h + reached.float() @ h[source])


class Masks(nn.Module):
    """Segment one image from boxes; the third input is the original image size."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.conv, self.prompt = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.right = right

    def forward(
        self, image: torch.Tensor, boxes: torch.Tensor, orig_size: torch.Tensor
    ) -> torch.Tensor:
        size = orig_size.float() if self.right else orig_size.flip(0).float()
        relative = boxes / torch.cat([size.flip(0), size.flip(0)])
        return torch.einsum("nc,chw->nhw", self.prompt(relative), self.conv(image)[0])


class Decoder(nn.Module):
    """One attention step with a cache, which is empty at first."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)
        self.right = right

    def forward(self, ids: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        keys = torch.cat([past, k], 1)
        weights = (q @ keys.transpose(1, 2) / (8.0 if self.right else 9.0) ** 0.5).softmax(-1)
        return self.head(weights @ torch.cat([past, v], 1)), keys


class Picture(nn.Module):
    """Process one image (3, height, width) without a batch axis."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.right = right

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.conv(image)
        return self.head((x.relu() if self.right else x.clamp(0, 0.9)).mean((1, 2)))


class Lists(nn.Module):
    """Take a list of feature maps of several sizes."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.convs, self.head = nn.ModuleList(nn.Conv2d(2, 4, 1) for _ in range(2)), nn.Linear(4, 3)
        self.right = right

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        order = maps if self.right else maps[::-1]
        sums = [conv(x).relu().mean((2, 3)) for conv, x in zip(self.convs, order, strict=True)]
        return self.head(sums[0] + 2 * sums[1])


class SeparateInputs(nn.Module):
    """Take the items of a list as separate inputs, as an ONNX file does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        return self.model(list(maps))


@dataclass(frozen=True)
class Case:
    """A model, its samples in the file's layout, and its dynamic axes."""

    kind: type[nn.Module]
    own: Arrays
    outputs: tuple[str, ...]
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    axes: dict[str, int | None] = field(default_factory=dict)
    """Expected batch axes of inputs and outputs; empty: axis 0 of all."""
    samples: int = 12
    calls: Arrays = field(default_factory=dict)
    """Samples as calls, if they differ from `own`."""

    def as_calls(self) -> Arrays:
        """Return twelve calls with different values."""
        drawn = {
            name: normal(12, *array.shape) if array.dtype.kind == "f" else np.stack([array] * 12)
            for name, array in self.own.items()
        }
        return self.calls or drawn

    def model(self, *, right: bool = True) -> nn.Module:
        torch.manual_seed(0)
        return self.kind(right=right).eval()

    def export(self, path: Path, *, right: bool = True) -> Path:
        arguments = self.example()
        names, model = list(arguments), self.model(right=right)
        with captured():
            torch.onnx.export(
                SeparateInputs(model) if self.kind is Lists else model,
                tuple(torch.from_numpy(np.array(array)) for array in arguments.values()),
                str(path), dynamo=False, opset_version=17, input_names=names,
                output_names=list(self.outputs), dynamic_axes=self.dynamic,
            )  # fmt: skip
        return path

    def example(self) -> Arrays:
        return {name: array[0] for name, array in self.calls.items()} or self.own


def edges(count: int) -> NDArray[np.int64]:
    return RANDOM.integers(0, 9, (*(() if count == 1 else (count,)), 2, 14))


B0, B1 = {0: "batch"}, {1: "batch"}

CASES = {
    "recurrent": Case(
        Recurrent, {"x": normal(12, 2, 4), "h0": normal(2, 12, 6)}, ("y", "h"),
        {"x": B0, "h0": B1, "y": B0, "h": B1}, {"x": 0, "h0": 1, "y": 0, "h": 1},
    ),
    "voice": Case(
        Voice,
        {"x": normal(12, 8), "state": normal(2, 12, 6), "sr": np.array(16000)}, ("p", "next"),
        {"x": B0, "state": B1, "p": B0, "next": B1},
        {"x": 0, "state": 1, "sr": None, "p": 0, "next": 1},
    ),
    "graph": Case(
        Graph, {"x": normal(9, 4), "edge_index": edges(1)}, ("y",),
        {"x": {0: "nodes"}, "edge_index": {1: "edges"}, "y": {0: "nodes"}},
        {"x": None, "edge_index": None, "y": None}, 1,
        {"x": normal(12, 9, 4), "edge_index": edges(12)},
    ),
    "masks": Case(
        Masks,
        {"image": normal(1, 3, 8, 8), "boxes": abs(normal(12, 4)) * 20,
         "orig_size": np.array([60, 80])}, ("masks",),
        {"boxes": {0: "boxes"}, "masks": {0: "boxes"}},
        {"image": None, "boxes": 0, "orig_size": None, "masks": 0}, 12,
        {"image": normal(12, 1, 3, 8, 8), "boxes": abs(normal(12, 5, 4)) * 20,
         "orig_size": np.tile([60, 80], (12, 1))},
    ),
    "empty cache": Case(
        Decoder, {"ids": RANDOM.integers(0, 20, (12, 3)), "past": normal(12, 0, 8)},
        ("logits", "keys"),
        {"ids": B0, "past": {0: "batch", 1: "past"}, "logits": B0, "keys": {0: "batch", 1: "all"}},
        calls={"ids": RANDOM.integers(0, 20, (12, 2, 3)), "past": normal(12, 2, 0, 8)},
    ),
    "full cache": Case(
        Decoder, {"ids": RANDOM.integers(0, 20, (12, 3)), "past": normal(12, 6, 8)},
        ("logits", "keys"),
        {"ids": B0, "past": {0: "batch", 1: "past"}, "logits": B0, "keys": {0: "batch", 1: "all"}},
        calls={"ids": RANDOM.integers(0, 20, (12, 2, 3)), "past": normal(12, 2, 6, 8)},
    ),
    "picture": Case(
        Picture, {"image": normal(3, 10, 10)}, ("scores",),
        {"image": {1: "height", 2: "width"}}, {"image": None, "scores": None}, 1,
        {"image": normal(12, 3, 10, 10)},
    ),
    "lists": Case(
        Lists, {"maps.0": normal(12, 2, 6, 6), "maps.1": normal(12, 2, 3, 3)}, ("y",),
        {"maps.0": B0, "maps.1": B0, "y": B0},
    ),
}  # fmt: skip


def recurrent_model() -> nn.Module:
    return CASES["recurrent"].model()


def graph_model() -> nn.Module:
    return CASES["graph"].model()
