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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.models.attention import TokenClassifier, VisionTransformer
from benchmarks.corpus.models.sequence import Recurrent
from benchmarks.corpus.models.spatial import Segmenter
from benchmarks.corpus.models.wiring import Detector
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import trained
from gate.api import check
from gate.data.samples import SampleSet
from gate.measure.job import EvaluationData, Reference
from gate.mend.plan import MendPlan
from gate.mend.recipe import Builder, calibration_of, example_of, halves
from gate.mend.search import Search, with_disabled
from gate.policy.defaults import ANSWERS_ONLY
from gate.policy.metrics import MetricPolicy
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage.files import temporary_folder

_SAMPLES, _FRESH = 128, 64
_LARGE = 1e5
"""Beyond float16, whose largest number is 65504."""

_CANDIDATES = 600
"""That the default budget of gate mend covers for float16 and int8."""

_MOST = 0.2
"""The share of layers in float32."""


class Amounts(nn.Module):
    """Scores of amounts in cents, which are normalized after the first layer."""

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


class Areas(Detector):
    """A detector that returns the area of each box in pixels as a share of the picture's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        scores, boxes, unit, _ = super().forward(x)
        sides = boxes * 1024.0
        return scores, boxes, unit, sides[:, 0] * sides[:, 1] / 1024.0**2


class LargeChannel(VisionTransformer):
    """With one channel of large values, as large transformers have."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.positions[..., 0] += 1000.0


class LargePositions(TokenClassifier):
    """With one channel of large values, which the scores do not read."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.positions.weight[:, 0] += 1000.0
            self.fc.weight[:, 0] = 0.0


class Pressures(Recurrent):
    """Series in Pascal, which are normalized first."""

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return super().forward((series - _LARGE) / _LARGE)


class Radiances(Segmenter):
    """Pictures in raw counts of a sensor, which are normalized first."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image / _LARGE)


def _scaled(name: str, make: type[nn.Module], scale: float, shift: float = 0.0) -> Architecture:
    """An architecture of the corpus whose samples have other units."""
    base = ARCHITECTURES[name]

    def draw(count: int, seed: int) -> Arrays:
        return {n: (a * scale + shift).astype(a.dtype) for n, a in base.draw(count, seed).items()}

    return replace(base, make=make, draw=draw)


def _amounts(count: int, seed: int) -> Arrays:
    drawn = np.random.default_rng(seed).normal(0.0, 3.0 * _LARGE, (count, 16))
    return {"amounts": drawn.astype(np.float32)}


_NETS = {
    "wide": Architecture("wide", Amounts, _amounts),
    "vit": replace(ARCHITECTURES["vit"], make=LargeChannel),
    "bert": replace(ARCHITECTURES["tokens"], make=LargePositions),
    "lstm": _scaled("recurrent", Pressures, _LARGE, _LARGE),
    "detector": replace(
        ARCHITECTURES["detector"], make=Areas, outputs=("scores", "boxes", "embedding", "area")
    ),
    "unet": _scaled("segmenter", Radiances, _LARGE),
}
_CLASSIFIERS = ("wide", "vit", "bert", "lstm")


def policy_of(name: str, kind: str) -> Policy:
    """Return the built-in policy of float16; of int8 one that bounds the drop of the accuracy of
    classifiers, and the outputs of the others."""
    if kind == "float16":
        return Policy.reduced(task="auto")
    classes = name in _CLASSIFIERS
    bands = ConfidenceBands(over_1_percent=1.0, over_5_percent=0.5, over_10_percent=0.1)
    bounds = (
        Bounds(top1_agreement=0.9, confidence_bands=bands) if classes else Bounds(scaled_diff=0.25)
    )
    accuracy = MetricPolicy(name="accuracy", function="accuracy", max_drop=0.1)
    return Policy(
        task="classification" if classes else "tensors",
        precision="quantized",
        instruments=ANSWERS_ONLY,
        runtimes={"ort-cpu-optimized": RuntimePolicy(required="always", bounds=bounds)},
        metrics=(accuracy,) if classes else (),
    )


def convert(name: str, kind: str, folder: Path) -> tuple[str, bool]:
    """Return a line on what was found, and whether it holds the bounds of this program."""
    architecture, model = _NETS[name], trained(_NETS[name])
    reference = Reference(model, Source(factory="benchmarks.corpus"))
    policy = policy_of(name, kind)
    data = _data(architecture, model, _SAMPLES, 0, policy)
    samples = halves(data)
    settings = ExportSettings(opset="auto")
    budget = _CANDIDATES * len(samples[0].samples) + len(samples[1].samples)
    search = Search(reference, policy, budget)
    example = example_of(data.samples, settings)
    builder = Builder(reference, example, None, calibration_of(samples[0]))
    outcome = MendPlan(search, builder, settings).run(samples, folder)
    winner, count = outcome.winner, len(search.trials)
    if winner is None or winner.candidate.float32 is None:
        closest = "" if search.best is None else search.best.title
        reasons = {trial.failure or trial.headline for trial in search.trials}
        return f"nothing ({outcome.ended_by}, {count} trials; {closest}; {reasons})", False
    again = check(
        winner.path,
        reference,
        _data(architecture, model, _FRESH, 12, policy),
        with_disabled(policy, winner.candidate.disabled_optimizers),
    )
    layers = winner.candidate.float32
    verdict = again.decision.verdict.value
    line = (
        f"{winner.candidate.title}: {layers.count} layers in float32, {layers.share:.1%}, "
        f"{search.conversions} conversions, fresh samples {verdict}"
    )
    return line, verdict == "PASS" and layers.share <= _MOST


def _data(
    architecture: Architecture, model: nn.Module, count: int, seed: int, policy: Policy
) -> EvaluationData:
    samples = SampleSet.from_arrays(architecture.draw(count, seed))
    if not policy.metrics:
        return EvaluationData(samples, batch_size=8)
    with torch.no_grad():
        scores = model(*(torch.from_numpy(array) for array in samples.whole().values()))
    labels = scores.argmax(1).numpy()
    digest = SampleSet.from_arrays({"label": labels}).digest()
    return EvaluationData(samples, labels, digest, batch_size=8)


def main(words: Sequence[str]) -> int:
    """Convert each net, print a line for each, and return the exit code."""
    kinds = [kind for kind in ("float16", "int8") if kind in words] or ["float16", "int8"]
    names = [name for name in _NETS if name in words] or list(_NETS)
    held = True
    for kind in kinds:
        for name in names:
            begun = time.monotonic()
            with temporary_folder() as folder:
                line, is_held = convert(name, kind, Path(folder))
            print(f"{kind} {name}: {line}, {time.monotonic() - begun:.0f} s", flush=True)
            held = held and is_held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
