"""The models of the runs. The file is copied beside the samples: import torch and numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

SCALES = torch.logspace(0, -9, 10)
"""Of columns of an output: sums over one scale are often exact, and so equal in any order."""


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Linear(64, 10)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        head,
    ).eval()
    with torch.no_grad():
        head.bias -= model(torch.randn(64, 3, 16, 16)).mean(0)  # so that the winning class varies
        head.weight *= 20.0 * SCALES[:, None]
        head.bias *= 20.0 * SCALES
    return model


class HalfPrecision(nn.Module):
    """A model in float16 that takes and returns float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.half()).float()


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.SiLU())
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 5, 1)
        self.register_buffer("scales", SCALES[::3])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.backbone(x)
        scores = self.scores(features).flatten(2).transpose(1, 2).sigmoid()
        boxes = self.boxes(features).flatten(2).transpose(1, 2).exp() * self.scales
        return boxes, scores, scores.argmax(-1)


def build_detector() -> nn.Module:
    torch.manual_seed(1)
    return Detector().eval()


class Normalize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


def build_embedding() -> nn.Module:
    return nn.Sequential(*list(build_classifier())[:-1], nn.Linear(64, 32), Normalize()).eval()


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(input_ids))
        attention = self.query(x) @ self.key(x).transpose(1, 2) / 4.0
        attention = attention.masked_fill(attention_mask[:, None, :] == 0, -1e9).softmax(-1)
        x = x + attention @ self.value(x)
        weights = attention_mask[:, :, None].to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))


def build_text_encoder() -> nn.Module:
    torch.manual_seed(2)
    return TextEncoder().eval()


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, features: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([features, age[:, None]], 1))


def build_tabular() -> nn.Module:
    torch.manual_seed(3)
    return Tabular().eval()


class MixedPrecision(nn.Module):
    """Accumulates in float64 between two float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.first(x).double().cumsum(-1)
        return self.last((sums / (1.0 + sums.abs())).float())


def build_mixed_precision() -> nn.Module:
    torch.manual_seed(4)
    return MixedPrecision().eval()


def build_release() -> nn.Module:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    return nn.ModuleDict({"encoder": encoder, "head": nn.Linear(4, 3)}).eval()


def run_chain(
    parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    features = parts["encoder"](batch["input"])
    return {"boxes": parts["head"](features.mean(dim=(2, 3)))}


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(index)
        pixels = rng.normal(size=(3, 16, 16)).astype(np.float32)
        return torch.from_numpy(pixels), index % 10


def open_images() -> Images:
    return Images()
