"""A handwritten detector of bright squares, and files that miss some of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gate.policy.policy import Policy
from tests.measure import tiny
from tests.metrics import project

MODULE = '''
import torch
from torch import nn

SIDE, KEPT = 6, 4


class Squares(nn.Module):
    """Images (n, 1, 32, 32) to the boxes, scores and classes of four squares of 6 x 6 pixels.

    Squares at the left are of class 0, the others of class 1. A score of 0: there is none.
    """

    def __init__(self):
        super().__init__()
        self.match = nn.Conv2d(1, 1, SIDE)
        nn.init.constant_(self.match.weight, 1 / SIDE**2)
        nn.init.constant_(self.match.bias, -0.3)
        self.peak = nn.MaxPool2d(7, stride=1, padding=3)

    def forward(self, images):
        heat = torch.relu(self.match(images))
        heat = heat * (heat == self.peak(heat)).to(heat.dtype)  # non-maximum suppression
        scores, places = heat.flatten(1).topk(KEPT)
        width = heat.shape[3]
        y = torch.div(places, width, rounding_mode="floor").to(heat.dtype)
        x = (places % width).to(heat.dtype)
        boxes = torch.stack([x, y, x + SIDE, y + SIDE], dim=2)
        return boxes, scores, (x >= 13).to(heat.dtype)


def build():
    return Squares().eval()
'''

POLICY = (
    project.POLICY
    + """\
  - name: map50
    function: map
    options: {thresholds: [0.5]}
    max_drop: 0.2
    max_drop_from_champion: 0.2
    min: 0.8
    slices: [camera]
incumbent: {first_release: allow}
"""
)

CAMERAS = {"front": 0.9, "rear": 0.42}
"""Brightness of the squares in the images of each camera."""


class Detector:
    """Images, labels, policy and files in the current folder."""

    def __init__(self, folder: Path, *, samples: int = 400) -> None:
        (folder / "squares.py").write_text(MODULE)
        (folder / "policy.yaml").write_text(POLICY)
        Policy.from_file(folder / "policy.yaml")
        rng = np.random.default_rng(51)
        self.images = rng.uniform(0, 0.02, (samples, 1, 32, 32)).astype(np.float32)
        self.cameras = np.where(rng.random(samples) < 0.88, "front", "rear")
        self.labels = []
        for image, camera in zip(self.images, self.cameras, strict=True):
            boxes = []
            for column in (1, 19):  # far apart, so that squares do not overlap
                for row in rng.permutation([1, 19])[: rng.integers(1, 3)]:
                    x, y = column + int(rng.integers(6)), int(row + rng.integers(6))
                    image[0, y : y + 6, x : x + 6] += CAMERAS[camera] + rng.uniform(0, 0.05)
                    boxes.append([x, y, x + 6, y + 6])
            classes = [int(box[0] >= 13) for box in boxes]
            self.labels.append({"boxes": boxes, "classes": classes})
        np.save(folder / "images.npy", self.images)
        with (folder / "labels.jsonl").open("w") as stream:
            for label, camera in zip(self.labels, self.cameras.tolist(), strict=True):
                stream.write(json.dumps({"label": label, "camera": camera}) + "\n")
        sys.modules.pop("squares", None)
        sys.path.insert(0, str(folder))
        import squares

        sys.path.remove(str(folder))
        tiny.export(
            squares.build(),
            folder / "model.onnx",
            example={"images": self.images[:4]},
            outputs=("boxes", "scores", "classes"),
        )
        self._save("misses-dim.onnx", bias=-0.5)  # misses all squares of the rear camera
        self._save("misses-few.onnx", bias=-0.4302)  # misses its dimmest squares

    @staticmethod
    def _save(name: str, *, bias: float) -> None:
        model = onnx.load("model.onnx")
        (tensor,) = [t for t in model.graph.initializer if list(t.dims) == [1]
                     and t.name.endswith("bias")]  # fmt: skip
        tensor.CopyFrom(numpy_helper.from_array(np.array([bias], np.float32), tensor.name))
        onnx.save(model, name)

    def map50_of(self, file: str, camera: str | None = None) -> float:
        """Return mAP at IoU 0.5 from faster-coco-eval for the outputs of ONNX Runtime."""
        import onnxruntime as ort
        from faster_coco_eval import COCO, COCOeval_faster

        session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        boxes, scores, classes = session.run(None, {"images": self.images})
        truth, result = {"images": [], "annotations": [], "categories": [{"id": 0}, {"id": 1}]}, []
        for index in np.flatnonzero((self.cameras == camera) | (camera is None)).tolist():
            truth["images"].append({"id": index, "width": 32, "height": 32})
            label = self.labels[index]
            for box, kind in zip(label["boxes"], label["classes"], strict=True):
                truth["annotations"].append(
                    {"id": len(truth["annotations"]) + 1, "image_id": index, "category_id": kind,
                     "bbox": [box[0], box[1], 6, 6], "area": 36, "iscrowd": 0}
                )  # fmt: skip
            for box, score, kind in zip(boxes[index], scores[index], classes[index], strict=True):
                if score > 0:
                    result.append(
                        {"image_id": index, "category_id": int(kind), "score": float(score),
                         "bbox": [float(box[0]), float(box[1]), 6.0, 6.0]}
                    )  # fmt: skip
        gt = COCO(truth)
        peer = COCOeval_faster(gt, gt.loadRes(result), "bbox")
        peer.evaluate()
        peer.accumulate()
        peer.summarize()
        return float(peer.stats[1])


@pytest.fixture
def detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Detector:
    monkeypatch.chdir(tmp_path)
    return Detector(tmp_path)
