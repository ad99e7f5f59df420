"""A two-stage detector of a few layers: proposals, non-maximum suppression, RoIAlign, a head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchvision.ops import nms, roi_align

from tests.probes import benches

SIDE, CELL = 32, 4


class TwoStage(nn.Module):
    """Boxes, scores and classes of one picture. A picture with a feature beyond `limit` has no
    proposals; so has each at many times the samples."""

    def __init__(
        self, *, limit: float = 8.0, threshold: float = 0.3, reshaped: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.objectness, self.deltas = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
        self.head = nn.Sequential(nn.Linear(8 * 9, 16), nn.ReLU())
        self.boxes, self.classes = nn.Linear(16, 4), nn.Linear(16, 3)
        self.limit, self.threshold, self.reshaped = limit, threshold, reshaped
        side = torch.arange(SIDE // CELL) * float(CELL)
        y, x = torch.meshgrid(side, side, indexing="ij")
        anchors = torch.stack([x, y, x + 9.0, y + 9.0], -1).reshape(-1, 4)
        self.register_buffer("anchors", anchors)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.body(image)
        scores = self.objectness(features).flatten()
        boxes = self.anchors + self.deltas(features)[0].flatten(1).transpose(0, 1).tanh() * 2.0
        kept = (scores < scores + 1.0) & (features.amax() < self.limit)
        boxes, scores = boxes[kept], scores[kept]
        boxes = boxes[nms(boxes, scores, self.threshold)]
        rois = torch.cat([torch.zeros_like(boxes[:, :1]), boxes], 1)
        pooled = roi_align(features, rois, 3, 1.0 / CELL, 2)
        rows = pooled.reshape(pooled.shape[0], -1) if self.reshaped else pooled.flatten(1)
        found = self.head(rows)
        probabilities, classes = self.classes(found).softmax(-1).max(-1)
        return boxes + self.boxes(found), probabilities, classes


def build() -> nn.Module:
    return TwoStage().eval()


def images(count: int = 8) -> np.ndarray:
    """In [0, 1), shape (count, 3, SIDE, SIDE)."""
    return np.random.default_rng(0).random((count, 3, SIDE, SIDE), dtype=np.float32)


def export(path: Path, **options: float) -> None:
    """The file with a batch of one, which fails without proposals in ONNX Runtime."""
    model = TwoStage(reshaped=True, **options)
    names = ("boxes", "scores", "classes")
    axes = {name: {0: "found"} for name in names}
    benches.export(model.eval(), path, {"image": images(1)}, batch=1, axes=axes, outputs=names)
