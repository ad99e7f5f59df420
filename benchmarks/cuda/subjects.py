"""The models of the matrix, with random weights from fixed seeds.

These are the pipeline's digits model, two models of torchvision, a transformer with two inputs, and
unusual ones. Nothing is downloaded.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from benchmarks import torchvision_models
from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.cuda.odd_nets import Grouped, Recurrent, TwoTexts, Volumes
from gate.model.loading import torchvision_model

DIGITS_SIDE, DIGITS_CLASSES = 64, 10
"""The image size and the number of classes in params.yaml."""


def _digits() -> nn.Module:
    return torchvision_model("resnet18", weights=None, num_classes=DIGITS_CLASSES)


def _texts(count: int, seed: int) -> Arrays:
    tokens = samples.tokens(count, 48, vocabulary=500, seed=seed)
    return {"tokens": tokens, "mask": (tokens != 0).astype(np.int64)}


MODELS: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "digits",
            _digits,
            lambda n, seed: {"input": samples.normalized(n, DIGITS_SIDE, seed=seed)},
        ),
        Architecture("two-texts", TwoTexts, _texts, axes={n: {1: "length"} for n in _texts(1, 0)}),
        Architecture(
            "grouped", Grouped, lambda n, seed: {"input": samples.normalized(n, 48, seed=seed)}
        ),
        Architecture(
            "recurrent",
            Recurrent,
            lambda n, seed: {"series": samples.series(n, 40, 12, seed=seed)},
            axes={"series": {1: "length"}},
        ),
        Architecture(
            "volumes",
            Volumes,
            lambda n, seed: {
                "volume": samples.normalized(n, 32, seed=seed)[:, :1, None]
                * np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None, None]
            },
        ),
        *map(torchvision_models.architecture, ("resnet50", "vit_b_16")),
    )
}
