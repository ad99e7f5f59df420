"""Count the layers that gate mend keeps in float32 where the plain conversion fails.

    .venv/bin/python -m benchmarks.mend_precision            # float16 and int8
    .venv/bin/python -m benchmarks.mend_precision float16 vit bert

Uses six nets of the corpus, changed so that some of their values exceed float16. Each file that
mend finds is checked again on new samples. Exit code 0 only if each passes there with at most a
fifth of its layers in float32.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from benchmarks.corpus import samples
from benchmarks.corpus.models.attention import TokenClassifier, VisionTransformer
from benchmarks.corpus.models.sequence import Recurrent
from benchmarks.corpus.models.spatial import Segmenter
from benchmarks.corpus.models.wiring import Backbone
from gate.api import check
from gate.data.samples import SampleSet
from gate.measure.job import EvaluationData, Reference
from gate.mend.plan import MendPlan
from gate.mend.recipe import Builder, calibration_of, example_of, halves
from gate.mend.search import Search, with_disabled
from gate.metrics.slices import Annotations
from gate.policy.defaults import ANSWERS_ONLY
from gate.policy.metrics import MetricPolicy
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage.files import temporary_folder

_SAMPLES, _FRESH_SAMPLES = {"float16": 128, "int8": 512}, {"float16": 64, "int8": 512}
_LARGE_VALUE = 1e5
"""A value beyond the range of float16, whose largest number is 65504."""

_CANDIDATES = 600
"""Candidates covered by the default budget of gate mend for float16 and int8."""

_MAX_FLOAT32_SHARE = 0.2
"""Highest allowed share of layers in float32."""

_MAX_DROP = 0.05
"""Highest allowed drop of the metric of an int8 file."""

_STEPS, _BATCH = 300, 64
"""Number of training steps and the batch size."""

Array = NDArray[np.generic]


class Amounts(nn.Module):
    """A classifier of amounts in cents whose first layer is followed by a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(),
            nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(),
            nn.Linear(32, 32), nn.Tanh(),
        )  # fmt: skip
        self.fc = nn.Linear(32, 6)

    def forward(self, amounts: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(amounts))


class Squares(nn.Module):
    """A detector of one square: class, box, and the area as a share of the image's area."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.reduce = Backbone(), nn.Conv2d(32, 4, 1)
        self.fc, self.box = nn.Linear(256, 3), nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.reduce(self.backbone(x)).flatten(1)
        boxes = torch.sigmoid(self.box(y))
        sides = boxes * 1024.0
        return self.fc(y), boxes, sides[:, 2] * sides[:, 3] / 1024.0**2


class Pressures(Recurrent):
    """A recurrent network for series in Pascal, which it normalizes first."""

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return super().forward((series - _LARGE_VALUE) / _LARGE_VALUE)


class Radiances(Segmenter):
    """A segmentation network for images in raw sensor counts, which it normalizes first."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image / _LARGE_VALUE)


def _draw_amounts(count: int, seed: int) -> tuple[Array, Array]:
    amounts = np.random.default_rng(seed).normal(0.0, 3.0 * _LARGE_VALUE, (count, 16))
    prices = np.random.default_rng(5).normal(size=(16, 6))
    return amounts.astype(np.float32), (amounts @ prices).argmax(1)


def _draw_quarters(count: int, seed: int) -> tuple[Array, Array]:
    """Return images and the index of the brightest quarter of each."""
    images = samples.normalized(count, 32, seed=seed)
    return images, images[:, 0].reshape(count, 2, 16, 2, 16).mean((2, 4)).reshape(-1, 4).argmax(1)


def _draw_texts(count: int, seed: int) -> tuple[Array, Array]:
    """Return texts and the most frequent of six kinds of tokens in each."""
    tokens = samples.tokens(count, 24, vocabulary=120, seed=seed)
    kinds = [((tokens % 6 == kind) & (tokens > 0)).sum(1) for kind in range(6)]
    return tokens, np.stack(kinds, axis=1).argmax(1)


def _draw_series(count: int, seed: int) -> tuple[Array, Array]:
    values = samples.series(count, 20, 5, seed=seed)
    return values * np.float32(_LARGE_VALUE) + np.float32(_LARGE_VALUE), values[:, -1].argmax(1)


def _draw_squares(count: int, seed: int) -> tuple[Array, Array]:
    """Return images with one square, and its color, center and sides."""
    rng, images = np.random.default_rng(seed), samples.normalized(count, 32, seed=seed)
    sides, colors = rng.integers(8, 15, count), rng.integers(3, size=count)
    corners = rng.integers(0, 32 - sides[:, None], (count, 2))
    for image, side, color, (top, left) in zip(images, sides, colors, corners, strict=True):
        image[:, top : top + side, left : left + side] = -2.0
        image[color, top : top + side, left : left + side] = 4.0
    centers = corners[:, ::-1] + sides[:, None] / 2
    return images, np.column_stack([colors, centers / 32, sides / 32, sides / 32])


def _draw_masks(count: int, seed: int) -> tuple[Array, Array]:
    """Return images and, for each pixel, the brightness of its surroundings in five steps."""
    images = samples.normalized(count, 32, seed=seed)
    smooth = functional.avg_pool2d(torch.from_numpy(images[:, :1]), 5, 1, 2)[:, 0]
    return images * np.float32(_LARGE_VALUE), (smooth + 2.5).clamp(0, 4).long().numpy()


_NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Array, Array]], str]] = {
    "wide": (Amounts, _draw_amounts, "accuracy"),
    "vit": (VisionTransformer, _draw_quarters, "accuracy"),
    "bert": (TokenClassifier, _draw_texts, "accuracy"),
    "lstm": (Pressures, _draw_series, "accuracy"),
    "detector": (Squares, _draw_squares, "benchmarks.mend_metric:hits"),
    "unet": (Radiances, _draw_masks, "iou"),
}
"""The network, a function that returns samples with labels, and the metric."""


@cache
def train_net(name: str) -> nn.Module:
    """Return the net after a short training.

    One unit in a perceptron of ViT and BERT gets large values, as in large transformers.
    """
    make, draw, _ = _NETS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().train()
        inputs, labels = map(torch.from_numpy, draw(_STEPS * _BATCH // 4, 1000))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(_STEPS):
            rows = torch.arange(step * _BATCH, (step + 1) * _BATCH) % len(inputs)
            loss = _loss(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    block = model.block1 if name == "vit" else model
    if name in ("vit", "bert"):
        with torch.no_grad():
            block.up.weight[0] *= 0.01
            block.up.bias[0] = _LARGE_VALUE
            block.down.weight[:, 0] = 0.1 / _LARGE_VALUE
            block.down.bias -= 0.1
    return model.eval()


def _loss(outputs: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return functional.cross_entropy(outputs, labels)
    scores, boxes, _ = outputs
    return functional.cross_entropy(scores, labels[:, 0].long()) + 20 * functional.l1_loss(
        boxes, labels[:, 1:].float()
    )


def build_policy(name: str, kind: str) -> Policy:
    """Return the policy for a precision.

    For float16 this is the built-in policy. For int8 it bounds the drop of the metric, and the
    outputs loosely.
    """
    if kind == "float16":
        return Policy.reduced(task="auto")
    function = _NETS[name][2]
    classes = function == "accuracy"
    bands = ConfidenceBands(over_1_percent=1.0, over_5_percent=0.5, over_10_percent=0.1)
    bounds = (
        Bounds(top1_agreement=0.9, confidence_bands=bands) if classes else Bounds(scaled_diff=1.0)
    )
    return Policy(
        task="classification" if classes else "tensors",
        precision="quantized",
        instruments=ANSWERS_ONLY,
        runtimes={"ort-cpu-optimized": RuntimePolicy(required="always", bounds=bounds)},
        metrics=(MetricPolicy(name="metric", function=function, max_drop=_MAX_DROP),),
    )


def convert(name: str, kind: str, folder: Path) -> tuple[str, bool]:
    """Mend the conversion of a net. Return a summary and whether it meets the limits."""
    reference = Reference(train_net(name), Source(factory="benchmarks.corpus"))
    policy = build_policy(name, kind)
    data = _draw_data(name, _SAMPLES[kind], 0, policy)
    parts = halves(data)
    names = ("scores", "boxes", "area") if name == "detector" else ("scores",)
    settings = ExportSettings(opset="auto", output_names=names)
    budget = _CANDIDATES * len(parts[0].samples) + len(parts[1].samples)
    search = Search(reference, policy, budget)
    example = example_of(data.samples, settings)
    builder = Builder(reference, example, None, calibration_of(parts[0]))
    outcome = MendPlan(search, builder, settings).run(parts, folder)
    winner, count = outcome.winner, len(search.trials)
    if winner is None or winner.candidate.float32 is None:
        closest = "" if search.best is None else search.best.title
        reasons = {trial.failure or trial.headline for trial in search.trials}
        return f"nothing ({outcome.ended_by}, {count} trials; {closest}; {reasons})", False
    recheck = check(
        winner.path,
        reference,
        _draw_data(name, _FRESH_SAMPLES[kind], 12, policy),
        with_disabled(policy, winner.candidate.disabled_optimizers),
    )
    layers = winner.candidate.float32
    verdict = recheck.decision.verdict.value
    reasons = ", ".join(f"{check_.label}: {check_.code}" for check_ in recheck.failures)
    line = (
        f"{winner.candidate.title}: {layers.count} layers in float32, {layers.share:.1%}, "
        f"{search.conversions} conversions, fresh samples {verdict} {reasons}"
    )
    return line, verdict == "PASS" and layers.share <= _MAX_FLOAT32_SHARE


def _draw_data(name: str, count: int, seed: int, policy: Policy) -> EvaluationData:
    inputs, labels = _NETS[name][1](count, seed)
    annotations = Annotations(labels) if policy.metrics else Annotations()
    return EvaluationData(
        SampleSet.from_arrays({"input": inputs}), annotations=annotations, batch_size=8
    )


def main(arguments: Sequence[str]) -> int:
    """Convert each net, print a line per net, and return the exit code."""
    kinds = [kind for kind in ("float16", "int8") if kind in arguments] or ["float16", "int8"]
    names = [name for name in _NETS if name in arguments] or list(_NETS)
    all_hold = True
    for kind in kinds:
        for name in names:
            begun = time.monotonic()
            with temporary_folder() as folder:
                line, holds = convert(name, kind, Path(folder))
            print(f"{kind} {name}: {line}, {time.monotonic() - begun:.0f} s", flush=True)
            all_hold = all_hold and holds
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
